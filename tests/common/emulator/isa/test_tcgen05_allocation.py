"""tcgen05.alloc, .dealloc and .relinquish_alloc_permit: addresses, blocking, pairs, and every misuse."""

import numpy as np
import pytest

from common.emulator import Deadlock, Emulator, TensorMemoryFault
from common.emulator.machine.events import SCHEDULES
from common.emulator.machine.scheduler import Limits

B200 = Limits()
ONE_SM = Limits(sm_count=1)  # CTAs share its tensor memory
ALLOC = "tcgen05.alloc.cta_group::{g}.sync.aligned.shared::cta.b32 [slot+{at}], {columns};"
FREE = "tcgen05.dealloc.cta_group::{g}.sync.aligned.b32 {address}, {columns};"
CLUSTER_SYNC = "barrier.cluster.arrive; barrier.cluster.wait;"


def alloc(columns, at=0, group=1):
    return ALLOC.format(g=group, at=at, columns=columns)


def free(address, columns, group=1):
    return FREE.format(g=group, address=address, columns=columns)


def kernel(body: str) -> str:
    """One warp or more; `slot` takes addresses, %a0 ... are registers for them, %to is a row of 8 words per CTA."""
    return f"""
.version 9.0
.target sm_100a
.address_size 64
.visible .entry k(.param .u64 p_out)
{{
  .shared .align 16 .b32 slot[8];
  .reg .u32 %a<8>, %cta, %tid, %warp, %rank, %n;
  .reg .u64 %to;
  .reg .pred %p, %q;
  ld.param.u64 %to, [p_out];
  mov.u32 %cta, %ctaid.x;
  mov.u32 %tid, %tid.x;
  mov.u32 %rank, %cluster_ctarank;
  shr.u32 %warp, %tid, 5;
  mad.wide.u32 %to, %cta, 32, %to;
{body}
  ret;
}}
"""


def run(
    body: str, schedule: str = "late", grid: int = 1, cluster: int = 1, threads: int = 32, limits: Limits = B200
) -> np.ndarray:
    out = np.zeros((grid, 8), np.uint32)
    Emulator(schedule, limits=limits).launch(kernel(body), "k", grid=grid, block=threads, cluster=cluster, args=[out])
    return out


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_first_fit_on_powers_of_two(schedule):
    out = run(
        f"""
  {alloc(256)} {alloc(128, 4)} {alloc(64, 8)} {alloc(32, 12)}
  ld.shared.v4.u32 {{%a0, %a1, %a2, %a3}}, [slot];
  {free("%a2", 64)} {alloc(32, 16)} {alloc(32, 20)}
  ld.shared.u32 %a4, [slot+16];
  ld.shared.u32 %a5, [slot+20];
  st.global.v4.u32 [%to], {{%a0, %a1, %a2, %a3}};
  st.global.u32 [%to+16], %a4;
  st.global.u32 [%to+20], %a5;
  {free("%a0", 256)} {free("%a1", 128)} {free("%a3", 32)} {free("%a4", 32)} {free("%a5", 32)}
  tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;
""",
        schedule,
    )
    assert out[0, :6].tolist() == [0, 256, 384, 448, 384, 416]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_generic_address_and_runtime_columns(schedule):
    out = run(
        f"""
  .reg .u64 %g;
  .reg .u32 %c;
  cvta.shared.u64 %g, slot;
  mov.u32 %c, 64;
  tcgen05.alloc.cta_group::1.sync.aligned.b32 [%g+8], %c;
  ld.shared.u32 %a0, [slot+8];
  st.global.u32 [%to], %a0;
  {free("%a0", 64)}
""",
        schedule,
    )
    assert out[0, 0] == 0


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_ctas_of_an_sm_share_its_columns(schedule):
    """Eight CTAs of 256 columns on one SM: two at a time, at different addresses; the others wait."""
    body = f"""
  {alloc(256)}
  ld.shared.u32 %a0, [slot];
  st.global.u32 [%to], %a0;
  mov.u32 %n, 0;
  atom.global.add.u32 %a1, [%to+4], 1;
  nanosleep.u32 20;
  {free("%a0", 256)}
"""
    out = run(body, schedule, grid=8, limits=ONE_SM)
    assert set(out[:, 0].tolist()) <= {0, 256}
    assert (out[:, 1] == 32).all()


def test_ctas_hold_columns_at_the_same_time():
    """The second CTA gets other columns while the first one waits for it."""
    body = f"""
  {alloc(256)}
  ld.shared.u32 %a0, [slot];
  setp.eq.u32 %p, %tid, 0;
  @%p st.global.u32 [%to], %a0;
  .reg .u64 %base;
  ld.param.u64 %base, [p_out];
  @%p atom.global.add.u32 %a1, [%base+28], 1;
  AGAIN: ld.volatile.global.u32 %n, [%base+28];
  setp.lt.u32 %q, %n, 2;
  @%q bra AGAIN;
  {free("%a0", 256)}
"""
    for schedule in SCHEDULES:
        assert sorted(run(body, schedule, grid=2, limits=ONE_SM)[:, 0].tolist()) == [0, 256]


def test_waiting_for_columns_that_never_come():
    """Two CTAs that each hold half of the columns and want another half."""
    body = f"{alloc(256)} {alloc(256, 4)} ld.shared.u32 %a0, [slot];"
    body += " ld.shared.u32 %a1, [slot+4];" + free("%a0", 256) + free("%a1", 256)
    run(body, "early", grid=2, limits=ONE_SM)
    body = f"""
  {alloc(256)}
  .reg .u64 %base;
  ld.param.u64 %base, [p_out];
  setp.eq.u32 %p, %tid, 0;
  @%p atom.global.add.u32 %a1, [%base+28], 1;
  AGAIN: ld.volatile.global.u32 %n, [%base+28];
  setp.lt.u32 %q, %n, 2;
  @%q bra AGAIN;
  {alloc(256, 4)}
"""
    with pytest.raises(Deadlock, match="for 256 columns of tensor memory: 0 of SM 0 are free"):
        run(body, grid=2, limits=ONE_SM)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (alloc(32), r"exits without tcgen05.dealloc of its tensor memory \(columns 0-31\)"),
        (alloc(48), "48 columns: the number must be a power of two from 32 to 512"),
        (alloc(16), "16 columns"),
        (alloc(1024), "1024 columns"),
        (alloc(32) + alloc(64, 4), "must not grow"),
        ("tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;" + alloc(32), "relinquish_alloc_permit"),
        (alloc(32) + "mov.u32 %a0, 0;" + free("%a0", 32) + free("%a0", 32), "have been deallocated already"),
        (alloc(64) + "mov.u32 %a0, 0;" + free("%a0", 32), "the CTA holds columns 0-63"),
        (alloc(64) + "mov.u32 %a0, 32;" + free("%a0", 32), "the CTA holds columns 0-63"),
        ("mov.u32 %a0, 0;" + free("%a0", 32), "the CTA holds nothing"),
        (
            alloc(32) + "mov.u32 %a0, 0;" + free("%a0", 32) + "tcgen05.ld.sync.aligned.32x32b.x1.b32 {%a1}, [%a0];",
            "column 0 has been deallocated",
        ),
        ("mov.u32 %a0, 0; tcgen05.ld.sync.aligned.32x32b.x1.b32 {%a1}, [%a0];", "has allocated no tensor memory"),
        (alloc(32) + "mov.u32 %a0, %tid;" + free("%a0", 32), "different values"),
    ],
)
def test_misuse(body, message):
    with pytest.raises(TensorMemoryFault, match=message) as caught:
        run(body)
    assert caught.value.place is not None


# -- pairs ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("cluster", [2, 4])
def test_pairs_allocate_together(cluster, schedule):
    """Both CTAs of a pair get the same address; one warp of each executes alloc, whichever."""
    body = f"""
  setp.eq.u32 %p, %warp, %rank;
  @%p {alloc(128, 0, 2)}
  @%p {alloc(64, 4, 2)}
  bar.sync 0;
  ld.shared.u32 %a0, [slot];
  ld.shared.u32 %a1, [slot+4];
  st.global.v2.u32 [%to], {{%a0, %a1}};
  {CLUSTER_SYNC}
  setp.eq.u32 %p, %warp, 0;
  @%p {free("%a0", 128, 2)}
  @%p {free("%a1", 64, 2)}
  @%p tcgen05.relinquish_alloc_permit.cta_group::2.sync.aligned;
"""
    out = run(body, schedule, grid=2 * cluster, cluster=cluster, threads=32 * cluster)
    assert (out[:, :2] == [0, 128]).all()


def test_a_pair_waits_for_its_peer():
    body = f"setp.eq.u32 %p, %rank, 0; @%p {alloc(32, 0, 2)} {CLUSTER_SYNC}"
    with pytest.raises(Deadlock, match="for a warp of the peer CTA to execute tcgen05.alloc.cta_group::2"):
        run(body, grid=2, cluster=2)


def test_dealloc_may_wait_for_the_peer():
    """The hang of PTX's table 48: one CTA deallocates before the barrier, the other one after it."""
    body = f"""
  {alloc(32, 0, 2)}
  ld.shared.u32 %a0, [slot];
  setp.eq.u32 %p, %rank, 0;
  @%p {CLUSTER_SYNC.split(";")[0]};
  @%p barrier.cluster.wait;
  {free("%a0", 32, 2)}
  @!%p barrier.cluster.arrive;
  @!%p barrier.cluster.wait;
"""
    run(body, "early", grid=2, cluster=2)
    with pytest.raises(Deadlock, match="peer CTA to execute tcgen05.dealloc.cta_group::2"):
        run(body, "late", grid=2, cluster=2)


@pytest.mark.parametrize(
    ("body", "cluster", "message"),
    [
        (f"shl.b32 %n, 32, %rank; {alloc('%n', 0, 2)}", 2, "in the peer CTA"),
        (alloc(32, 0, 2), 1, "even number of CTAs"),
        (f"{alloc(32)} mov.u32 %a0, 0; {free('%a0', 32, 2)}", 2, "must have the same .cta_group"),
    ],
)
def test_misuse_of_pairs(body, cluster, message):
    with pytest.raises(TensorMemoryFault, match=message):
        run(body, grid=cluster, cluster=cluster)
