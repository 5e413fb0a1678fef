"""Matrix multiply-accumulate of a warp: dense `mma.sync` (PTX ISA 9.7.14.5).

All fragments follow one rule. A 32-bit register (64 for f64) holds one or more neighbours of a row, four lanes hold a
row of a block, and a register of the warp holds a block of 8 rows: register after register the blocks go down the rows
of A first, then along K; those of B (whose columns count as rows) go along K. Accumulator registers hold neighbours of
a row too, one for each register or two f16.

Products are exact; they are summed in float32 (float64 for f64, one fused multiply-add after the other), in an order
that the ISA leaves open; f16 results are rounded once. A sum of int8 products is below 2**24, so float32 holds it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from common.emulator.faults import UnsupportedInstruction
from common.emulator.isa.binder import Binder, Modifiers
from common.emulator.isa.fragments import Selection, read_all, set_words, whole_warps, words_of, write_all
from common.emulator.isa.registry import Decoded, Run, collective, instruction
from common.emulator.numerics import formats
from common.emulator.numerics.arithmetic import fma_f64
from common.emulator.numerics.modifiers import canonical_nan
from common.emulator.ptx.module import Instruction

N = 8  # every shape has eight columns
BLOCK = 8  # rows of a register's block
THREADS = 4  # lanes that hold a row


@dataclass(frozen=True)
class Multiplicand:
    """A type of A and B: elements per register, and (warps, 32) registers to (warps, 32 * elements) numbers."""

    per_register: int
    decode: Callable[[np.ndarray], np.ndarray]


def _view_as(dtype: type) -> Callable[[np.ndarray], np.ndarray]:
    return lambda words: words.view(dtype)


def _from_table(fmt: formats.FloatFormat, shift: int = 0) -> Callable[[np.ndarray], np.ndarray]:
    """Bytes that hold a value of `fmt` above `shift` low bits of padding."""
    mask = (1 << fmt.width) - 1
    table = formats.decode(fmt, np.arange(256, dtype=np.uint8) >> shift & mask).astype(np.float32)
    return lambda words: table[words.view(np.uint8)]


def _nibbles(signed: bool) -> Callable[[np.ndarray], np.ndarray]:
    def decode(words: np.ndarray) -> np.ndarray:
        packed = words.view(np.uint8)
        values = np.stack((packed & 0xF, packed >> 4), axis=-1).reshape(words.shape[0], -1).view(np.int8)
        return (values ^ 8) - 8 if signed else values

    return decode


def _tf32(words: np.ndarray) -> np.ndarray:
    """The low 13 bits of the register are not part of the value."""
    return (words & np.uint32(0xFFFF_E000)).view(np.float32)


_TYPES = {
    "f16": Multiplicand(2, _view_as(np.float16)),
    "bf16": Multiplicand(2, lambda words: formats.f32_from_bf16(words.view(np.uint16))),
    "tf32": Multiplicand(1, _tf32),
    "f64": Multiplicand(1, lambda values: values),
    "e4m3": Multiplicand(4, _from_table(formats.E4M3)),
    "e5m2": Multiplicand(4, _from_table(formats.E5M2)),
    "e3m2": Multiplicand(4, _from_table(formats.E3M2)),
    "e2m3": Multiplicand(4, _from_table(formats.E2M3)),
    "e2m1": Multiplicand(4, _from_table(formats.E2M1, shift=2)),
    "s8": Multiplicand(4, _view_as(np.int8)),
    "u8": Multiplicand(4, _view_as(np.uint8)),
    "s4": Multiplicand(8, _nibbles(signed=True)),
    "u4": Multiplicand(8, _nibbles(signed=False)),
}
_FP8 = ("e4m3", "e5m2")
_FAMILIES: tuple[tuple[tuple[str, ...], tuple[str, ...], bool, tuple[str, ...]], ...] = (
    # multiplicands, shapes, whether A and B must have one type, accumulators
    (("f16",), ("m16n8k8", "m16n8k16"), True, ("f16", "f32")),
    (("bf16",), ("m16n8k8", "m16n8k16"), True, ("f32",)),
    (("tf32",), ("m16n8k4", "m16n8k8"), True, ("f32",)),
    (("f64",), ("m8n8k4", "m16n8k4", "m16n8k8", "m16n8k16"), True, ("f64",)),
    (_FP8, ("m16n8k16", "m16n8k32"), False, ("f16", "f32")),
    (("s8", "u8"), ("m8n8k16", "m16n8k16", "m16n8k32"), False, ("s32",)),
    (("s4", "u4"), ("m8n8k32", "m16n8k32", "m16n8k64"), False, ("s32",)),
)  # fmt: skip
_NARROW = (*_FP8, "e3m2", "e2m3", "e2m1")
_F8F6F4 = (_NARROW, ("m16n8k32",), False, ("f16", "f32"))


@dataclass(frozen=True)
class Form:
    """One variant of mma: A is (rows, k), B is (k, 8), the accumulators are (rows, 8)."""

    rows: int
    k: int
    a: str
    b: str
    accumulator: str
    saturate: bool
    rounding: str

    @property
    def label(self) -> str:
        return f"mma m{self.rows}n{N}k{self.k} {self.a} {self.b} {self.accumulator}"


@instruction("wmma")
def decode_wmma(inst: Instruction, b: Binder) -> Decoded:
    raise UnsupportedInstruction("wmma is not supported: use ldmatrix and mma.sync")


@instruction("mma")
def decode_mma(inst: Instruction, b: Binder) -> Decoded:
    form = _form(b.modifiers(inst))
    kinds = _register_kinds(form)
    if len(inst.operands) != 4:
        raise UnsupportedInstruction(f"mma takes d, a, b, c: {len(inst.operands)} operands are not supported")
    target, *sources = inst.operands
    slots = [read_all(b, operand, kind) for operand, kind in zip(sources, kinds)]
    targets = write_all(b, target, kinds[2])
    given = [len(part) for part in (*slots, targets)]
    wanted = _register_counts(form)
    if given != wanted:
        raise UnsupportedInstruction(f"{form.label} takes vectors of {wanted} registers for a, b, c, d, not {given}")
    return collective(_multiply(form, *slots, targets))


def _form(mods: Modifiers) -> Form:
    """Checks and consumes all modifiers."""
    for refused in ("sp", "sp::ordered_metadata", "block_scale"):
        if mods.take(refused):
            raise UnsupportedInstruction(f"mma.{refused} is not supported: use dense mma.sync without scale factors")
    mods.one_of("sync")
    mods.one_of("aligned")
    kind = mods.optional("kind::f8f6f4")
    saturate = mods.take("satfinite")
    rounding = mods.optional("rn", "rz", "rm", "rp")
    layout = (mods.one_of("row", "col"), mods.one_of("row", "col"))
    shape, *types = mods.rest()
    if "b1" in types:
        raise UnsupportedInstruction("mma of .b1 is not supported")
    if shape == "m8n8k4" and types[1:3] == ["f16", "f16"]:
        raise UnsupportedInstruction("mma.m8n8k4 of .f16, four small products per warp, is not supported: use m16n8k8")
    if len(types) != 4 or layout != ("row", "col") or not _exists(shape, types, kind is not None):
        raise UnsupportedInstruction(f"`{mods.opcode}` is not a form of mma that is supported")
    accumulator = types[0]
    if (saturate and accumulator != "s32") or (rounding and accumulator != "f64"):
        raise UnsupportedInstruction(f"`{mods.opcode}`: .satfinite belongs to integers, rounding modifiers to .f64")
    rows, k = (int(number) for number in re.fullmatch(r"m(\d+)n8k(\d+)", shape).groups())
    return Form(rows, k, types[1], types[2], accumulator, saturate, rounding or "rn")


def _exists(shape: str, types: list[str], f8f6f4: bool) -> bool:
    result, a, b, accumulator = types
    families = (_F8F6F4,) if f8f6f4 else _FAMILIES
    return result == accumulator and any(
        a in elements and b in elements and (a == b or not same) and shape in shapes and accumulator in accumulators
        for elements, shapes, same, accumulators in families
    )


def _register_kinds(form: Form) -> tuple[str, str, str]:
    """Types of the registers of a, b and c."""
    if form.accumulator == "f64":
        return "f64", "f64", "f64"
    return "u32", "u32", {"f32": "f32", "s32": "s32", "f16": "u32"}[form.accumulator]


def _register_counts(form: Form) -> list[int]:
    """Registers of a, b, c and d."""
    a, b = (form.k // (THREADS * _TYPES[kind].per_register) for kind in (form.a, form.b))
    down = form.rows // BLOCK
    accumulators = down * (1 if form.accumulator == "f16" else 2)
    return [down * a, b, accumulators, accumulators]


def _multiply(form: Form, a: list[int], b: list[int], c: list[int], d: list[int]) -> Run:
    load_a = _loader(a, _TYPES[form.a], form.rows, form.k, form.accumulator)
    load_b = _loader(b, _TYPES[form.b], N, form.k, form.accumulator)
    finish = _finisher(form, c, d)
    label = form.label

    def multiply(f, m, cta) -> None:
        warps = whole_warps(m)
        finish(f, warps, load_a(f, warps), load_b(f, warps))
        cta.machine.counters.events[label] += m.count // 32

    return multiply


def _loader(
    slots: list[int], kind: Multiplicand, rows: int, k: int, accumulator: str
) -> Callable[[list, Selection], np.ndarray]:
    """Gathers a multiplicand as (warps, rows, k); B comes out transposed, its columns being rows."""
    width = THREADS * kind.per_register
    down = rows // BLOCK
    places = [
        (slot, slice(BLOCK * (place % down), BLOCK * (place % down + 1)), slice(first, first + width))
        for place, slot in enumerate(slots)
        for first in (width * (place // down),)
    ]
    decode = kind.decode
    dtype = np.float64 if accumulator == "f64" else np.float32

    def load(f: list, warps: Selection) -> np.ndarray:
        matrix = None
        for slot, down_rows, along in places:
            values = decode(words_of(f, slot, warps))
            if matrix is None:
                matrix = np.empty((values.shape[0], rows, k), dtype)
            matrix[:, down_rows, along] = values.reshape(-1, BLOCK, width)
        return matrix

    return load


Finish = Callable[[list, Selection, np.ndarray, np.ndarray], None]


def _finisher(form: Form, c: list[int], d: list[int]) -> Finish:
    """Multiplies (warps, rows, k) by the transpose of (warps, 8, k), adds c and writes d."""
    if form.accumulator == "f16":
        return _finish_f16(c, d)
    if form.accumulator == "f64":
        return _finish_f64(form, c, d)
    if form.accumulator == "s32":
        return _finish_s32(form, c, d)
    return _finish_f32(c, d)


def _product(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return np.matmul(a, b.transpose(0, 2, 1))


def _by_register(matrix: np.ndarray) -> list[np.ndarray]:
    """Accumulators (warps, rows, 8) as registers (warps, 8, 4), in register order: two columns, then 8 rows down."""
    blocks = matrix.reshape(matrix.shape[0], -1, BLOCK, THREADS, 2)
    return [blocks[:, down, :, :, column] for down in range(blocks.shape[1]) for column in range(2)]


def _accumulators(f: list, slot: int, warps: Selection) -> np.ndarray:
    return f[slot].reshape(-1, BLOCK, THREADS)[warps]


def _write(f: list, warps: Selection, targets: list[int], results: list[np.ndarray]) -> None:
    for slot, values in zip(targets, results):
        f[slot].reshape(-1, BLOCK, THREADS)[warps] = values


def _finish_f32(c: list[int], d: list[int]) -> Finish:
    def finish(f: list, warps: Selection, a: np.ndarray, b: np.ndarray) -> None:
        parts = _by_register(_product(a, b))
        _write(f, warps, d, [canonical_nan(part + _accumulators(f, slot, warps)) for part, slot in zip(parts, c)])

    return finish


def _finish_f16(c: list[int], d: list[int]) -> Finish:
    def finish(f: list, warps: Selection, a: np.ndarray, b: np.ndarray) -> None:
        product = _product(a, b)
        added = [words_of(f, slot, warps).view(np.float16).reshape(-1, BLOCK, N) for slot in c]
        total = product + np.concatenate(added, axis=1)
        halves = canonical_nan(total.astype(np.float16)).reshape(total.shape[0], len(d), 2 * 32).view(np.uint32)
        for place, slot in enumerate(d):
            set_words(f, slot, warps, halves[:, place])

    return finish


def _finish_s32(form: Form, c: list[int], d: list[int]) -> Finish:
    def finish(f: list, warps: Selection, a: np.ndarray, b: np.ndarray) -> None:
        parts = _by_register(_product(a, b).astype(np.int64))
        totals = [part + _accumulators(f, slot, warps) for part, slot in zip(parts, c)]
        if form.saturate:
            totals = [np.clip(total, -0x8000_0000, 0x7FFF_FFFF) for total in totals]
        _write(f, warps, d, totals)  # without .satfinite the assignment to s32 wraps

    return finish


def _finish_f64(form: Form, c: list[int], d: list[int]) -> Finish:
    def finish(f: list, warps: Selection, a: np.ndarray, b: np.ndarray) -> None:
        total = np.stack([_accumulators(f, slot, warps) for slot in c], axis=1)
        total = total.reshape(total.shape[0], -1, 2, BLOCK, THREADS).transpose(0, 1, 3, 4, 2).reshape(-1, form.rows, N)
        for step in range(form.k):
            total = fma_f64(a[:, :, None, step], b[:, None, :, step], total, form.rounding)
        _write(f, warps, d, _by_register(total))

    return finish
