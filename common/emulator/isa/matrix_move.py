"""Matrices between shared memory and the registers of a warp: ldmatrix, stmatrix, movmatrix (PTX ISA 9.7.14.5.15-17).

A matrix row is 16 bytes at an address that one lane supplies. What the ISA only draws (the byte forms) follows the
layouts of CUTLASS's SM100 copy atoms.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from common.emulator.faults import InvalidAddress, UnsupportedInstruction
from common.emulator.isa.binder import Binder, Modifiers
from common.emulator.isa.fragments import read_all, set_words, whole_warps, words_of, write_all
from common.emulator.isa.load_store import addresses_of, bind_address
from common.emulator.isa.registry import Decoded, collective, instruction
from common.emulator.machine.counters import Traffic
from common.emulator.machine.mask import WARP, Mask
from common.emulator.machine.memory import SHARED_WINDOW, Piece
from common.emulator.ptx.module import Instruction, Operand

ROW_BYTES = 16
_PACKED = ("b6x16_p32", "b4x16_p64")
Arrange = Callable[[np.ndarray], np.ndarray]


@dataclass(frozen=True)
class Rows:
    """Where the rows of a warp's matrices lie: lane i < `lanes` supplies the address of row i."""

    space: str
    base: int | None
    offset: int
    lanes: int

    def locate(self, f: list, m: Mask, cta) -> Piece:
        """The rows, warp by warp. Raises Misaligned, OutOfBounds, and InvalidAddress outside shared memory."""
        if self.lanes < WARP:
            m = Mask(m.lanes & (np.arange(m.lanes.size) % WARP < self.lanes))
        addresses = addresses_of(f, m, self.base, self.offset)
        if self.space == "generic":
            outside = addresses >> 40 != SHARED_WINDOW >> 40
            if outside.any():
                raise InvalidAddress(
                    f"the generic address {int(addresses[outside][0]):#x} of a matrix row is not in shared memory",
                    lanes=m.numbers[outside], address=int(addresses[outside][0]),
                )  # fmt: skip
            addresses = addresses - SHARED_WINDOW
        (piece,) = cta.locate("shared", addresses, ROW_BYTES, m)
        return piece


def _take_space(mods: Modifiers) -> str:
    return "generic" if mods.optional("shared", "shared::cta") is None else "shared"


def _bind_rows(b: Binder, operand: Operand, space: str, lanes: int) -> Rows:
    space, base, offset = bind_address(b, operand, space)
    return Rows(space, base, offset, lanes)


@instruction("ldmatrix")
def decode_load_matrix(inst: Instruction, b: Binder) -> Decoded:
    mods = b.modifiers(inst)
    mods.one_of("sync")
    mods.one_of("aligned")
    shape = mods.one_of("m8n8", "m16n16", "m8n16")
    count = int(mods.one_of("x1", "x2", "x4")[1:])
    transposed = mods.take("trans")
    space = _take_space(mods)
    arrange = _arrangement(shape, count, transposed, _source_format(mods))
    mods.done()
    per_matrix = 16 if shape == "m16n16" else 8
    targets = write_all(b, inst.operands[0], "u32")
    _expect(inst, len(targets), count * per_matrix // 8)
    rows = _bind_rows(b, inst.operands[1], space, count * per_matrix)
    traffic = Traffic(inst, ROW_BYTES, "matrix", rows.lanes)

    def load(f, m, cta) -> None:
        warps = whole_warps(m)
        piece = rows.locate(f, m, cta)
        data = piece.region.view(4, 4)[piece.offsets >> 4]
        words = arrange(data.reshape(-1, count, 4 * per_matrix))
        cta.machine.counters.bytes["ldmatrix"] += data.nbytes
        traffic.count_rows(cta, piece.offsets)
        for place, slot in enumerate(targets):
            set_words(f, slot, warps, words[:, place])

    return collective(load)


def _source_format(mods: Modifiers) -> str:
    """b16, b8, or the packed format that is expanded to bytes."""
    if mods.take("b8x16"):
        return mods.one_of(*_PACKED)
    return mods.one_of("b16", "b8")


def _expect(inst: Instruction, given: int, wanted: int) -> None:
    if given != wanted or len(inst.operands) != 2:
        raise UnsupportedInstruction(f"`{inst.opcode}`: this form takes a vector of {wanted} registers and an address")


def _arrangement(shape: str, count: int, transposed: bool, source: str) -> Arrange:
    """u32 rows of memory (warps, matrices, words) to register words (warps, registers, 32)."""
    if shape == "m8n8" and source == "b16":
        return _transpose_halves if transposed else _as_registers
    if shape == "m8n16" and source in _PACKED and not transposed:
        return lambda rows: _as_registers(_expand(rows, source))
    if shape == "m16n16" and source != "b16" and transposed and count <= 2:
        return lambda rows: _columns_of_bytes(_expand(rows, source))
    trans = ".trans" if transposed else ""
    raise UnsupportedInstruction(f"ldmatrix.{shape}.x{count}{trans} does not exist for {source}")


def _as_registers(rows: np.ndarray) -> np.ndarray:
    return rows.reshape(rows.shape[0], -1, WARP)


def _transpose_halves(words: np.ndarray) -> np.ndarray:
    """8x8 matrices of 16-bit elements (warps, matrices, 32 words), each transposed."""
    halves = words.view(np.uint16).reshape(*words.shape[:2], 8, 8)
    return np.ascontiguousarray(halves.swapaxes(2, 3)).reshape(*words.shape[:2], 64).view(np.uint32)


def _columns_of_bytes(rows: np.ndarray) -> np.ndarray:
    """16x16 bytes: register r of lane l holds rows 4 * (l % 4) to + 3 of column l / 4 + 8 * r."""
    matrices = rows.view(np.uint8).reshape(*rows.shape[:2], 16, 16)
    return _as_registers(np.ascontiguousarray(matrices.swapaxes(2, 3)).view(np.uint32))


def _expand(rows: np.ndarray, source: str) -> np.ndarray:
    """Rows of 16 packed elements, then padding, to 16 bytes with the element in the low bits."""
    if source == "b8":
        return rows
    data = rows.reshape(*rows.shape[:2], -1, 4)
    if source == "b4x16_p64":
        packed = data[..., :2].view(np.uint8)
        elements = np.stack((packed & 0xF, packed >> 4), axis=-1)
    else:
        triples = data[..., :3].view(np.uint8).reshape(*data.shape[:3], 4, 3)  # four elements in three bytes
        first, second, third = (triples[..., place] for place in range(3))
        elements = np.stack(
            (first & 0x3F, first >> 6 | (second & 0xF) << 2, second >> 4 | (third & 0x3) << 4, third >> 2), axis=-1
        )
    return elements.reshape(*rows.shape[:2], -1).view(np.uint32)


@instruction("stmatrix")
def decode_store_matrix(inst: Instruction, b: Binder) -> Decoded:
    mods = b.modifiers(inst)
    mods.one_of("sync")
    mods.one_of("aligned")
    shape = mods.one_of("m8n8", "m16n8")
    count = int(mods.one_of("x1", "x2", "x4")[1:])
    transposed = mods.take("trans")
    space = _take_space(mods)
    kind = mods.one_of("b16", "b8")
    mods.done()
    if (shape == "m16n8") != (kind == "b8") or (kind == "b8" and not transposed):
        raise UnsupportedInstruction(
            f"stmatrix.{shape}.{kind} does not exist{'' if transposed else ' without .trans'}: "
            "use .m8n8{.trans}.b16 or .m16n8.trans.b8"
        )
    sources = read_all(b, inst.operands[1], "u32")
    _expect(inst, len(sources), count)
    rows = _bind_rows(b, inst.operands[0], space, 8 * count)
    traffic = Traffic(inst, ROW_BYTES, "matrix", rows.lanes)
    if kind == "b8":
        arrange: Arrange = _rows_of_bytes
    else:
        arrange = _transpose_halves if transposed else _as_registers

    def store(f, m, cta) -> None:
        warps = whole_warps(m)
        piece = rows.locate(f, m, cta)
        words = np.stack([words_of(f, slot, warps) for slot in sources], axis=1)
        piece.region.view(4, 4)[piece.offsets >> 4] = arrange(words).reshape(-1, 4)
        piece.region.generic_writes.add(piece.offsets)
        cta.machine.counters.bytes["stmatrix"] += words.nbytes
        traffic.count_rows(cta, piece.offsets)
        cta.activity()

    return collective(store)


def _rows_of_bytes(words: np.ndarray) -> np.ndarray:
    """16x8 bytes: lane l holds columns 2 * (l % 4) and + 1 of row l / 4, then of row l / 4 + 8; columns become rows."""
    elements = words.view(np.uint8).reshape(*words.shape[:2], 8, 4, 2, 2)  # group, thread, upper half, column
    return np.ascontiguousarray(elements.transpose(0, 1, 3, 5, 4, 2)).reshape(*words.shape[:2], 128).view(np.uint32)


@instruction("movmatrix")
def decode_transpose_matrix(inst: Instruction, b: Binder) -> Decoded:
    mods = b.modifiers(inst)
    for part in ("sync", "aligned", "m8n8", "trans", "b16"):
        mods.one_of(part)
    mods.done()
    target, source = inst.operands
    (d,) = write_all(b, target, "u32")
    (a,) = read_all(b, source, "u32")

    def transpose(f, m, cta) -> None:
        warps = whole_warps(m)
        words = np.ascontiguousarray(words_of(f, a, warps))
        set_words(f, d, warps, _transpose_halves(words[:, None])[:, 0])

    return collective(transpose)
