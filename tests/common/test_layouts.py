"""TIRx and the emulator agree about where elements live, and a disagreement is noticed."""

import re
from dataclasses import replace

import numpy as np
import pytest
from tvm.backend.cuda.lang.pipeline import TCGen05Bar
from tvm.backend.cuda.tile_primitive.tma_utils import mma_shared_layout
from tvm.script import tirx as T
from tvm.script.tirx import tile as Tx
from tvm.tirx.layout import R, S, TileLayout, laneid, tcgen05_atom_layout, tmem_datapath_layout, warpid

from common.build import build
from common.emulator.hardware.smem_descriptor import SmemDescriptor
from common.emulator.hardware.swizzle import Swizzle
from common.layouts import (
    DATA_PATHS,
    FRAGMENTS,
    LayoutMismatch,
    Operand,
    data_path_view,
    fragment_view,
    matrix_fragment_view,
    operands,
    places,
    tile_views,
    wavefronts,
)

SIDE = 128
SWIZZLED = {
    name: mma_shared_layout("float16", mode, (1, SIDE, SIDE)) for name, mode in (("32B", 1), ("64B", 2), ("128B", 3))
}
PLAIN = {"none": TileLayout(S[(1, SIDE, SIDE) : (SIDE * SIDE, SIDE, 1)])}
OPERANDS = {f"{'MN' if o.mn_major else 'K'}-{o.swizzle.name}": o for o in operands()}

SAMPLES = {
    "shard, replica, offset": (
        TileLayout(S[(8, 2, 4, 2) : (4 @ laneid, 1 @ warpid, 1 @ laneid, 1)] + R[2 : 4 @ warpid] + 5 @ warpid),
        (8, 16),
    ),
    "swizzle": (SWIZZLED["64B"], (1, SIDE, SIDE)),
    "data path F, upper half": (tmem_datapath_layout("F", 64, 32, sub_slab=1), (64, 32)),
    "packed fragment": (tcgen05_atom_layout("16x128b", (64, 32), "float16"), (64, 32)),
}


@pytest.mark.parametrize("name", SAMPLES)
def test_places_is_what_tirx_computes_element_by_element(name: str) -> None:
    layout, shape = SAMPLES[name]
    axes = places(layout, shape)
    generator = np.random.default_rng(0)
    for _ in range(40):
        at = tuple(int(generator.integers(extent)) for extent in shape)
        expected = {axis: int(value) for axis, value in layout.apply(*at, shape=shape).items()}
        assert {axis: int(values[at]) for axis, values in axes.items()} == expected


@pytest.mark.parametrize("layout", [*PLAIN, *SWIZZLED])
def test_tiles_are_where_the_copy_engine_puts_them(layout: str) -> None:
    (view,) = tile_views({layout: {**PLAIN, **SWIZZLED}[layout]}, SIDE)
    assert view.emulated.shape == (SIDE, SIDE)
    assert "agree on all" in view.check()


@pytest.mark.parametrize("name", OPERANDS)
def test_operands_are_where_their_descriptors_lead(name: str) -> None:
    assert "agree on all 8192" in OPERANDS[name].view().check()


@pytest.mark.parametrize("path", DATA_PATHS, ids=[path[0] for path in DATA_PATHS])
def test_accumulators_are_where_the_tensor_core_writes_them(path: tuple) -> None:
    assert "agree on all" in data_path_view(*path).check()


@pytest.mark.parametrize("name", FRAGMENTS)
def test_fragments_are_what_tcgen05_ld_loads(name: str) -> None:
    assert "agree on all" in fragment_view(name).check()


@pytest.mark.parametrize("name", ["ldmatrix", "ldmatrix.trans"])
def test_blocks_are_where_ldmatrix_loads_them(name: str) -> None:
    assert "agree on all 64" in matrix_fragment_view(name).check()


def test_a_disagreement_names_the_first_element() -> None:
    view = fragment_view("16x64b")
    moved = view.emulated.copy()
    moved[3, 5] += 1
    with pytest.raises(LayoutMismatch, match=r"element \(3, 5\)"):
        replace(view, emulated=moved).check()


def test_a_swapped_descriptor_is_a_disagreement(monkeypatch) -> None:
    right = Operand.descriptor

    def swapped(self: Operand, step: int) -> SmemDescriptor:
        good = right(self, step)
        return replace(good, lbo=good.sbo, sbo=good.lbo)

    monkeypatch.setattr(Operand, "descriptor", swapped)
    with pytest.raises(LayoutMismatch):
        OPERANDS["MN-B64"].view().check()


@pytest.mark.parametrize(("layout", "count"), [("none", 8), ("32B", 1), ("64B", 1), ("128B", 1)])
def test_wavefronts_of_eight_rows(layout: str, count: int) -> None:
    offsets = 2 * places({**PLAIN, **SWIZZLED}[layout], (1, SIDE, SIDE))["m"][0]
    assert wavefronts(offsets) == count


def multiply(operand: Operand):
    """A kernel whose one MMA takes `operand` as B."""
    SHAPE, LAYOUT, MN_MAJOR = operand.shape, operand.layout, operand.mn_major

    @T.prim_func
    def kernel(out: T.Buffer((1,), "float32")):
        T.device_entry()
        T.cta_id([1])
        T.warpgroup_id([1])
        warp = T.warp_id_in_wg([4])
        T.lane_id([32])
        T.thread_id([128])
        T.thread_id_in_wg([128])
        pool = T.SMEMPool()
        done = TCGen05Bar(pool, 1)
        a = pool.alloc_tcgen05_mma_AB((128, 64), "float16")
        b = pool.alloc(SHAPE, "float16", layout=LAYOUT, align=1024)
        tmem = T.TMEMPool(pool, total_cols=512, cta_group=1, alloc_warp=0)
        d = tmem.alloc((128, 128), "float32")
        tmem.commit()
        pool.commit()
        done.init(1)
        T.cuda.cta_sync()
        if warp == 0:
            if T.cuda.elect_sync():
                Tx.gemm_async(d[:, :], a[:, :], b[:, :], transB=MN_MAJOR, accum=False)
                done.arrive(0)
        done.wait(0, 0)
        T.cuda.cta_sync()
        tmem.dealloc()

    return kernel


@pytest.mark.parametrize("name", OPERANDS)
def test_descriptors_are_those_that_tirx_generates(name: str) -> None:
    operand = OPERANDS[name]
    source = build(multiply(operand)).cuda_source
    call = re.search(r"encode_matrix_descriptor\(\(&\(descB_ptr\[0\]\)\), .*?, (\d+), (\d+), (\d+)\);", source)
    lbo, sbo, mode = (int(text) for text in call.groups())
    ours = operand.descriptor(0)
    assert mode == int(operand.swizzle)
    if operand.mn_major and operand.swizzle is Swizzle.NONE:
        # Here TIRx 0.27.0.post1 swaps the two strides, against CUTLASS's canonical layout. No stage uses this one.
        lbo, sbo = sbo, lbo
    assert (16 * lbo, 16 * sbo) == (ours.lbo, ours.sbo)
