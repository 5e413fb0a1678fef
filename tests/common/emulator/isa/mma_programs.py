"""A CUDA C++ program that runs `tcgen05.mma` on given images of shared and tensor memory, and hand-made descriptors.

The image of shared memory lies at offset BASE of each CTA, a multiple of 1024. The program fills tensor memory, issues
the instructions one after another from one thread, commits, waits, and returns what tensor memory holds.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from common.emulator import Emulator, Run
from tests.common.emulator.cuda import compile_ptx

LANES, COLUMNS = 128, 512
BASE = 1024  # the dynamic window starts right behind the reserved first KB
WORDS = 16  # of an instruction in the list
SWIZZLE_CODES = {"none": 0, "128B-32B": 1, "128B": 2, "64B": 4, "32B": 6}
A_TYPES = {"f16": 0, "bf16": 1, "tf32": 2, "e4m3": 0, "e5m2": 1, "e2m3": 3, "e3m2": 4, "e2m1": 5, "u8": 0, "s8": 1}
D_TYPES = {"f16": 0, "f32": 1, "s32": 2}

_PROGRAM = r"""
typedef unsigned int u32; typedef unsigned long long u64;
extern __shared__ __align__(1024) unsigned char window[];
extern "C" __global__ void __launch_bounds__(128) mma(
    const uint4* shared, int chunks, u32* tensor, const u32* list, int count) {
  u32 rank; asm volatile("mov.u32 %%0, %%%%cluster_ctarank;" : "=r"(rank));
  u32 start = (u32)__cvta_generic_to_shared(window), slot = start + 16 * chunks, bar = slot + 8;
  for (int i = threadIdx.x; i < chunks; i += 128) ((uint4*)window)[i] = shared[rank * chunks + i];
  if (threadIdx.x == 0) asm volatile("mbarrier.init.shared.b64 [%%0], 1;" :: "r"(bar) : "memory");
  u32 warp = threadIdx.x / 32;
  if (warp == 0) asm volatile("tcgen05.alloc.cta_group::%(group)d.sync.aligned.shared::cta.b32 [%%0], 512;"
                              :: "r"(slot) : "memory");
  asm volatile("fence.proxy.async;" ::: "memory");
  __syncthreads();
  u32 base; asm volatile("ld.shared.u32 %%0, [%%1];" : "=r"(base) : "r"(slot));
  base += warp << 21;
  tensor += (rank * 128 + threadIdx.x) * 512;
  for (int c = 0; c < 512; c += 4)
    asm volatile("tcgen05.st.sync.aligned.32x32b.x4.b32 [%%0], {%%1, %%2, %%3, %%4};" :: "r"(base + c),
                 "r"(tensor[c]), "r"(tensor[c + 1]), "r"(tensor[c + 2]), "r"(tensor[c + 3]) : "memory");
  asm volatile("tcgen05.wait::st.sync.aligned;\n tcgen05.fence::before_thread_sync;" ::: "memory");
  %(sync)s
  asm volatile("tcgen05.fence::after_thread_sync;" ::: "memory");
  if (threadIdx.x == 0 && rank == 0) {
    for (int i = 0; i < count; i++, list += 16) {
      u64 a = (u64)list[1] << 32 | list[0], b = (u64)list[3] << 32 | list[2];
      asm volatile("{ .reg .pred p; setp.ne.u32 p, %%5, 0; %(text)s }"
        :: "r"(list[4]), %(a)s, "l"(b), "r"(list[5]), "n"(0), "r"(list[6]), "r"(list[7]), "r"(list[8]),
           "r"(list[9]), "r"(list[10]), "r"(list[11]), "r"(list[12]), "r"(list[13]) : "memory");
    }
    asm volatile("tcgen05.commit.cta_group::%(group)d.mbarrier::arrive::one.shared::cluster%(multicast)s;"
                 :: "r"(bar), "h"((unsigned short)3) : "memory");
  }
  %(before_wait)s
  for (u32 done = !%(waits)d; !done;)
    asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared.b64 p, [%%1], 0; selp.u32 %%0, 1, 0, p; }"
                 : "=r"(done) : "r"(bar) : "memory");
  asm volatile("tcgen05.fence::after_thread_sync;" ::: "memory");
  for (int c = 0; c < 512; c += 8) {
    u32 v[8];
    asm volatile("tcgen05.ld.sync.aligned.32x32b.x8.b32 {%%0, %%1, %%2, %%3, %%4, %%5, %%6, %%7}, [%%8];"
      : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3]), "=r"(v[4]), "=r"(v[5]), "=r"(v[6]), "=r"(v[7])
      : "r"(base + c) : "memory");
    asm volatile("tcgen05.wait::ld.sync.aligned;" ::: "memory");
    for (int i = 0; i < 8; i++) tensor[c + i] = v[i];
  }
  %(sync)s
  if (warp == 0) asm volatile("tcgen05.dealloc.cta_group::%(group)d.sync.aligned.b32 %%0, 512;" :: "r"(base));
}
"""
# Operands of the text: %0 d, %1 a, %2 b, %3 instruction descriptor, %6 metadata, %7 and %8 scale factors, %9.. lanes


@dataclass(frozen=True)
class Instruction:
    """One instruction: matrix descriptors (`a` may be a tensor memory address), addresses, whether D is an input."""

    a: int
    b: int
    descriptor: int
    d: int = 0
    keep: bool = False
    metadata: int = 0
    scale_a: int = 0
    scale_b: int = 0
    disabled: tuple[int, ...] = (0, 0, 0, 0)

    def words(self) -> list[int]:
        low = 0xFFFF_FFFF
        fields = [self.a & low, self.a >> 32, self.b & low, self.b >> 32, self.d, self.descriptor, int(self.keep)]
        return [*fields, self.metadata, self.scale_a, self.scale_b, *self.disabled, 0, 0]


def mma_text(
    kind: str,
    *,
    group: int = 1,
    a_in_tmem: bool = False,
    variant: str = "",
    qualifiers: str = "",
    lanes: bool = False,
    tail: str = "",
) -> str:
    """The PTX of an instruction. `variant`: ".sp", ".ws" or ".ws.sp"; `qualifiers` follow the kind."""
    a = "[%1]" if a_in_tmem else "%1"
    sparse = " [%6]," if variant.endswith("sp") else ""
    scales = " [%7], [%8]," if "block_scale" in qualifiers else ""
    mask = ""
    if lanes:
        mask = " {" + ", ".join(["%9", "%10", "%11", "%12"] * group) + "},"
    head = f"tcgen05.mma{variant}.cta_group::{group}.kind::{kind}{qualifiers}"
    return f"{head} [%0], {a}, %2,{sparse} %3,{scales}{mask} p{tail};"


def run_mma(
    text: str,
    instructions: list[Instruction],
    shared: np.ndarray,
    tensor: np.ndarray | None = None,
    *,
    schedule: str = "late",
    seed: int = 0,
    before_wait: str = "",
    waits: bool = True,
) -> tuple[np.ndarray, Run]:
    """Tensor memory afterwards, uint32 (CTAs, 128, 512), and the run.

    `shared` is uint8 (CTAs, bytes), a multiple of 16 bytes each; `tensor` the uint32 tensor memory before, poison by
    default. `before_wait` is C++ that all threads run between the commit and the wait for its mbarrier, which
    `waits` = False leaves out.
    """
    ctas, size = shared.shape
    memory = np.full((ctas, LANES, COLUMNS), 0xFFFF_FFFF, np.uint32) if tensor is None else tensor.copy()
    words = np.array([instruction.words() for instruction in instructions], np.uint32)
    args = [shared, size // 16, memory, words, len(instructions)]
    run = Emulator(schedule, seed).launch(
        program(text, ctas, before_wait, waits),
        "mma",
        grid=ctas,
        block=128,
        cluster=ctas,
        shared_bytes=size + 16,
        args=args,
    )
    return memory, run


def program(text: str, group: int, before_wait: str = "", waits: bool = True) -> str:
    """PTX of the program around one instruction, for one CTA or a pair."""
    in_tmem = "[%1]" in text
    pair = group == 2
    return compile_ptx(
        _PROGRAM
        % {
            "text": text,
            "before_wait": before_wait,
            "waits": waits,
            "group": group,
            "a": '"r"((u32)a)' if in_tmem else '"l"(a)',
            "sync": 'asm volatile("barrier.cluster.arrive;\\n barrier.cluster.wait;" ::: "memory");'
            if pair
            else "__syncthreads();",
            "multicast": ".multicast::cluster.b64 [%0], %1" if pair else ".b64 [%0]",
        }
    )


def instruction_bits(
    m: int, n: int, a: str, b: str, d: str, *, transpose: tuple[int, int] = (0, 0), negate: tuple[int, int] = (0, 0),
    sparse: bool = False, selector: int = 0, saturate: bool = False,
) -> int:  # fmt: skip
    """The instruction descriptor of a kind without scale factors, bit by bit (PTX ISA table 42)."""
    bits = selector | sparse << 2 | saturate << 3 | D_TYPES[d] << 4 | A_TYPES[a] << 7 | A_TYPES[b] << 10
    bits |= negate[0] << 13 | negate[1] << 14 | transpose[0] << 15 | transpose[1] << 16
    return bits | (n // 8) << 17 | (m // 16) << 24


def scaled_bits(
    m: int, n: int, a: str, b: str, scale: str, *, ids: tuple[int, int] = (0, 0), packed: bool = False,
    negate: tuple[int, int] = (0, 0), transpose: tuple[int, int] = (0, 0), sparse: bool = False,
) -> int:  # fmt: skip
    """The instruction descriptor of a kind with scale factors (PTX ISA tables 43 and 44)."""
    types = (1, 1) if packed else (A_TYPES[a], A_TYPES[b])
    bits = sparse << 2 | ids[1] << 4 | types[0] << 7 | types[1] << 10 | negate[0] << 13 | negate[1] << 14
    bits |= transpose[0] << 15 | transpose[1] << 16 | (n // 8) << 17
    return bits | {"ue4m3": 0, "ue8m0": 1}[scale] << 23 | (m // 128) << 27 | ids[0] << 29


def matrix_bits(offset: int, lbo: int, sbo: int, swizzle: str, base_offset: int = 0) -> int:
    """The shared memory descriptor of a matrix at `offset` of the image (PTX ISA table 40); all in bytes."""
    place = (BASE + offset) >> 4
    return place | (lbo >> 4) << 16 | (sbo >> 4) << 32 | 1 << 46 | base_offset << 49 | SWIZZLE_CODES[swizzle] << 61
