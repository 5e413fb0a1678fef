"""Programs for the tests of wgmma: operands from global memory to shared memory and registers, D back.

The layouts of registers are written out element by element, apart from the emulator.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from common.emulator import Emulator
from common.emulator.machine.memory import RESERVED_SHARED
from tests.common.emulator.isa.mma_reference import BITS, SPANS, value_of, write_matrix

M, WARPGROUP = 64, 128
IMAGE = 40 << 10
A_AT, B_AT = 0, 16 << 10  # where the operands lie in the image
SWIZZLE_CODES = {"none": 0, "128B": 1, "64B": 2, "32B": 3}
FENCE = "wgmma.fence.sync.aligned;"
COMMIT = "wgmma.commit_group.sync.aligned;"
WAIT = "wgmma.wait_group.sync.aligned 0;"
FINISH = COMMIT + WAIT


def program(body: str, registers: int, target: str = "sm_90a") -> str:
    """D is %d0, %d1, ...; A may be in %a0 to %a3, metadata in %meta; %thread and %warp are there, %p is free."""
    loads = "".join(f"ld.global.b32 %d{r}, [%before]; add.u64 %before, %before, %row;\n" for r in range(registers))
    stores = "".join(f"st.global.b32 [%after], %d{r}; add.u64 %after, %after, %row;\n" for r in range(registers))
    inputs = "".join(f"ld.global.b32 {name}, [%inputs]; add.u64 %inputs, %inputs, %row;\n" for name in INPUTS)
    return f"""
.version 8.7
.target {target}
.address_size 64
.extern .shared .align 1024 .b8 memory[];
.visible .entry k(.param .u64 image, .param .u64 before, .param .u64 inputs, .param .u64 after)
{{ .reg .b32 %thread, %warp, %threads, %base, %at, %end, %step, %x, %v<4>, %d<{registers}>, %a<4>, %meta;
.reg .b64 %image, %before, %inputs, %after, %offset, %row, %da, %db; .reg .pred %p, %q;
mov.u32 %thread, %tid.x; shr.u32 %warp, %thread, 5; mov.u32 %threads, %ntid.x; mov.u32 %base, memory;
mad.lo.u32 %at, %thread, 16, %base; add.u32 %end, %base, {IMAGE}; mul.lo.u32 %step, %threads, 16;
mul.wide.u32 %row, %threads, 4; mul.wide.u32 %offset, %thread, 16;
ld.param.u64 %image, [image]; add.u64 %image, %image, %offset;
FILL: setp.ge.u32 %p, %at, %end; @%p bra FULL;
ld.global.v4.b32 {{%v0, %v1, %v2, %v3}}, [%image]; st.shared.v4.b32 [%at], {{%v0, %v1, %v2, %v3}};
add.u32 %at, %at, %step; mul.wide.u32 %offset, %step, 1; add.u64 %image, %image, %offset; bra FILL;
FULL: fence.proxy.async; bar.sync 0; mul.wide.u32 %offset, %thread, 4;
ld.param.u64 %before, [before]; add.u64 %before, %before, %offset;
ld.param.u64 %inputs, [inputs]; add.u64 %inputs, %inputs, %offset;
ld.param.u64 %after, [after]; add.u64 %after, %after, %offset;
{loads}{inputs}
{body}
{stores} ret; }}
"""


INPUTS = ("%a0", "%a1", "%a2", "%a3", "%meta")


def run(
    body: str,
    image: np.ndarray,
    before: np.ndarray,
    inputs: np.ndarray | None = None,
    schedule: str = "late",
    seed: int = 0,
) -> np.ndarray:
    """Runs `body` with D of `before`, uint32 (registers, threads); returns D afterwards. `inputs`: (5, threads)."""
    registers, threads = before.shape
    after = np.zeros_like(before)
    inputs = np.zeros((len(INPUTS), threads), np.uint32) if inputs is None else inputs
    args = [image, np.ascontiguousarray(before), np.ascontiguousarray(inputs), after]
    Emulator(schedule, seed).launch(program(body, registers), "k", grid=1, block=threads, shared_bytes=IMAGE, args=args)
    return after


@dataclass(frozen=True)
class Matrix:
    """A multiplicand: codes (rows, K) of `kind`, and how it lies in shared memory at `at` of the image."""

    codes: np.ndarray
    kind: str
    at: int
    swizzle: str = "none"
    mn_major: bool = False

    @property
    def values(self) -> np.ndarray:
        return self.codes.astype(np.float64) if self.kind == "b1" else value_of(self.kind, self.codes)

    @property
    def descriptor(self) -> int:
        lbo, sbo = self._strides
        return (RESERVED_SHARED + self.at) >> 4 | lbo >> 4 << 16 | sbo >> 4 << 32 | SWIZZLE_CODES[self.swizzle] << 62

    def put(self, image: np.ndarray) -> None:
        codes, kind = self._stored
        write_matrix(image[self.at :], 0, codes, kind, self.swizzle, self.mn_major, *self._strides)

    @property
    def _stored(self) -> tuple[np.ndarray, str]:
        """Bits as bytes."""
        if self.kind != "b1":
            return self.codes, self.kind
        return np.packbits(self.codes.astype(np.uint8), axis=1, bitorder="little"), "u8"

    @property
    def _strides(self) -> tuple[int, int]:
        """LBO and SBO, in bytes, of a dense packing."""
        codes, kind = self._stored
        atom = 128 * SPANS[self.swizzle]
        chunks = codes.shape[0 if self.mn_major else 1] * BITS[kind] // 128
        if self.swizzle == "none":
            return (128 * chunks, 128) if self.mn_major else (128, 128 * chunks)
        return (atom, chunks * 128) if self.mn_major else (16, atom)


def registers_of_a(codes: np.ndarray, kind: str) -> np.ndarray:
    """The fragment of A (64, K) in registers, uint32 (4, 128)."""
    bits = 1 if kind == "b1" else BITS[kind]
    per = 32 // bits
    words = np.zeros((4, WARPGROUP), np.uint64)
    for register in range(4):
        for thread in range(WARPGROUP):
            row = 16 * (thread // 32) + thread % 32 // 4 + 8 * (register % 2)
            first = per * (thread % 4 + 4 * (register // 2))
            words[register, thread] = sum(
                int(code) << bits * n for n, code in enumerate(codes[row, first : first + per])
            )
    return words.astype(np.uint32)


def _place(register: int, thread: int) -> tuple[int, int]:
    """Row and column of a 32-bit accumulator."""
    row = 16 * (thread // 32) + thread % 32 // 4 + 8 * (register // 2 % 2)
    return row, 8 * (register // 4) + 2 * (thread % 4) + register % 2


def registers_of_d(matrix: np.ndarray) -> np.ndarray:
    """D (64, N) of float32, int32 or float16 as registers, uint32 (registers, 128)."""
    columns = matrix.shape[1]
    bits = matrix.view(np.uint16 if matrix.dtype == np.float16 else np.uint32).astype(np.uint32)
    registers, threads = np.arange(columns // 2)[:, None], np.arange(WARPGROUP)
    words = bits[_place(registers, threads)]
    return words if matrix.dtype != np.float16 else words[::2] | words[1::2] << np.uint32(16)


def matrix_of_d(words: np.ndarray, dtype: type) -> np.ndarray:
    """The inverse."""
    if dtype is np.float16:
        words = np.stack((words & np.uint32(0xFFFF), words >> np.uint32(16)), axis=1).reshape(-1, WARPGROUP)
    registers, threads = np.arange(words.shape[0])[:, None], np.arange(WARPGROUP)
    matrix = np.empty((M, 2 * words.shape[0]), np.uint32)
    matrix[_place(registers, threads)] = words
    return matrix.astype(np.uint16).view(np.float16) if dtype is np.float16 else matrix.view(dtype)


def vector(count: int, first: int = 0, name: str = "%d") -> str:
    return "{" + ", ".join(f"{name}{first + place}" for place in range(count)) + "}"


@dataclass(frozen=True)
class Product:
    """One mma_async: `opcode` is what follows `wgmma.mma_async`, `constants` what follows scale-d."""

    opcode: str
    a: Matrix
    b: Matrix
    constants: str
    registers: int  # of D
    first: int = 0
    a_in_registers: bool = False
    sparse: str = ""  # ", %meta, selector"

    @property
    def text(self) -> str:
        """Makes the descriptors and issues it; scale-d is %q."""
        a = vector(4, name="%a") if self.a_in_registers else "%da"
        return (
            f"mov.b64 %da, {self.a.descriptor:#x}; mov.b64 %db, {self.b.descriptor:#x};\n"
            f"wgmma.mma_async{self.opcode} {vector(self.registers, self.first)}, {a}, %db{self.sparse}, %q"
            f"{', ' * bool(self.constants)}{self.constants};"
        )

    def image(self) -> np.ndarray:
        image = np.full(IMAGE, 0xFF, np.uint8)
        for matrix in (self.a, self.b):
            matrix.put(image)
        return image


def scale_d(keep: bool) -> str:
    return f"setp.eq.u32 %q, {int(keep)}, 1;"
