"""tcgen05.commit: what it tracks, and the order of its arrivals (PTX ISA 9.7.16.12)."""

from __future__ import annotations

import pytest

from tests.common.emulator.ptx_kernels import run_lanes

COMMIT = "tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64"


@pytest.mark.parametrize("seed", range(6))
def test_commits_of_a_thread_arrive_in_their_order(seed):
    """Whoever has waited for the second mbarrier finds the first one's phase complete."""
    body = f"""
  .shared .align 8 .b64 bars[8];
  .reg .b32 address; .reg .pred done, first;
  mov.u32 address, bars;
  mbarrier.init.shared.b64 [address], 1;
  mbarrier.init.shared.b64 [address + 8], 1;
  {COMMIT} [address];
  {COMMIT} [address + 8];
WAIT:
  mbarrier.try_wait.parity.shared.b64 done, [address + 8], 0;
  @!done bra WAIT;
  mbarrier.test_wait.parity.shared.b64 first, [address], 0;
  selp.u32 %complete, 1, 0, first;
"""
    results = run_lanes(body, {}, {"complete": "u32"}, lanes=1, schedule="random", seed=seed)
    assert results["complete"].tolist() == [1]
