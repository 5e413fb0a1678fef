"""Programs for the tests of wgmma: operands from global memory to shared memory and registers, D back.

The layouts of registers are written out element by element, apart from the emulator.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from common.emulator import Emulator
from tests.common.emulator.isa.mma_reference import BITS, SPANS, value_of, write_matrix

M, WARPGROUP = 64, 128
IMAGE = 40 << 10
A_AT, B_AT = 0, 16 << 10  # where the operands lie in the image
SWIZZLE_CODES = {"none": 0, "128B": 1, "64B": 2, "32B": 3}
FENCE = "wgmma.fence.sync.aligned;"
COMMIT = "wgmma.commit_group.sync.aligned;"
WAIT = "wgmma.wait_group.sync.aligned 0;"
FINISH = COMMIT + WAIT


DTYPES = {"f16": np.float16, "f32": np.float32, "s32": np.int32}
K_OF = {"f16": 16, "bf16": 16, "tf32": 8, "e4m3": 32, "e5m2": 32, "s8": 32, "u8": 32, "b1": 256}
FP8, INTEGERS = ("e4m3", "e5m2"), ("s8", "u8")
TYPES = [
    ("f16", "f16", "f16"), ("f32", "f16", "f16"), ("f32", "bf16", "bf16"), ("f32", "tf32", "tf32"),
    *((d, a, b) for d in ("f16", "f32") for a in FP8 for b in FP8),
    *(("s32", a, b) for a in INTEGERS for b in INTEGERS),
    ("s32", "b1", "b1"),
]  # fmt: skip
HALVES = ("f16", "bf16")
SPARSE_TYPES = [types for types in TYPES if types[1] != "b1"]
ORDERED = (0b0100, 0b1000, 0b1100, 0b1001, 0b1101, 0b1110)  # sparse: pairs of indices, the lower one first
INPUTS = ("%a0", "%a1", "%a2", "%a3", "%meta")


class Integers(Protocol):
    """What of a NumPy generator is used."""

    def integers(self, low: int, high: int, size: tuple[int, ...]) -> np.ndarray: ...


def program(body: str, registers: int, target: str = "sm_90a") -> str:
    """D is %d0, %d1, ... and A, if it is not in shared memory, %a0 to %a3; %meta is the metadata of a sparse A.

    %memory is the image's address as descriptors count; %thread and %warp are there; %p, %q, %x and %at are free.
    """
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
.reg .b64 %image, %before, %inputs, %after, %offset, %row, %memory, %da, %db; .reg .pred %p, %q;
mov.u32 %thread, %tid.x; shr.u32 %warp, %thread, 5; mov.u32 %threads, %ntid.x; mov.u32 %base, memory;
cvt.u64.u32 %memory, %base; shr.u64 %memory, %memory, 4;
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
        return self.at >> 4 | lbo >> 4 << 16 | sbo >> 4 << 32 | SWIZZLE_CODES[self.swizzle] << 62

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
            f"add.u64 %da, %memory, {self.a.descriptor:#x}; add.u64 %db, %memory, {self.b.descriptor:#x};\n"
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


def codes_of(rng: Integers, kind: str, shape: tuple[int, int]) -> np.ndarray:
    """Codes whose products and sums are exact: small whole numbers, any integer, any bit."""
    if kind == "b1":
        return rng.integers(0, 2, shape)
    if kind in INTEGERS:
        return rng.integers(0, 256, shape)
    values = rng.integers(-4, 5, shape).astype(np.float32)
    if kind == "f16":
        return values.astype(np.float16).view(np.uint16).astype(np.int64)
    if kind == "bf16":
        return (values.view(np.uint32) >> 16).astype(np.int64)
    if kind == "tf32":  # the 13 lowest bits do not count
        return values.view(np.uint32).astype(np.int64) | rng.integers(0, 1 << 13, shape)
    codes = np.array([code for code in range(256) if code & 0x7F < 0x78])
    table = dict(zip(value_of(kind, codes).tolist(), codes.tolist()))
    return np.vectorize(table.__getitem__)(values.astype(np.float64))


def random_d(rng: Integers, kind: str, n: int) -> np.ndarray:
    """D (64, n): any integers, or small whole numbers."""
    limit = 1 << 31 if kind == "s32" else 100
    return rng.integers(-limit, limit, (M, n)).astype(DTYPES[kind])


def product(
    d: str = "f32",
    a: str = "f16",
    b: str = "f16",
    n: int = 16,
    constants: str | None = None,
    a_layout: tuple[str, bool] = ("none", False),
    b_layout: tuple[str, bool] = ("none", False),
    a_in_registers: bool = False,
    sparse: str = "",
    first: int = 0,
    rng: Integers | None = None,
) -> Product:
    """A product of random operands. `a_layout`, `b_layout`: swizzle, and whether MN-major."""
    rng = rng or np.random.default_rng(0)
    k = K_OF[a] * (2 if sparse else 1)
    matrix_a = Matrix(codes_of(rng, a, (M, K_OF[a])), a, A_AT, *a_layout)
    matrix_b = Matrix(codes_of(rng, b, (n, k)), b, B_AT, *b_layout)
    if constants is None:
        majors = [a_layout[1], b_layout[1]] if a in HALVES else []
        constants = ", ".join(["1", "1"] * (d != "s32") + [str(int(major)) for major in majors[a_in_registers:]])
    bits = ".and.popc" if a == "b1" else ""
    return Product(
        opcode=f"{'.sp' if sparse else ''}.sync.aligned.m64n{n}k{k}.{d}.{a}.{b}{bits}",
        a=matrix_a, b=matrix_b, constants=constants, registers=n // 4 if d == "f16" else n // 2, first=first,
        a_in_registers=a_in_registers, sparse=sparse,
    )  # fmt: skip


def inputs_of(p: Product, metadata: np.ndarray | int = 0) -> np.ndarray:
    inputs = np.zeros((5, WARPGROUP), np.uint32)
    inputs[4] = metadata
    if p.a_in_registers:
        inputs[:4] = registers_of_a(p.a.codes, p.a.kind)
    return inputs


def compress(rng: Integers, p: Product, pairs: tuple[int, ...] = ORDERED) -> tuple[np.ndarray, np.ndarray]:
    """A in full (64, K), of the stored values of `p` at random places, and the metadata registers (128,).

    `pairs`: the 4-bit indices to choose from, but for tf32.
    """
    tf32 = p.a.kind == "tf32"
    if tf32:
        pairs = (0b0100, 0b1110)
    stored = p.a.values.reshape(M, -1, 1 if tf32 else 2)
    chunks = stored.shape[1]
    full = np.zeros((M, chunks, 2 if tf32 else 4))
    indices = np.array(pairs)[rng.integers(0, len(pairs), (M, chunks))]
    for row, chunk in np.ndindex(M, chunks):
        index = indices[row, chunk]
        places = [index >> 3] if tf32 else [index & 3, index >> 2]
        full[row, chunk, places] = stored[row, chunk]
    words = rng.integers(0, 1 << 32, (WARPGROUP,)).astype(np.int64)
    for row, chunk in np.ndindex(M, chunks):
        lane, bit = _metadata_place(row, chunk, chunks, int(p.sparse[-1]))
        words[lane] = words[lane] & ~(0xF << bit) | int(indices[row, chunk]) << bit
    return full.reshape(M, -1), words.astype(np.uint32)


def _metadata_place(row: int, chunk: int, chunks: int, selector: int) -> tuple[int, int]:
    """Lane and lowest bit of an index. With 8 chunks a row has 16 bits in each of two lanes, with 16 all of them."""
    first_lane = row // 16 * 32 + row % 8 * 4
    lower = row % 16 // 8
    if chunks == 8:
        return first_lane + 2 * selector + chunk // 4, 16 * lower + 4 * (chunk % 4)
    return first_lane + 2 * (chunk // 8) + lower, 4 * (chunk % 8)
