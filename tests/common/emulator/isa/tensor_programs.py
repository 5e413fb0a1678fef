"""PTX programs around tensor memory: a prologue that allocates, the lines of a test, an epilogue that frees."""

from __future__ import annotations

import numpy as np

from common.emulator import Emulator


def program(
    body: str,
    *,
    columns: int = 512,
    group: int = 1,
    shared: int = 0,
    parameters: str = ".param .u64 p_in, .param .u64 p_out",
    target: str = "sm_100a",
) -> str:
    """A kernel `tensor`. Warp 0 allocates; the body has in %taddr the address, %tid the thread, %warp and %lane, %in
    and %out the addresses of the arguments, `%data` the offset of `shared` bytes, and an mbarrier for one arrival at
    `bar`. With `group` 2 the CTAs of a cluster of two meet before the body and after it."""
    sync = "barrier.cluster.arrive; barrier.cluster.wait;" if group == 2 else "bar.sync 0;"
    return f"""
.version 9.0
.target {target}
.address_size 64
.visible .entry tensor({parameters})
{{
  .shared .align 1024 .b8 data[{max(shared, 16)}];
  .shared .align 8 .b64 bar;
  .shared .align 4 .b32 slot;
  .reg .u32 %tid, %warp, %lane, %taddr, %data, %bar;
  .reg .u64 %in, %out;
  .reg .pred %first, %leader;
  ld.param.u64 %in, [p_in];
  ld.param.u64 %out, [p_out];
  mov.u32 %tid, %tid.x;
  shr.u32 %warp, %tid, 5;
  and.b32 %lane, %tid, 31;
  mov.u32 %data, data;
  mov.u32 %bar, bar;
  setp.eq.u32 %first, %warp, 0;
  setp.eq.u32 %leader, %tid, 0;
  @%leader mbarrier.init.shared::cta.b64 [%bar], 1;
  @%first tcgen05.alloc.cta_group::{group}.sync.aligned.shared::cta.b32 [slot], {columns};
  {sync}
  ld.shared.u32 %taddr, [slot];
  {{
{body}
  }}
  {sync}
  @%first tcgen05.dealloc.cta_group::{group}.sync.aligned.b32 %taddr, {columns};
  @%first tcgen05.relinquish_alloc_permit.cta_group::{group}.sync.aligned;
  ret;
}}
"""


WAIT_BARRIER = """
    { .reg .pred %done;
    AGAIN: mbarrier.try_wait.parity.shared::cta.b64 %done, [%bar], 0;
    @!%done bra AGAIN; }
"""


def launch(
    text: str,
    inputs: np.ndarray,
    outputs: np.ndarray,
    schedule: str,
    *,
    cluster: int = 1,
    threads: int = 128,
    seed: int = 0,
):
    """Runs a `program` in one cluster; returns the outputs."""
    Emulator(schedule, seed).launch(
        text, "tensor", grid=cluster, block=threads, cluster=cluster, args=[inputs, outputs]
    )
    return outputs


def registers(names: str, count: int) -> str:
    """`{%r0, %r1, ...}`"""
    return "{" + ", ".join(f"%{names}{place}" for place in range(count)) + "}"


def load_inputs(count: int) -> str:
    """Registers %r0 ... from the input, uint32 (threads, count)."""
    lines = [f"    .reg .b32 %r<{count}>;", "    .reg .u64 %from;", f"    mad.wide.u32 %from, %tid, {4 * count}, %in;"]
    return "\n".join(lines + [f"    ld.global.b32 %r{place}, [%from+{4 * place}];" for place in range(count)])


def store_outputs(names: str, count: int) -> str:
    """Registers to the output, uint32 (threads, count)."""
    lines = ["    .reg .u64 %to;", f"    mad.wide.u32 %to, %tid, {4 * count}, %out;"]
    return "\n".join(lines + [f"    st.global.b32 [%to+{4 * place}], %{names}{place};" for place in range(count)])
