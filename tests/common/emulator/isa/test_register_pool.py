"""setmaxnreg and the CTA's register pool (PTX ISA 9.7.19.5)."""

from __future__ import annotations

import numpy as np
import pytest

from common.emulator import Deadlock, DivergenceFault, Emulator, Fault, UnsupportedInstruction
from common.emulator.isa.register_pool import entry_count
from common.emulator.machine.events import SCHEDULES

KERNEL = """
.version 9.0
.target sm_100a
.address_size 64
.visible .entry roles(.param .u64 p_out) {directives}
{{
  .reg .b64 %rd<4>; .reg .b32 %r<9>; .reg .pred %p<9>;
  mov.u32 %r0, %tid.x;
  shr.u32 %r1, %r0, 7;
  shr.u32 %r2, %r0, 5;
  ld.param.u64 %rd0, [p_out];
  mul.wide.u32 %rd1, %r0, 4;
  add.u64 %rd1, %rd0, %rd1;
  setp.eq.u32 %p0, %r1, 0;
  setp.eq.u32 %p1, %r2, 0;
{body}
  st.global.u32 [%rd1], 1;
  ret;
}}
"""
HAND_OVER = """
  @%p0 bra PRODUCER;
  setmaxnreg.inc.sync.aligned.u32 {inc};
  bra JOIN;
PRODUCER:
  setmaxnreg.dec.sync.aligned.u32 {dec};
JOIN:"""


def run(body: str, directives: str = ".maxnreg 168", threads: int = 384, schedule: str = "late") -> np.ndarray:
    out = np.zeros(threads, np.uint32)
    text = KERNEL.format(body=body, directives=directives)
    Emulator(schedule, seed=1).launch(text, "roles", grid=1, block=threads, args=[out])
    return out


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("directives", [".maxnreg 168", ".maxntid 384 .minnctapersm 1", ".reqntid 384 .minnctapersm 1"])
def test_consumers_get_what_the_producer_gives_back(schedule: str, directives: str) -> None:
    assert (run(HAND_OVER.format(inc=240, dec=24), directives, schedule=schedule) == 1).all()


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_more_than_the_pool_has_is_a_deadlock(schedule: str) -> None:
    with pytest.raises(Deadlock, match=r"registers \(setmaxnreg.inc 240"):
        run(HAND_OVER.format(inc=240, dec=32), schedule=schedule)


@pytest.mark.parametrize("directives", ["", ".maxntid 384", ".minnctapersm 1", ".reqntid 384"])
def test_no_effect_where_the_entry_count_is_not_fixed(directives: str) -> None:
    assert (run(HAND_OVER.format(inc=256, dec=248), directives) == 1).all()


def test_one_warpgroup_goes_on_while_another_waits() -> None:
    """The second warpgroup frees later what the third one waits for, although both asked in one vector."""
    body = """
  @%p0 bra GIVE;
  setmaxnreg.inc.sync.aligned.u32 240;
  setp.eq.u32 %p2, %r1, 1;
  @!%p2 bra JOIN;
  setmaxnreg.dec.sync.aligned.u32 168;
  bra JOIN;
GIVE:
  setmaxnreg.dec.sync.aligned.u32 96;
JOIN:"""
    for schedule in SCHEDULES:
        assert (run(body, schedule=schedule) == 1).all()


def test_a_warpgroup_may_change_its_count_again() -> None:
    body = "setmaxnreg.dec.sync.aligned.u32 40; setmaxnreg.inc.sync.aligned.u32 168;"
    for schedule in SCHEDULES:
        assert (run(body, schedule=schedule) == 1).all()


def test_a_predicate_that_is_uniform_in_the_warpgroup() -> None:
    body = "@%p0 setmaxnreg.dec.sync.aligned.u32 24; @!%p0 setmaxnreg.inc.sync.aligned.u32 240;"
    for schedule in SCHEDULES:
        assert (run(body, schedule=schedule) == 1).all()


def test_one_warp_alone_waits_for_its_warpgroup() -> None:
    body = "@!%p1 bra WAIT; setmaxnreg.dec.sync.aligned.u32 24;\nWAIT: bar.sync 0;"
    with pytest.raises(Deadlock, match="other warps of warpgroup 0 to execute setmaxnreg.dec 24"):
        run(body)


BRANCHES = """
  @%p1 bra OTHER;
  setmaxnreg.dec.sync.aligned.u32 24;
  bra JOIN;
OTHER:
  setmaxnreg.{other};
JOIN:"""


@pytest.mark.parametrize("count", [24, 96])
def test_warps_of_a_warpgroup_may_have_counts_of_their_own(count: int) -> None:
    """Warp-specialised kernels do: each role begins with its setmaxnreg, in a branch of its own."""
    for schedule in SCHEDULES:
        text = BRANCHES.format(other=f"dec.sync.aligned.u32 {count}")
        assert (run(text, threads=128, schedule=schedule) == 1).all()


def test_the_pool_gets_what_each_warp_gives_back() -> None:
    """From 128 registers per thread three warps give 104, the fourth 32: 344 in all, 86 more for each of four."""
    body = """
  @!%p0 bra CONSUMER;
  @%p1 bra OTHER;
  setmaxnreg.dec.sync.aligned.u32 24;
  bra JOIN;
OTHER:
  setmaxnreg.dec.sync.aligned.u32 96;
  bra JOIN;
CONSUMER:
  setmaxnreg.inc.sync.aligned.u32 {count};
JOIN:"""
    assert (run(body.format(count=208), threads=256, directives=".maxnreg 128") == 1).all()
    with pytest.raises(Deadlock, match=r"for 11264 registers .* the CTA's pool has 11008"):
        run(body.format(count=216), threads=256, directives=".maxnreg 128")


def test_warps_of_a_warpgroup_may_not_go_in_different_directions() -> None:
    with pytest.raises(DivergenceFault, match="different instructions: setmaxnreg.(inc|dec)"):
        run(BRANCHES.format(other="inc.sync.aligned.u32 240"), threads=128)


@pytest.mark.parametrize("text", ["setmaxnreg.inc.sync.aligned.u32 160", "setmaxnreg.dec.sync.aligned.u32 176"])
def test_a_change_in_the_wrong_direction(text: str) -> None:
    with pytest.raises(Fault, match="wrong direction"):
        run(f"{text};")


@pytest.mark.parametrize(
    "directives, expected",
    [
        ({}, None),
        ({"maxnreg": (168,)}, 168),
        ({"maxnreg": (100,)}, 104),
        ({"maxntid": (384, 1, 1), "minnctapersm": (1,)}, 168),
        ({"maxntid": (128, 2), "minnctapersm": (2,)}, 128),
        ({"reqntid": (64,), "minnctapersm": (1,)}, 256),
        ({"maxnreg": (96,), "maxntid": (384,), "minnctapersm": (1,)}, 96),
        ({"maxntid": (384,)}, None),
    ],
)
def test_registers_at_entry(directives: dict, expected: int | None) -> None:
    assert entry_count(directives, 65536) == expected


@pytest.mark.parametrize(
    "text",
    [
        "setmaxnreg.inc.sync.aligned.u32 16",
        "setmaxnreg.inc.sync.aligned.u32 264",
        "setmaxnreg.dec.sync.aligned.u32 100",
        "setmaxnreg.dec.sync.aligned.u32 %r0",
        "setmaxnreg.sync.aligned.u32 64",
        "setmaxnreg.inc.aligned.u32 64",
        "setmaxnreg.inc.sync.u32 64",
    ],
)
def test_counts_and_forms_that_do_not_exist_are_refused(text: str) -> None:
    with pytest.raises(UnsupportedInstruction):
        run(f"{text};")
