"""Counting, finding, moving and permuting bits and bytes (PTX ISA 9.7.1.14 to 9.7.1.22, 9.7.9.7)."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from common.emulator.isa.binder import Binder, dtype_of
from common.emulator.isa.registry import Decoded, Run, instruction
from common.emulator.ptx.module import Immediate, Instruction

_ALL_ONES = ~np.uint64(0)
_NOT_FOUND = np.uint32(0xFFFF_FFFF)
# Bits of a position or length that count, by operand width. The ISA rules numbers above 255 out: as on an H200.
_COUNTED = {32: np.uint32(0xFF), 64: np.uint32(0xFFFF_FFFF)}
_REVERSED = np.packbits(np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1), axis=1, bitorder="little")[:, 0]
_PERMUTE_MODES = ("f4e", "b4e", "rc8", "ecl", "ecr", "rc16")


@instruction("popc", "clz", "brev", lanewise=True)
def decode_count(inst: Instruction, b: Binder) -> Decoded:
    mods = b.modifiers(inst)
    kind = mods.one_of("b32", "b64")
    mods.done()
    target, source = inst.operands
    operation = {"popc": np.bitwise_count, "clz": _leading_zeros, "brev": _reversed}[inst.opcode]
    x, d = b.read(source, kind), b.write(target, kind if inst.opcode == "brev" else "u32")

    def run(f, m, cta) -> None:
        np.copyto(f[d], operation(f[x]), where=m.where)

    return run


def _leading_zeros(values: np.ndarray) -> np.ndarray:
    return np.uint32(8 * values.dtype.itemsize) - _bit_length(values)


def _bit_length(values: np.ndarray) -> np.ndarray:
    """Position of the highest one plus one, of uint32 or uint64 values; 0 gives 0."""
    if values.dtype == np.uint32:
        return np.frexp(values.astype(np.float64))[1].astype(np.uint32)
    high = (values >> np.uint64(32)).astype(np.uint32)
    low = values.astype(np.uint32)
    return np.where(high != 0, _bit_length(high) + np.uint32(32), _bit_length(low))


def _reversed(values: np.ndarray) -> np.ndarray:
    swapped = np.ascontiguousarray(values).byteswap()
    return _REVERSED[swapped.view(np.uint8)].view(values.dtype)


@instruction("bfind", lanewise=True)
def decode_find(inst: Instruction, b: Binder) -> Decoded:
    mods = b.modifiers(inst)
    shift_amount = mods.take("shiftamt")
    kind = mods.one_of("u32", "u64", "s32", "s64")
    mods.done()
    target, source = inst.operands
    x, d = b.read(source, kind), b.write(target, "u32")
    unsigned = dtype_of(kind.replace("s", "u"))
    top = np.uint32(8 * unsigned.itemsize - 1)

    def run(f, m, cta) -> None:
        values = f[x]
        if kind.startswith("s"):
            values = np.where(values < 0, ~values, values).view(unsigned)
        place = _bit_length(values) - np.uint32(1)
        if shift_amount:
            place = np.where(place == _NOT_FOUND, place, top - place)
        np.copyto(f[d], place, where=m.where)

    return run


@instruction("fns")
def decode_find_nth(inst: Instruction, b: Binder) -> Decoded:
    mods = b.modifiers(inst)
    mods.one_of("b32")
    mods.done()
    target, mask, base, offset = inst.operands
    x, start, n, d = b.read(mask, "u32"), b.read(base, "u32"), b.read(offset, "s32"), b.write(target, "u32")

    def run(f, m, cta) -> None:
        np.copyto(f[d], _find_nth(f[x], f[start].astype(np.int64), f[n].astype(np.int64)), where=m.where)

    return run


def _find_nth(mask: np.ndarray, base: np.ndarray, offset: np.ndarray) -> np.ndarray:
    """Walks from bit `base` upwards, or downwards for a negative offset, to the |offset|-th one; 0 asks for `base`."""
    step = np.where(offset < 0, -1, 1)
    left = np.where(offset == 0, 1, np.abs(offset))
    found = np.full(mask.shape, _NOT_FOUND)
    for distance in range(32):
        place = base + step * distance
        inside = (place >= 0) & (place < 32) & ((offset != 0) | (distance == 0))
        is_set = inside & ((mask >> (place & 31).astype(np.uint32) & np.uint32(1)) == 1)
        left -= is_set
        found = np.where(is_set & (left == 0), place, found).astype(np.uint32)
    return found


@instruction("bfe", lanewise=True)
def decode_extract(inst: Instruction, b: Binder) -> Decoded:
    mods = b.modifiers(inst)
    kind = mods.one_of("u32", "u64", "s32", "s64")
    mods.done()
    target, source, position, length = inst.operands
    x, start, size = b.read(source, kind), b.read(position, "u32"), b.read(length, "u32")
    d = b.write(target, kind)
    extract = _extract_signed if kind.startswith("s") else _extract_unsigned
    counted = _COUNTED[int(kind[1:])]
    if isinstance(position, Immediate) and isinstance(length, Immediate):
        place, bits = (int(operand.value) & int(counted) for operand in (position, length))
        return _extract_constant(x, d, dtype_of(kind), place, bits)

    def run(f, m, cta) -> None:
        np.copyto(f[d], extract(f[x], f[start] & counted, f[size] & counted), where=m.where, casting="same_kind")

    return run


def _extract_constant(x: int, d: int, dtype: np.dtype, position: int, length: int) -> Run:
    """A field at a fixed place: moved to the top, so that the shift down fills with the right sign."""
    width = 8 * dtype.itemsize
    end = min(position + length, width)
    up = dtype.type(width - end if length else width)
    down = dtype.type(min(width - end + position, width))

    def run(f, m, cta) -> None:
        np.right_shift(f[x] << up, down, out=f[d], where=m.where)

    return run


def _extract_unsigned(values: np.ndarray, position: np.ndarray, length: np.ndarray) -> np.ndarray:
    return (values.astype(np.uint64) >> position) & ~(_ALL_ONES << length)


def _extract_signed(values: np.ndarray, position: np.ndarray, length: np.ndarray) -> np.ndarray:
    """The arithmetic shift replicates the sign bit beyond the top, the pair of shifts that of the field."""
    unused = np.int64(64) - np.minimum(length, np.uint32(64))
    return values.astype(np.int64) >> position << unused >> unused


@instruction("bfi", lanewise=True)
def decode_insert(inst: Instruction, b: Binder) -> Decoded:
    mods = b.modifiers(inst)
    kind = mods.one_of("b32", "b64")
    mods.done()
    target, field, source, position, length = inst.operands
    x, y, start, size = b.read(field, kind), b.read(source, kind), b.read(position, "u32"), b.read(length, "u32")
    d = b.write(target, kind)

    counted = _COUNTED[int(kind[1:])]

    def run(f, m, cta) -> None:
        place = f[start] & counted
        mask = ~(_ALL_ONES << (f[size] & counted)) << place
        inserted = (f[x].astype(np.uint64) << place) & mask
        np.copyto(f[d], (f[y] & ~mask) | inserted, where=m.where, casting="same_kind")

    return run


@instruction("szext", lanewise=True)
def decode_extend(inst: Instruction, b: Binder) -> Decoded:
    mods = b.modifiers(inst)
    clamp = mods.one_of("clamp", "wrap") == "clamp"
    kind = mods.one_of("u32", "s32")
    mods.done()
    target, source, width = inst.operands
    x, n, d = b.read(source, kind), b.read(width, "u32"), b.write(target, kind)

    def run(f, m, cta) -> None:
        bits = np.minimum(f[n], np.uint32(32)) if clamp else f[n] & np.uint32(31)
        unused = (np.uint32(32) - bits).astype(f[x].dtype)
        np.copyto(f[d], f[x] << unused >> unused, where=m.where)

    return run


@instruction("bmsk", lanewise=True)
def decode_mask(inst: Instruction, b: Binder) -> Decoded:
    mods = b.modifiers(inst)
    clamp = mods.one_of("clamp", "wrap") == "clamp"
    mods.one_of("b32")
    mods.done()
    target, position, width = inst.operands
    start, size, d = b.read(position, "u32"), b.read(width, "u32"), b.write(target, "b32")
    limited: Callable[[np.ndarray], np.ndarray] = (
        (lambda values: np.minimum(values, np.uint32(32))) if clamp else (lambda values: values & np.uint32(31))
    )

    def run(f, m, cta) -> None:
        mask = ~(_ALL_ONES << limited(f[size])) << limited(f[start])
        np.copyto(f[d], mask, where=m.where, casting="same_kind")

    return run


# -- prmt ----------------------------------------------------------------------------------------------------------


@instruction("prmt", lanewise=True)
def decode_permute(inst: Instruction, b: Binder) -> Decoded:
    mods = b.modifiers(inst)
    mods.one_of("b32")
    mode = mods.optional(*_PERMUTE_MODES)
    mods.done()
    target, low, high, selector = inst.operands
    x, y, d = b.read(low, "u32"), b.read(high, "u32"), b.write(target, "u32")
    if mode is not None:
        return _permute_by_table(x, y, b.read(selector, "u32"), d, _mode_table(mode))
    if isinstance(selector, Immediate):
        return _permute_constant(x, y, int(selector.value), d)
    return _permute(x, y, b.read(selector, "u32"), d)


def _mode_table(mode: str) -> np.ndarray:
    """Source byte of each result byte, lowest first, for the four values of the selector."""
    selector, byte = np.arange(4)[:, None], np.arange(4)[None, :]
    return {
        "f4e": selector + byte,
        "b4e": (selector - byte) % 8,
        "rc8": selector + 0 * byte,
        "ecl": np.maximum(selector, byte),
        "ecr": np.minimum(selector, byte),
        "rc16": selector % 2 * 2 + byte % 2,
    }[mode]


def _eight_bytes(low: np.ndarray, high: np.ndarray) -> np.ndarray:
    return np.stack((low, high), axis=-1).view(np.uint8)


def _joined(four_bytes: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(four_bytes, np.uint8).view(np.uint32)[..., 0]


def _signs(values: np.ndarray) -> np.ndarray:
    """Every byte replaced by eight copies of its top bit."""
    return (values.view(np.int8) >> np.int8(7)).view(np.uint8)


def _permute_by_table(x: int, y: int, selector: int, d: int, table: np.ndarray) -> Run:
    def run(f, m, cta) -> None:
        low, high, chosen = np.broadcast_arrays(f[x], f[y], f[selector])
        picked = np.take_along_axis(_eight_bytes(low, high), table[chosen & np.uint32(3)], axis=-1)
        np.copyto(f[d], _joined(picked), where=m.where)

    return run


def _permute_constant(x: int, y: int, selector: int, d: int) -> Run:
    """Bytes that move by the same distance move together: 0x5410, which packs two halves, is two shifts."""
    moves: dict[tuple[int, int, bool], int] = {}
    for byte in range(4):
        nibble = selector >> (4 * byte) & 0xF
        key = (y if nibble & 4 else x, 8 * (byte - (nibble & 3)), nibble >= 8)
        moves[key] = moves.get(key, 0) | 0xFF << (8 * byte)
    parts = [_move_bytes(source, distance, signs, mask) for (source, distance, signs), mask in moves.items()]

    def run(f, m, cta) -> None:
        result = parts[0](f)
        for part in parts[1:]:
            result = result | part(f)
        np.copyto(f[d], result, where=m.where)

    return run


def _move_bytes(source: int, distance: int, signs: bool, mask: int) -> Callable[[list], np.ndarray]:
    """Bytes of a register (or their signs), shifted up by `distance` bits, where `mask` wants them."""
    shift = np.left_shift if distance >= 0 else np.right_shift
    amount, kept = np.uint32(abs(distance)), np.uint32(mask)
    exact = mask == (0xFFFF_FFFF << distance if distance >= 0 else 0xFFFF_FFFF >> -distance) & 0xFFFF_FFFF
    if signs:
        return lambda f: shift(_signs(np.ascontiguousarray(f[source])).view(np.uint32), amount) & kept
    if exact:
        return lambda f: shift(f[source], amount) if amount else f[source]
    return lambda f: shift(f[source], amount) & kept


def _permute(x: int, y: int, selector: int, d: int) -> Run:
    shifts = np.array([0, 4, 8, 12], np.uint32)

    def run(f, m, cta) -> None:
        low, high, chosen = np.broadcast_arrays(f[x], f[y], f[selector])
        nibbles = chosen[..., None] >> shifts & np.uint32(0xF)
        picked = np.take_along_axis(_eight_bytes(low, high), (nibbles & np.uint32(7)).astype(np.intp), axis=-1)
        np.copyto(f[d], _joined(np.where(nibbles & np.uint32(8), _signs(picked), picked)), where=m.where)

    return run
