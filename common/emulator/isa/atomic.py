"""Atomics and reductions (PTX ISA 9.7.13.5 atom, 9.7.13.6 red).

Lanes that hit one address are served in lane order. The vector forms and the packed types are atomic per element, as
the ISA says, so both are treated as more elements.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from common.emulator.faults import InvalidAddress, UnsupportedInstruction
from common.emulator.hardware.reductions import reduction
from common.emulator.isa.binder import Binder, Modifiers, dtype_of, size_of
from common.emulator.isa.load_store import SCOPES, addresses_of, bind_address, space_modifier
from common.emulator.isa.registry import Decoded, Run, instruction
from common.emulator.machine.counters import Traffic
from common.emulator.machine.memory import GLOBAL_BASE, Piece, refuse_write
from common.emulator.numerics import arithmetic, minmax
from common.emulator.numerics.modifiers import canonical_nan
from common.emulator.ptx.module import Instruction, Operand, Sink, Vector

Combine = Callable[[np.ndarray, np.ndarray], np.ndarray]
TYPES = ("b16", "b32", "b64", "b128", "u32", "u64", "s32", "s64", "f32", "f64", "f16", "f16x2", "bf16", "bf16x2")
OPERATIONS = ("and", "or", "xor", "cas", "exch", "add", "inc", "dec", "min", "max")
_ELEMENT = {"f16x2": "f16", "bf16x2": "bf16"}
_ACCUMULATES = {
    "add": np.add, "and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor,
    "min": np.minimum, "max": np.maximum,
}  # fmt: skip


@dataclass(frozen=True)
class Atomic:
    """One decoded atomic: what is combined, and where. `element` is the type of one memory element.

    `combine_global` is for what turns out to lie in global memory, `combine` for shared memory.
    """

    operation: str
    element: str
    per_lane: int
    traffic: Traffic
    space: str
    base: int | None
    offset: int
    combine: Combine
    combine_global: Combine
    running: np.ufunc | None  # folds many lanes at one address; None where rounding or flushing forbids it

    @property
    def width(self) -> int:
        return size_of(self.element) * self.per_lane


@instruction("atom")
def decode_atom(inst: Instruction, b: Binder) -> Decoded:
    atomic, kind, sources = _decode(inst, b, inst.operands[1], inst.operands[2:])
    targets = _items(inst.operands[0])
    slots = [None if isinstance(target, Sink) else b.write(target, _register_kind(kind)) for target in targets]
    return _run(atomic, kind, sources, slots)


@instruction("red")
def decode_reduction(inst: Instruction, b: Binder) -> Decoded:
    if "async" in inst.modifiers:
        from common.emulator.isa.async_store import decode_async_reduction

        return decode_async_reduction(inst, b)
    atomic, kind, sources = _decode(inst, b, inst.operands[0], inst.operands[1:])
    if atomic.operation in ("cas", "exch"):
        raise UnsupportedInstruction(f"red has no .{atomic.operation}: use atom")
    return _run(atomic, kind, sources, [])


def _decode(
    inst: Instruction, b: Binder, address: Operand, values: tuple[Operand, ...]
) -> tuple[Atomic, str, list[list[int]]]:
    """The operation, the type as written, and the slots of its one or two value operands (a list per vector)."""
    mods = b.modifiers(inst)
    hint = mods.take("L2::cache_hint")
    mods.drop("relaxed", "release", *(("acquire", "acq_rel") if inst.opcode == "atom" else ()), *SCOPES)
    space = space_modifier(mods)
    operation = mods.one_of(*OPERATIONS)
    kind = mods.one_of(*TYPES)
    vector = mods.optional("v2", "v4", "v8")
    _check_form(inst, mods, operation, kind, vector, space)
    mods.done()
    wanted = 2 if operation == "cas" else 1
    if len(values) != wanted + hint:
        raise UnsupportedInstruction(f"{inst.opcode}.{operation} with {len(values)} value operands")
    space, base, offset = bind_address(b, address, space)
    lanes = int(vector[1:]) if vector else 1
    sources = [[b.read(item, _register_kind(kind)) for item in _items(value)] for value in values[:wanted]]
    if any(len(source) != lanes for source in sources):
        raise UnsupportedInstruction(f".{vector or 'v1'} needs {lanes} values")
    element = _ELEMENT.get(kind, kind)
    per_lane = lanes * size_of(kind) // size_of(element)
    combines = _combiner(operation, element), _combiner(operation, element, flush=True)
    running = _ACCUMULATES.get(operation) if dtype_of(element).kind in "iu" and element != "bf16" else None
    traffic = Traffic(inst, lanes * size_of(kind), "atomic")
    return Atomic(operation, element, per_lane, traffic, space, base, offset, *combines, running), kind, sources


def _check_form(inst: Instruction, mods: Modifiers, operation: str, kind: str, vector: str | None, space: str) -> None:
    if space not in ("global", "shared", "shared::cluster", "generic"):
        raise UnsupportedInstruction(f"{inst.opcode} exists for global and shared memory only, not {space}")
    half = kind in ("f16", "f16x2", "bf16", "bf16x2")
    if mods.take("noftz") != half:
        raise UnsupportedInstruction(
            f"{inst.opcode}.{operation}.{kind}: .noftz belongs to the half types, and only to them"
        )
    allowed = {
        "and": ("b32", "b64"), "or": ("b32", "b64"), "xor": ("b32", "b64"),
        "cas": ("b16", "b32", "b64", "b128"), "exch": ("b32", "b64", "b128"),
        "inc": ("u32",), "dec": ("u32",), "add": ("u32", "s32", "u64", "f32", "f64"),
        "min": ("u32", "s32", "u64", "s64"), "max": ("u32", "s32", "u64", "s64"),
    }[operation]  # fmt: skip
    half_allowed = half and (operation == "add" or (vector is not None and operation in ("min", "max")))
    if kind not in allowed and not half_allowed:
        raise UnsupportedInstruction(f"{inst.opcode} has no .{operation} for .{kind}")
    if vector is not None and (
        space not in ("global", "generic") or not (half or (kind == "f32" and operation == "add"))
    ):
        raise UnsupportedInstruction(f"{inst.opcode}.{vector} exists for f32 add and half types in global memory only")
    if vector == "v8" and kind not in ("f16", "bf16"):
        raise UnsupportedInstruction(f"{inst.opcode}.v8 exists for .f16 and .bf16 only")


def _items(operand: Operand) -> tuple[Operand, ...]:
    return operand.items if isinstance(operand, Vector) else (operand,)


def _register_kind(kind: str) -> str:
    """How a value operand is read; b128 as pairs of u64."""
    return {"f16": "u16", "bf16": "u16", "f16x2": "u32", "bf16x2": "u32"}.get(kind, kind)


def _combiner(operation: str, element: str, flush: bool = False) -> Combine:
    if element == "f16":
        return {
            "add": lambda old, value: canonical_nan(arithmetic.add_f16(old, value)),
            "min": minmax.minimum,
            "max": minmax.maximum,
        }[operation]
    if element == "bf16":
        return {"add": arithmetic.add_bf16, "min": minmax.minimum_bf16, "max": minmax.maximum_bf16}[operation]
    if operation == "add" and element == "f32":
        # Subnormals are flushed in global memory, not in shared memory (PTX ISA 9.7.13.5).
        return lambda old, value: canonical_nan(arithmetic.add_f32(old, value, ftz=flush))
    if operation == "add" and element == "f64" and flush:
        return _add_global_f64
    if operation == "inc":
        return lambda old, bound: np.where(old >= bound, 0, old + 1).astype(old.dtype)
    if operation == "dec":
        return lambda old, bound: np.where((old == 0) | (old > bound), bound, old - 1).astype(old.dtype)
    if operation == "exch":
        return lambda old, value: value
    return _ACCUMULATES.get(operation, lambda old, value: value)


def _add_global_f64(old: np.ndarray, value: np.ndarray) -> np.ndarray:
    """The sum as an H200 makes it in global memory, where a NaN operand comes through unchanged."""
    total = old.copy()
    reduction("add", "f64")(total.view(np.uint8), value.view(np.uint8))
    return total


def _run(atomic: Atomic, kind: str, sources: list[list[int]], targets: list[int | None]) -> Run:
    if kind == "b128":
        return _run_wide(atomic, [slots[0] for slots in sources], targets)
    dtype = dtype_of(atomic.element)
    bits = dtype_of(f"u{8 * dtype.itemsize}")
    register = dtype_of(_register_kind(kind))

    def lane_values(f: list, m, slots: list[int]) -> np.ndarray:
        """(lanes, elements per lane) in the element type."""
        columns = np.empty((m.count, len(slots)), register)
        for place, slot in enumerate(slots):
            columns[:, place] = f[slot][m.index]
        return columns.view(dtype)

    def run(f, m, cta) -> None:
        addresses = addresses_of(f, m, atomic.base, atomic.offset)
        values = [lane_values(f, m, slots) for slots in sources]
        old = np.empty((m.count, atomic.per_lane), dtype)
        changed = False
        pieces = cta.locate(atomic.space, addresses, atomic.width, m)
        for piece in pieces:
            combine = atomic.combine_global if _in_global(piece, m, vector=len(sources[0]) > 1) else atomic.combine
            first = piece.offsets // dtype.itemsize
            places = (first[:, None] + np.arange(atomic.per_lane)).reshape(-1)
            parts = [value[piece.chosen].reshape(-1) for value in values]
            memory = piece.region.view(bits.itemsize).view(dtype)
            before, differs = _apply(atomic.running, combine, memory, places, parts)
            old[piece.chosen] = before.reshape(-1, atomic.per_lane)
            if differs and piece.region.generic_writes is not None:
                piece.region.generic_writes.add(piece.offsets)
            changed = changed or differs
        cta.machine.counters.bytes[f"{atomic.space} atomic"] += atomic.width * m.count
        atomic.traffic.count(cta, pieces, m)
        if changed:
            cta.activity()
        else:
            cta.machine.polls += 1
        columns = old.view(register)
        for place, slot in enumerate(targets):
            if slot is not None:
                f[slot][m.index] = columns[:, place]

    return run


def _in_global(piece: Piece, m, *, vector: bool) -> bool:
    """Whether an access goes to global memory; raises InvalidAddress where it may not go."""
    region, lanes = piece.region, m.numbers[piece.chosen]
    if region.read_only:
        refuse_write(region, lanes, int(piece.offsets[0]) + region.base)
    in_global = region.base >= GLOBAL_BASE
    if region.name == "local memory" or (vector and not in_global):
        where = "global memory" if vector else "global and shared memory"
        raise InvalidAddress(f"this atomic works in {where} only, not in {region.name}", lanes=lanes)
    return in_global


def _apply(
    running: np.ufunc | None, combine: Combine, memory: np.ndarray, places: np.ndarray, values: list[np.ndarray]
) -> tuple[np.ndarray, bool]:
    """Combines `values` into `memory[places]` one after the other where places repeat; two values are those of cas.

    Returns what each element saw before its own update, and whether memory changed.
    """
    order = np.argsort(places, kind="stable")
    ordered = places[order]
    starts = np.flatnonzero(np.concatenate(([True], ordered[1:] != ordered[:-1])))
    before = np.empty(places.size, memory.dtype)
    if starts.size == 1 and places.size > 1 and running is not None:
        steps = running.accumulate(np.concatenate((memory[ordered[:1]], values[0])), dtype=memory.dtype)
        before[:] = steps[:-1]
        changed = bool(steps[-1] != steps[0])
        memory[ordered[0]] = steps[-1]
        return before, changed
    turn = np.arange(places.size) - np.repeat(starts, np.diff(np.append(starts, places.size)))
    changed = False
    for number in range(int(turn.max()) + 1):
        chosen = order[turn == number]
        current = memory[places[chosen]]
        taken = [value[chosen] for value in values]
        updated = np.where(current == taken[0], taken[1], current) if len(taken) == 2 else combine(current, taken[0])
        before[chosen] = current
        changed = changed or updated.tobytes() != current.tobytes()
        memory[places[chosen]] = updated
    return before, changed


def _run_wide(atomic: Atomic, sources: list[int], targets: list[int | None]) -> Run:
    """exch and cas of 128 bits: lane after lane."""

    def run(f, m, cta) -> None:
        addresses = addresses_of(f, m, atomic.base, atomic.offset)
        changed = False
        pieces = cta.locate(atomic.space, addresses, 16, m)
        for piece in pieces:
            _in_global(piece, m, vector=False)
            rows = piece.region.view(8, 2)
            for lane, row in zip(m.numbers[piece.chosen], piece.offsets >> 4):
                current = rows[row].copy()
                if atomic.operation == "exch" or (current == f[sources[0]][lane]).all():
                    rows[row] = f[sources[-1]][lane]
                    changed = changed or bool((rows[row] != current).any())
                if targets[0] is not None:
                    f[targets[0]][lane] = current
        cta.machine.counters.bytes[f"{atomic.space} atomic"] += 16 * m.count
        atomic.traffic.count(cta, pieces, m)
        if changed:
            cta.activity()
        else:
            cta.machine.polls += 1

    return run
