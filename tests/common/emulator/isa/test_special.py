"""Fences, cache hints, activemask, trap, nanosleep and other instructions of `isa.special`."""

from __future__ import annotations

import numpy as np
import pytest

from common.emulator import InvalidAddress, Misaligned, OutOfBounds, ProgramTrap, UnsupportedInstruction
from tests.common.emulator.ptx_kernels import run_lanes

LINES = ".global .align 128 .u32 lines[64];"
SCOPES = ("cta", "cluster", "gpu", "sys")
PROXIES = ("alias", "async", "async.global", "async.shared::cta", "async.shared::cluster")
WITHOUT_EFFECT = [
    *(f"fence.{scope}" for scope in SCOPES),
    *(f"fence.{order}.{scope}" for order in ("sc", "acq_rel", "acquire", "release") for scope in SCOPES),
    "fence.acquire.sync_restrict::shared::cluster.cluster",
    "fence.release.sync_restrict::shared::cta.cluster",
    "fence.mbarrier_init.release.cluster",
    *(f"{opcode}.proxy.{proxy}" for opcode in ("fence", "membar") for proxy in PROXIES),
    *(f"fence.proxy.tensormap::generic.release.{scope}" for scope in SCOPES),
    *(f"fence.proxy.tensormap::generic.acquire.{scope} [%at], 128" for scope in SCOPES),
    "fence.proxy.async::generic.acquire.sync_restrict::shared::cluster.cluster",
    "fence.proxy.async::generic.release.sync_restrict::shared::cta.cluster",
    "membar.cta",
    "membar.gl",
    "membar.sys",
    "prefetch.global.L1 [%at]",
    "prefetch.global.L2 [%at+4]",
    "prefetch.local.L1 [%at]",
    "prefetch.L2 [%at]",
    "prefetch.global.L2::evict_last [%at]",
    "prefetch.global.L2::evict_normal [%at]",
    "prefetch.L2::evict_last [%at]",
    "prefetch.tensormap [%at]",
    "prefetch.param.tensormap [%at]",
    "prefetch.const.tensormap [%at]",
    "prefetchu.L1 [%at]",
    "applypriority.global.L2::evict_normal [%at], 128",
    "applypriority.L2::evict_normal [%at], 128",
    "griddepcontrol.launch_dependents",
    "griddepcontrol.wait",
    "pmevent 15",
    "pmevent.mask 0xFFFF",
    "nanosleep.u32 100",
    "nanosleep.u32 %a",
]


@pytest.mark.parametrize("text", WITHOUT_EFFECT)
def test_instructions_without_an_effect(text: str) -> None:
    p = np.arange(64) % 2 == 0
    body = f".reg .b64 %at; mov.u64 %at, lines; {text}; @%p {text}; add.u32 %d, %a, 1;"
    values = np.arange(64, dtype=np.uint32)
    result = run_lanes(body, {"a": ("u32", values), "p": ("pred", p)}, {"d": "u32"}, variables=LINES)
    np.testing.assert_array_equal(result["d"], values + 1)


@pytest.mark.parametrize(
    "text",
    [
        "createpolicy.fractional.L2::evict_last.b64 %d, 1.0",
        "createpolicy.fractional.L2::evict_first.b64 %d",
        "createpolicy.fractional.L2::evict_last.L2::evict_unchanged.b64 %d, 0.5",
        "createpolicy.fractional.L2::evict_normal.b64 %d, 0f3F800000",
        "createpolicy.range.L2::evict_last.L2::evict_first.b64 %d, [%at], 64, 128",
        "createpolicy.range.global.L2::evict_unchanged.b64 %d, [%at], 64, 128",
        "createpolicy.cvt.L2.b64 %d, %at",
    ],
)
def test_cache_policies(text: str) -> None:
    body = f".reg .b64 %at; mov.u64 %at, lines; {text}; ld.global.L2::cache_hint.u32 %v, [%at], %d;"
    result = run_lanes(body, {}, {"d": "u64", "v": "u32"}, variables=LINES.replace(";", " = {3};"))
    assert (result["v"] == 3).all()
    assert (result["d"] == result["d"][0]).all()


def test_discard_leaves_an_indeterminate_value() -> None:
    body = """
    .reg .b64 %at; mov.u64 %at, lines;
    @%p discard.global.L2 [%at+128], 128;
    ld.global.u32 %d, [%at+124]; ld.global.u32 %e, [%at+128]; ld.global.u32 %f, [%at+252];"""
    p = np.arange(32) == 3
    variables = LINES.replace(";", f" = {{{', '.join(['9'] * 64)}}};")
    result = run_lanes(body, {"p": ("pred", p)}, dict.fromkeys("def", "u32"), variables=variables)
    assert (result["d"] == 9).all() and (result["e"] != 9).all() and (result["f"] != 9).all()


@pytest.mark.parametrize("text", ["discard.global.L2 [%at], 128", "applypriority.L2::evict_normal [%at], 128"])
def test_lines_must_be_aligned_and_exist(text: str) -> None:
    with pytest.raises(Misaligned):
        run_lanes(f".reg .b64 %at; mov.u64 %at, lines+64; {text};", {}, {"d": "u32"}, variables=LINES)
    with pytest.raises(OutOfBounds):
        run_lanes(f".reg .b64 %at; mov.u64 %at, lines+256; {text};", {}, {"d": "u32"}, variables=LINES)


def test_discard_of_constants_is_refused() -> None:
    variables = ".const .align 128 .u32 fixed[32] = {1};"
    with pytest.raises(InvalidAddress, match="read-only"):
        run_lanes(".reg .b64 %at; mov.u64 %at, fixed; discard.L2 [%at], 128;", {}, {"d": "u32"}, variables=variables)


def test_activemask_shows_the_lanes_that_execute_it() -> None:
    go = np.arange(64) % 5 == 0
    result = run_lanes("mov.b32 %d, 0; activemask.b32 %all; @%go activemask.b32 %d;", {"go": ("pred", go)},
                       {"d": "u32", "all": "u32"})  # fmt: skip
    masks = [sum(1 << lane for lane in range(32) if go[warp * 32 + lane]) for warp in range(2)]
    assert (result["all"] == 0xFFFF_FFFF).all()
    np.testing.assert_array_equal(result["d"], np.where(go, np.repeat(masks, 32), 0))


def test_activemask_of_a_partial_warp() -> None:
    assert (run_lanes("activemask.b32 %d;", {}, {"d": "u32"}, lanes=37)["d"][32:] == 0x1F).all()


@pytest.mark.parametrize("opcode", ["trap", "brkpt"])
def test_trap_names_the_threads(opcode: str) -> None:
    p = np.arange(64) == 37
    with pytest.raises(ProgramTrap, match=opcode) as caught:
        run_lanes(f"@%p {opcode};", {"p": ("pred", p)}, {"d": "u32"})
    assert caught.value.lanes == (37,)
    assert "PTX line" in str(caught.value)


def test_a_trap_that_no_thread_reaches_does_nothing() -> None:
    result = run_lanes("@%p trap; mov.b32 %d, 1;", {"p": ("pred", np.zeros(64, bool))}, {"d": "u32"})
    assert (result["d"] == 1).all()


def test_sleeping_lets_another_warp_answer() -> None:
    """Warp 1 polls with nanosleep for a flag that warp 0 sets after it: under `late` warp 1 runs first."""
    body = """
    .reg .b64 %at; .reg .pred %first, %again; .reg .b32 %warp;
    mov.u64 %at, lines;
    shr.u32 %warp, %lane_, 5;
    setp.eq.u32 %first, %warp, 0;
    @%first bra SET;
POLL:
    nanosleep.u32 20;
    ld.volatile.global.u32 %d, [%at];
    setp.eq.u32 %again, %d, 0;
    @%again bra POLL;
    bra JOIN;
SET:
    st.volatile.global.u32 [%at], 6;
    mov.b32 %d, 6;
JOIN:"""
    for schedule in ("late", "early", "random"):
        result = run_lanes(body, {}, {"d": "u32"}, lanes=64, schedule=schedule, variables=LINES)
        assert (result["d"] == 6).all()


def test_sleeping_many_times_in_a_row_ends() -> None:
    body = """
    .reg .pred %again;
    mov.b32 %d, 0;
LOOP:
    nanosleep.u32 20;
    add.u32 %d, %d, 1;
    setp.lt.u32 %again, %d, 500;
    @%again bra LOOP;"""
    assert (run_lanes(body, {}, {"d": "u32"})["d"] == 500).all()


@pytest.mark.parametrize(
    "text",
    [
        "fence",
        "fence.sc",
        "fence.relaxed.gpu",
        "fence.gl",
        "fence.mbarrier_init.acquire.cluster",
        "fence.mbarrier_init.release.gpu",
        "fence.proxy.tensormap",
        "fence.proxy.async.local",
        "fence.proxy.tensormap::generic.acquire.gpu",
        "fence.proxy.tensormap::generic.acquire.gpu [%at], 64",
        "fence.acquire.sync_restrict::shared::cta.cluster",
        "fence.cta [%at], 128",
        "membar.gpu",
        "prefetch.shared.L1 [%at]",
        "prefetch.global.L3 [%at]",
        "prefetch.local.L2::evict_last [%at]",
        "prefetchu.L2 [%at]",
        "applypriority.global.L2::evict_last [%at], 128",
        "discard.global.L1 [%at], 128",
        "discard.global.L2 [%at], 64",
        "createpolicy.fractional.L1::evict_last.b64 %at",
        "createpolicy.range.L2::evict_last.b64 %at, [%at], 64",
        "createpolicy.fractional.L2::evict_last.L2::evict_last.b64 %at",
        "griddepcontrol",
        "activemask.u32 %a",
        "trap.exit",
        "nanosleep %a",
        "pmevent 16",
        "pmevent.mask 65536",
        "stacksave.u64 %at",
        "alloca.u64 %at, 16",
    ],
)
def test_forms_that_do_not_exist_are_refused(text: str) -> None:
    with pytest.raises(UnsupportedInstruction):
        run_lanes(f".reg .b64 %at; mov.u64 %at, lines; {text};", {"a": ("u32", 1)}, {"d": "u32"}, variables=LINES)
