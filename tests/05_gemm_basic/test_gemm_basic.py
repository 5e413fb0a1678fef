"""Stage 05 on the emulator: the first product, what the compiler made of it, and the mistakes of its README."""

import re
from functools import cache

import pytest
import torch

from common.build import Kernel
from common.emulator import BarrierFault, MissingFence, TensorMemoryFault
from common.emulator.hardware.instruction_descriptor import InstructionDescriptor, MmaForm
from common.emulator.hardware.smem_descriptor import SmemDescriptor
from common.emulator.hardware.swizzle import Swizzle
from common.launch_spec import launch_shape
from common.stage import BadSize
from common.verify import Mismatch, make_arguments, poisoned, verify_stage
from tests.sass import innermost_loop, instructions, opcodes
from tests.stages import load_stage, small_integer_operands

STAGE = load_stage(5)
DEFAULT = {"dtype": "float16"}
ODD = {"dtype": "bfloat16", "m": 131, "n": 67, "k": 72}  # rows of D that no tensor map can express; K ends in a block
SINGLE_TILE = {"dtype": "float16", "step": "single-tile"}
LONG = {"dtype": "bfloat16", "step": "k-loop", "n": 8, "k": 4104}


@cache
def built(**sizes) -> Kernel:
    return STAGE.build(**sizes)


@pytest.mark.parametrize("sizes", [DEFAULT, ODD, SINGLE_TILE, LONG], ids=str)
def test_verifies_under_every_schedule(sizes: dict) -> None:
    verify_stage(STAGE, STAGE.config(**sizes), kernel=built(**sizes))


@pytest.mark.parametrize("sizes", [DEFAULT, ODD], ids=str)
def test_small_integers_come_out_exact(sizes: dict) -> None:
    """Every sum of products of -1, 0 and 1 is small enough for the type of D: there is nothing to round."""
    config = STAGE.config(**sizes)
    a, b = small_integer_operands(config, seed=1)
    d = poisoned((config.m, config.n), config.torch_dtype)
    built(**sizes)(a.to(config.torch_dtype), b.to(config.torch_dtype), d)
    assert torch.equal(d.long(), a @ b.t())


@pytest.mark.parametrize(("k", "dtype"), [(63, "float16"), (100, "bfloat16")])
def test_rows_that_tma_cannot_address_are_refused_with_the_rule(k: int, dtype: str) -> None:
    with pytest.raises(BadSize, match="multiple of 16 bytes, so k a multiple of 8"):
        STAGE.config(m=8, n=8, k=k, dtype=dtype)


@pytest.mark.parametrize(
    ("step", "sizes"), [("single-tile", {"k": 72}), ("single-tile", {"m": 129}), ("k-loop", {"n": 136})]
)
def test_a_step_refuses_more_than_it_shows(step: str, sizes: dict) -> None:
    with pytest.raises(BadSize, match=f"--step {step} shows one tile"):
        STAGE.config(step=step, **sizes)


# -- what the compiler made of it --------------------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", [DEFAULT, ODD], ids=str)
def test_nothing_spills_and_no_array_lives_in_memory(sizes: dict) -> None:
    resources = built(**sizes).resources
    assert resources.spill_store_bytes == resources.spill_load_bytes == resources.stack_bytes == 0
    assert not {"LDL", "STL"} & {name.split(".")[0] for name in opcodes(instructions(built(**sizes).sass()))}


def test_the_units_of_the_chip_do_the_work() -> None:
    names = opcodes(instructions(built(**DEFAULT).sass()))
    assert names.count("UTMALDG.2D") == 2  # a box of A, a box of B
    assert names.count("UTCHMMA") == 4  # 64 of K, 16 at a time
    assert names.count("LDTM.x64") == names.count("UTMASTG.2D") == 2  # the two chunks of a tile
    assert names.count("STS.128") == 16  # 64 sums of a lane, as 128 bytes, twice


def test_one_thread_issues_a_block_in_few_instructions() -> None:
    """31 for four products and two loads, with the compiler that is pinned: 8 for a product."""
    loop = innermost_loop(built(**DEFAULT).sass(), "UTCHMMA")
    assert len(loop) <= 34
    names = opcodes(loop)
    assert names.count("UTCHMMA") == 4 and names.count("UTMALDG.2D") == 2 and names.count("UTCBAR") == 1
    assert not any(name.startswith(("MUFU", "I2F", "CALL")) for name in names), "an integer division"


def test_no_loop_serialises_the_copy_engine() -> None:
    """What the compiler does when it cannot tell that one thread asks."""
    sass = built(**DEFAULT).sass()
    assert innermost_loop(sass, "UTMALDG") == innermost_loop(sass, "UTCHMMA")
    assert innermost_loop(sass, "UTMASTG") == []


@pytest.mark.parametrize("sizes", [DEFAULT, ODD], ids=str)
def test_no_access_to_shared_memory_has_a_bank_conflict(sizes: dict) -> None:
    inputs, outputs = make_arguments(STAGE, STAGE.config(**sizes), seed=0)
    figures = built(**sizes)(*inputs, *outputs, schedule="early").counters.total()
    assert figures.wavefronts == figures.ideal_wavefronts > 0


def test_three_ctas_fit_on_an_sm() -> None:
    inputs, outputs = make_arguments(STAGE, STAGE.config(**DEFAULT), seed=0)
    shape = launch_shape(built(**DEFAULT).launch_spec, (*inputs, *outputs))
    assert 3 * (shape.shared_bytes + 1024) <= 228 * 1024 and 3 * 128 <= 512
    assert 3 * 128 * built(**DEFAULT).resources.registers <= 64 * 1024
    ptx = built(**DEFAULT).ptx
    assert ptx.count("tcgen05.relinquish_alloc_permit") == 1
    assert ptx.index("tcgen05.alloc") < ptx.index("tcgen05.relinquish_alloc_permit") < ptx.index("tcgen05.mma")


@pytest.mark.parametrize(("sizes", "bits", "element"), [(DEFAULT, 0x8200010, "f16"), (ODD, 0x8200490, "bf16")])
def test_the_instruction_descriptor_reads_as_the_readme_says(sizes: dict, bits: int, element: str) -> None:
    descriptor = InstructionDescriptor.from_bits(bits, MmaForm("f16"))
    assert (descriptor.m, descriptor.n, descriptor.k) == (128, 128, 16)
    assert (descriptor.a, descriptor.b, descriptor.d) == (element, element, "f32")
    assert not descriptor.transpose_a and not descriptor.transpose_b
    assert f"{bits:#x}" in built(**sizes).sass()


@pytest.mark.parametrize(("address", "bits"), [(0x800, 0x4000404000000080), (0x4800, 0x4000404000000480)])
def test_the_operand_descriptors_read_as_the_readme_says(address: int, bits: int) -> None:
    """Of A and of B; the high half, which the compiler keeps, is the same."""
    assert SmemDescriptor.from_bits(bits) == SmemDescriptor(address, 0, 1024, 0, Swizzle.B128)
    assert re.search(rf"UMOV UR\d+, {bits >> 32:#x}", built(**DEFAULT).sass())


# -- the mistakes of the README ----------------------------------------------------------------------------------------

FULL_WAIT = ("            full.wait(stage, phase)\n", "")
EMPTY_WAIT = ("                    empty.wait(0, phase)\n", "")
FLIP = ("                    phase = phase ^ 1\n", "")
FINISHED_WAIT = ("        finished.wait(0, 0)\n", "")
READ_WAIT = ("        T.ptx.cp.async_.bulk.wait_group.read(0)\n", "")
ALWAYS, NEVER = (("accum=(block != 0)", f"accum={flag}") for flag in (True, False))
EVERY_LANE = (
    "            if T.cuda.elect_sync():\n                for block in",
    "            if lane < LANES:\n                for block in",
)
NO_DEALLOC = (
    "            T.ptx.tcgen05.dealloc.cta_group__1",
    "            if m == 0:\n                T.ptx.tcgen05.dealloc.cta_group__1",
)
START = (
    "        T.cuda.cta_sync()\n        T.ptx.tcgen05.fence__after_thread_sync()\n        first_column",
    "        T.ptx.tcgen05.fence__after_thread_sync()\n        first_column",
)
END = ("        T.cuda.cta_sync()\n        if warp == 0:\n", "        if warp == 0:\n")
CHUNK_FENCE = "            T.ptx.fence.proxy.async_.shared__cta()\n            T.cuda.warp_sync()\n"
NO_EFFECT = [  # every other fence, and wait::ld
    ("        T.ptx.fence.mbarrier_init.release.cluster()\n        T.ptx.fence.proxy.async_.shared__cta()\n", ""),
    ("            T.ptx.tcgen05.fence__after_thread_sync()\n            # Nobody", "            # Nobody"),
    ("            T.ptx.tcgen05.wait__ld.sync.aligned()\n", ""),
    (
        "        T.ptx.tcgen05.fence__before_thread_sync()\n" + START[0],
        "        T.cuda.cta_sync()\n        first_column",
    ),
    (
        "        finished.wait(0, 0)\n        T.ptx.tcgen05.fence__after_thread_sync()\n",
        "        finished.wait(0, 0)\n",
    ),
    ("        T.ptx.tcgen05.fence__before_thread_sync()\n" + END[0], END[0]),
]


def verify_with(*mistakes: tuple[str, str], schedule: str = "late", seeds: range = range(1), k: int = 192) -> None:
    """One tile, three blocks. Raises what the first of the seeds raises that finds the mistake."""
    stage = load_stage(5, *mistakes)
    config = stage.config(dtype="float16", m=128, n=128, k=k)
    kernel = stage.build(dtype="float16", m=128, n=128, k=k)
    for seed in seeds:
        verify_stage(stage, config, [schedule], seed=seed, kernel=kernel)


@pytest.mark.parametrize("schedule", ["late", "random"])
@pytest.mark.parametrize(
    ("mistake", "error"),
    [(FULL_WAIT, (BarrierFault, Mismatch)), (EMPTY_WAIT, Mismatch), (FINISHED_WAIT, Mismatch)],
    ids=["full", "empty", "finished"],
)
def test_a_missing_wait_shows_unless_operations_are_immediate(mistake, error, schedule: str) -> None:
    verify_with(mistake, schedule="early")
    with pytest.raises(error):
        verify_with(mistake, schedule=schedule, seeds=range(8))


def test_late_lets_a_later_operation_overtake_an_earlier_one() -> None:
    """Without `full.wait` the second block is asked for before the first has landed, without `finished.wait` the sums
    are read before they are there, and without `empty.wait` the next block lands before the products of this one."""
    with pytest.raises(BarrierFault, match="more arrivals than the mbarrier expects"):
        verify_with(FULL_WAIT)
    with pytest.raises(Mismatch, match="is nan"):
        verify_with(FINISHED_WAIT)
    with pytest.raises(Mismatch, match=r"output\[0, 0\] is -?\d"):
        verify_with(EMPTY_WAIT)


def test_a_parity_that_is_not_flipped_does_not_wait() -> None:
    with pytest.raises(BarrierFault, match="more arrivals than the mbarrier expects"):
        verify_with(FLIP)


def test_shared_memory_stays_until_a_store_that_nobody_waits_for_has_read_it() -> None:
    verify_with(READ_WAIT)


@pytest.mark.parametrize(
    ("mistake", "error", "message"),
    [
        (START, BarrierFault, "there is no mbarrier"),
        (END, TensorMemoryFault, "after these columns have been deallocated"),
        (NO_DEALLOC, TensorMemoryFault, "exits without tcgen05.dealloc"),
        (EVERY_LANE, BarrierFault, "more arrivals than the mbarrier expects"),
    ],
    ids=["start", "end", "dealloc", "elect"],
)
def test_what_all_threads_must_agree_on(mistake, error, message: str) -> None:
    with pytest.raises(error, match=message):
        verify_with(mistake)


def test_sums_that_nobody_clears_start_as_poison() -> None:
    with pytest.raises(Mismatch, match="is nan"):
        verify_with(ALWAYS)


def test_without_accumulation_the_last_block_is_all_there_is() -> None:
    verify_with(NEVER, k=64)
    with pytest.raises(Mismatch):
        verify_with(NEVER)


@pytest.mark.parametrize("schedule", ["late", "early", "random"])
def test_without_the_proxy_fence_the_store_must_not_read_what_the_threads_wrote(schedule: str) -> None:
    with pytest.raises(MissingFence, match=r"the TMA store reads shared d_ring\[0\]"):
        verify_with((CHUNK_FENCE, "            T.cuda.warp_sync()\n"), schedule=schedule)


@pytest.mark.parametrize("schedule", ["late", "early", "random"])
def test_other_fences_and_wait_ld_change_no_value_here(schedule: str) -> None:
    """What the fidelity table says: memory is sequentially consistent, and registers are complete when used."""
    verify_with(*NO_EFFECT, schedule=schedule)
