"""clusterlaunchcontrol: every cluster's work is done exactly once, by itself or by a CTA that cancelled it."""

import numpy as np
import pytest

from common.build import build
from common.emulator import Deadlock, Emulator, Fault
from common.emulator.machine.events import SCHEDULES
from common.emulator.machine.scheduler import Limits
from tests.common.emulator.cluster_launch_kernels import count_tiles


def kernel(body: str) -> str:
    return f"""
.version 9.0
.target sm_100a
.address_size 64
.visible .entry k(.param .u64 p_work, .param .u64 p_ran)
{{
  .shared .align 16 .b8 response[16];
  .shared .align 8 .b64 bar;
  .reg .u64 %work, %ran, %at;
  .reg .u32 %x, %y, %z, %t, %rank, %parity, %grid, %one, %index, %own;
  .reg .b128 %h;
  .reg .pred %p, %leader, %done;
  ld.param.u64 %work, [p_work];
  ld.param.u64 %ran, [p_ran];
  mov.u32 %x, %ctaid.x; mov.u32 %y, %ctaid.y; mov.u32 %z, %ctaid.z;
  mov.u32 %rank, %cluster_ctarank;
  mov.u32 %one, 1;
  mov.u32 %parity, 0;
  mov.u32 %t, %tid.x;
  setp.eq.u32 %leader, %t, 0;
  @%leader mbarrier.init.shared::cta.b64 [bar], 1;
  fence.mbarrier_init.release.cluster;
  barrier.cluster.arrive; barrier.cluster.wait;
  mov.u32 %own, %ctaid.x;
  mad.wide.u32 %at, %own, 4, %ran;
  @%leader red.global.add.u32 [%at], 1;
{body}
  ret;
}}
"""


LOOP = """
  AGAIN:
  mov.u32 %grid, %nctaid.x;
  mad.lo.u32 %index, %y, %grid, %x;
  mov.u32 %own, %nctaid.y;
  mul.lo.u32 %grid, %grid, %own;
  mad.lo.u32 %index, %z, %grid, %index;
  mad.wide.u32 %at, %index, 4, %work;
  @%leader red.global.add.u32 [%at], 1;
  @%leader mbarrier.arrive.expect_tx.relaxed.cluster.shared::cta.b64 _, [bar], 16;
  barrier.cluster.arrive; barrier.cluster.wait;
  setp.eq.u32 %p, %rank, 0;
  @%p setp.eq.u32 %p, %t, 0;
  @%p clusterlaunchcontrol.try_cancel.async.shared::cta.mbarrier::complete_tx::bytes.multicast::cluster::all.b128
      [response], [bar];
  WAIT: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 %done, [bar], %parity;
  @!%done bra WAIT;
  xor.b32 %parity, %parity, 1;
  ld.shared.b128 %h, [response];
  clusterlaunchcontrol.query_cancel.is_canceled.pred.b128 %p, %h;
  @!%p ret;
  clusterlaunchcontrol.query_cancel.get_first_ctaid.v4.b32.b128 {%x, %y, %z, _}, %h;
  clusterlaunchcontrol.query_cancel.get_first_ctaid::x.b32.b128 %own, %h;
  setp.ne.u32 %done, %own, %x;
  @%done trap;
  add.u32 %x, %x, %rank;
  fence.proxy.async::generic.release.sync_restrict::shared::cta.cluster;
  barrier.cluster.arrive.relaxed; barrier.cluster.wait;
  bra AGAIN;
"""


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("cluster", [1, 2])
@pytest.mark.parametrize("sm_count", [1, 3, 4])
def test_all_work_is_done_once(sm_count, cluster, schedule):
    """A grid of 8 x 3 x 2 on few SMs: cancelled clusters do not start, the first wave always does."""
    work, ran = np.zeros((2, 3, 8), np.uint32), np.zeros(8, np.uint32)
    limits = Limits(sm_count=sm_count, ctas_per_sm=2)
    Emulator(schedule, limits=limits).launch(
        kernel(LOOP), "k", grid=(8, 3, 2), block=32, cluster=(cluster, 1, 1), args=[work, ran]
    )
    np.testing.assert_array_equal(work, np.ones_like(work))
    first_wave = 2 * max(sm_count // cluster, 1) * cluster
    assert first_wave <= int(ran.sum()) <= 48
    if schedule != "random":
        assert int(ran.sum()) == first_wave


def test_a_grid_that_fits_has_nothing_to_cancel():
    work, ran = np.zeros(8, np.uint32), np.zeros(8, np.uint32)
    Emulator("late").launch(kernel(LOOP), "k", grid=8, block=32, args=[work, ran])
    np.testing.assert_array_equal(ran, np.ones_like(ran))
    np.testing.assert_array_equal(work, np.ones_like(work))


TRY = "clusterlaunchcontrol.try_cancel.async.shared::cta.mbarrier::complete_tx::bytes.b128 [response], [bar];"


def test_a_response_that_nobody_waited_for():
    body = f"@%leader {TRY} ld.shared.b128 %h, [response];"
    body += " clusterlaunchcontrol.query_cancel.is_canceled.pred.b128 %p, %h;"
    with pytest.raises(Fault, match="no response of try_cancel"):
        Emulator("late").launch(kernel(body), "k", grid=1, block=32, args=[np.zeros(8, np.uint32)] * 2)


def test_asking_again_before_the_other_ctas_have_read():
    """A response goes to all CTAs of the cluster and nothing orders two requests: whoever asks must wait for all."""
    body = LOOP.replace("barrier.cluster.arrive; barrier.cluster.wait;", "")
    body = body.replace("barrier.cluster.arrive.relaxed; barrier.cluster.wait;", "")
    with pytest.raises(Fault, match="another request did not wait until this CTA had read it"):
        Emulator("random", limits=Limits(sm_count=2, ctas_per_sm=1)).launch(
            kernel(body), "k", grid=8, block=32, cluster=(2, 1, 1), args=[np.zeros(8, np.uint32)] * 2
        )


def test_asking_again_after_a_failure():
    body = LOOP.replace("@!%p ret;", f"@%leader {TRY}")
    with pytest.raises(Fault, match="after this CTA has seen a request fail"):
        Emulator("late").launch(kernel(body), "k", grid=1, block=32, args=[np.zeros(8, np.uint32)] * 2)


def test_bytes_that_nobody_expects():
    """The response counts 16 bytes: an arrival that expects 32 never sees its phase end."""
    with pytest.raises(Deadlock, match="16 bytes owed"):
        Emulator("late").launch(
            kernel(LOOP.replace("[bar], 16;", "[bar], 32;")), "k", grid=1, block=32, args=[np.zeros(8, np.uint32)] * 2
        )


def test_tirx_scheduler():
    """TIRx's own scheduler: three SMs share the 24 tiles, each tile is visited once."""
    kernel = build(count_tiles(4, 6))
    for schedule in SCHEDULES:
        tiles, ran = np.zeros((4, 6), np.int32), np.zeros(24, np.int32)
        kernel(tiles, ran, schedule=schedule, limits=Limits(sm_count=3, ctas_per_sm=1))
        np.testing.assert_array_equal(tiles, np.ones_like(tiles))
        assert 3 <= int(ran.sum()) <= 24
