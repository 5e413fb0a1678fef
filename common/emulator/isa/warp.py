"""Instructions whose lanes exchange values within a warp (PTX ISA 9.7.9.6, 9.7.13.2, .9, .10, .12 and .14).

Each runs once all live lanes that its membermask names stand at it. Where lanes of one warp name disjoint membermasks,
each group is on its own. What the ISA leaves undefined is a DivergenceFault where it can be seen from the mask (a lane
outside its own membermask, membermasks that overlap without being equal), and poison where it is a value (`shfl` from a
lane that is not there: reductions over part of a warp read such values and throw them away).
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from common.emulator.faults import DivergenceFault, UnsupportedInstruction
from common.emulator.isa.binder import Binder
from common.emulator.isa.registry import Collective, Control, Decoded, Run, collective, instruction
from common.emulator.machine.mask import WARP, Mask
from common.emulator.ptx.module import Immediate, Instruction, Operand, Pair

FULL = 0xFFFF_FFFF
POISON_WORD = np.uint32(0xFFFF_FFFF)
CANONICAL_NAN = np.uint32(0x7FFF_FFFF)
_LANE_BITS = 31

Compute = Callable[[list, Mask, np.ndarray], None]  # (frame, mask, participants of each lane as u32 bits (L,))


def warp_bits(lanes: np.ndarray) -> np.ndarray:
    """Bool lanes (L,) as one u32 per warp, bit i for lane i."""
    return np.packbits(lanes, bitorder="little").view(np.uint32)


def bind_members(b: Binder, operand: Operand) -> int | None:
    """Slot of a membermask, or None when it is the literal for all lanes."""
    if isinstance(operand, Immediate) and int(operand.value) & FULL == FULL:
        return None
    return b.read(operand, "u32")


def check_members(members: np.ndarray, m: Mask) -> None:
    """Raises DivergenceFault for lanes outside their own membermask and for membermasks that overlap but differ."""
    if (members[m.index] == FULL).all():
        return
    lanes = np.arange(members.size, dtype=np.uint32) % WARP
    outside = m.lanes & (members >> lanes & 1 == 0)
    if outside.any():
        named = int(members[outside][0])
        raise DivergenceFault(
            f"a lane executes this with membermask {named:#010x}, which does not name it", lanes=np.flatnonzero(outside)
        )
    rows, present = members.reshape(-1, WARP), m.lanes.reshape(-1, WARP)
    low = np.where(present, rows, FULL).min(axis=1)
    high = np.where(present, rows, 0).max(axis=1)
    for warp in np.flatnonzero((low != high) & m.present):
        _check_disjoint(int(warp), np.unique(rows[warp][present[warp]]))


def _check_disjoint(warp: int, masks: np.ndarray) -> None:
    seen = 0
    for mask in masks.tolist():
        if seen & mask:
            shown = ", ".join(f"{int(value):#010x}" for value in masks)
            raise DivergenceFault(
                f"lanes of warp {warp} name membermasks that overlap but differ: {shown}",
                lanes=range(warp * WARP, (warp + 1) * WARP),
            )
        seen |= mask


def _participants(members: int | None, compute: Compute) -> Collective:
    """A collective that gets, for each lane, the executing lanes that its membermask names."""

    def run(f, m, cta) -> None:
        present = np.repeat(warp_bits(m.lanes), WARP)
        if members is not None:
            check_members(f[members], m)
            present = present & f[members]
        compute(f, m, present)

    return collective(run, members)


def _require_sync(inst: Instruction) -> None:
    if "sync" not in inst.modifiers:
        raise UnsupportedInstruction(
            f"`{inst.opcode}` without .sync was removed with sm_70: use {inst.opcode}.sync with a membermask"
        )


def _pair(operand: Operand) -> tuple[Operand, Operand | None]:
    return (operand.first, operand.second) if isinstance(operand, Pair) else (operand, None)


# -- shfl ----------------------------------------------------------------------------------------------------------


def source_lanes(mode: str, lane: np.ndarray, b: np.ndarray, c: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Source lane within the warp and whether it is in range (PTX ISA 9.7.9.6); all arrays int64 (L,)."""
    value, clamp, segments = b & _LANE_BITS, c & _LANE_BITS, c >> 8 & _LANE_BITS
    least = lane & segments
    most = least | (clamp & ~segments)
    if mode == "up":
        source = lane - value
        inside = source >= most
    else:
        source = {
            "down": lambda: lane + value,
            "bfly": lambda: lane ^ value,
            "idx": lambda: least | (value & ~segments),
        }[mode]()
        inside = source <= most
    return np.where(inside, source, lane), inside


@instruction("shfl")
def decode_shuffle(inst: Instruction, b: Binder) -> Decoded:
    _require_sync(inst)
    mods = b.modifiers(inst)
    mods.take("sync")
    mode = mods.one_of("up", "down", "bfly", "idx")
    mods.one_of("b32")
    mods.done()
    target, source, lane, clamp, membermask = inst.operands
    result, predicate = _pair(target)
    a, lanes, segments = b.read(source, "b32"), b.read(lane, "u32"), b.read(clamp, "u32")
    d = b.write(result, "b32")
    p = None if predicate is None else b.write(predicate, "pred")
    members = bind_members(b, membermask)
    constant = isinstance(lane, Immediate) and isinstance(clamp, Immediate)
    plans: dict[int, tuple[np.ndarray, np.ndarray]] = {}

    def plan(f) -> tuple[np.ndarray, np.ndarray]:
        count = f[a].size
        if count in plans:
            return plans[count]
        numbers = np.arange(count)
        source, inside = source_lanes(mode, numbers % WARP, f[lanes].astype(np.int64), f[segments].astype(np.int64))
        made = (numbers // WARP * WARP + source, inside)
        if constant:
            plans[count] = made
        return made

    def run(f, m, cta) -> None:
        source, inside = plan(f)
        values = f[a][source]
        if members is not None:
            check_members(f[members], m)
            named = f[members] >> (source % WARP).astype(np.uint32) & 1 != 0
            values = np.where(named & m.lanes[source], values, POISON_WORD)
        elif m.where is not True:
            values = np.where(m.lanes[source], values, POISON_WORD)
        np.copyto(f[d], values, where=m.where)
        if p is not None:
            np.copyto(f[p], inside, where=m.where)

    return collective(run, members)


# -- vote, match, elect --------------------------------------------------------------------------------------------


@instruction("vote")
def decode_vote(inst: Instruction, b: Binder) -> Decoded:
    _require_sync(inst)
    mods = b.modifiers(inst)
    mods.take("sync")
    mode = mods.one_of("all", "any", "uni", "ballot")
    mods.one_of("b32" if mode == "ballot" else "pred")
    mods.done()
    target, source, membermask = inst.operands
    a, d = b.read(source, "pred"), b.write(target, "b32" if mode == "ballot" else "pred")
    results: dict[str, Callable[[np.ndarray, np.ndarray], np.ndarray]] = {
        "ballot": lambda votes, present: votes,
        "all": lambda votes, present: votes == present,
        "any": lambda votes, present: votes != 0,
        "uni": lambda votes, present: (votes == 0) | (votes == present),
    }
    result = results[mode]

    def vote(f, m, present) -> None:
        votes = np.repeat(warp_bits(f[a] & m.lanes), WARP) & present
        np.copyto(f[d], result(votes, present), where=m.where)

    return _participants(bind_members(b, membermask), vote)


@instruction("match")
def decode_match(inst: Instruction, b: Binder) -> Decoded:
    _require_sync(inst)
    mods = b.modifiers(inst)
    mods.take("sync")
    mode = mods.one_of("any", "all")
    kind = mods.one_of("b32", "b64")
    mods.done()
    target, source, membermask = inst.operands
    result, predicate = _pair(target)
    if predicate is not None and mode == "any":
        raise UnsupportedInstruction("match.any.sync has no predicate destination")
    a, d = b.read(source, kind), b.write(result, "b32")
    p = None if predicate is None else b.write(predicate, "pred")

    def match(f, m, present) -> None:
        rows = f[a].reshape(-1, WARP)
        same = np.packbits(rows[:, :, None] == rows[:, None, :], axis=2, bitorder="little").view(np.uint32).reshape(-1)
        same &= present
        if mode == "any":
            np.copyto(f[d], same, where=m.where)
            return
        agreed = same == present
        np.copyto(f[d], np.where(agreed, present, np.uint32(0)), where=m.where)
        if p is not None:
            np.copyto(f[p], agreed, where=m.where)

    return _participants(bind_members(b, membermask), match)


@instruction("elect")
def decode_elect(inst: Instruction, b: Binder) -> Decoded:
    """The leader is the lowest executing lane of the membermask."""
    mods = b.modifiers(inst)
    mods.one_of("sync")
    mods.done()
    target, membermask = inst.operands
    result, predicate = _pair(target)
    if predicate is None:
        raise UnsupportedInstruction("elect.sync needs a predicate destination: elect.sync d|p, membermask")
    d, p = b.write(result, "b32"), b.write(predicate, "pred")

    def elect(f, m, present) -> None:
        lowest = present & (~present + np.uint32(1))
        lanes = np.arange(present.size, dtype=np.uint32) % WARP
        np.copyto(f[p], lowest == np.left_shift(np.uint32(1), lanes), where=m.where)
        exponent = np.frexp(lowest.astype(np.float64))[1]
        np.copyto(f[d], (exponent - 1).astype(np.uint32), where=m.where)

    return _participants(bind_members(b, membermask), elect)


# -- redux ---------------------------------------------------------------------------------------------------------

_REDUCTIONS = {
    ("add", "u32"): (np.add, 0),
    ("add", "s32"): (np.add, 0),
    ("min", "u32"): (np.minimum, FULL),
    ("max", "u32"): (np.maximum, 0),
    ("min", "s32"): (np.minimum, 0x7FFF_FFFF),
    ("max", "s32"): (np.maximum, -0x8000_0000),
    ("and", "b32"): (np.bitwise_and, FULL),
    ("or", "b32"): (np.bitwise_or, 0),
    ("xor", "b32"): (np.bitwise_xor, 0),
}


@instruction("redux")
def decode_redux(inst: Instruction, b: Binder) -> Decoded:
    mods = b.modifiers(inst)
    mods.one_of("sync")
    operation = mods.one_of("add", "min", "max", "and", "or", "xor")
    if operation in ("min", "max") and mods.take("f32"):
        reduce = _float_reduction(operation, mods.take("abs"), mods.take("NaN"))
        kind = "b32"
    else:
        kind = mods.one_of("b32") if operation in ("and", "or", "xor") else mods.one_of("u32", "s32")
        reduce = _integer_reduction(*_REDUCTIONS[operation, kind])
    mods.done()
    target, source, membermask = inst.operands
    a, d = b.read(source, kind), b.write(target, kind)
    members = bind_members(b, membermask)
    return collective(_reduce_groups(a, d, members, reduce), members)


Reduce = Callable[[np.ndarray, np.ndarray], np.ndarray]  # values and presence (W, 32) to one value per warp


def _reduce_groups(a: int, d: int, members: int | None, reduce: Reduce) -> Run:
    """Applies `reduce` to the lanes of each warp that share a membermask."""

    def run(f, m, cta) -> None:
        values = f[a].reshape(-1, WARP)
        if members is None:
            groups = [m.lanes]
        else:
            check_members(f[members], m)
            groups = [m.lanes & (f[members] == named) for named in np.unique(f[members][m.numbers])]
        results = [np.repeat(reduce(values, group.reshape(-1, WARP)), WARP) for group in groups]
        for group, result in zip(groups, results):
            np.copyto(f[d], result, where=group)

    return run


def _integer_reduction(operation: np.ufunc, identity: int) -> Reduce:
    def reduce(values: np.ndarray, present: np.ndarray) -> np.ndarray:
        neutral = values.dtype.type(identity)
        return operation.reduce(np.where(present, values, neutral), axis=1, dtype=values.dtype)

    return reduce


def _float_reduction(operation: str, absolute: bool, keep_nan: bool) -> Reduce:
    """min and max of f32 bits, with -0 < +0: on integers that order as the floats do.

    A NaN counts only with .NaN, and then it wins; a group of NaNs alone gives the canonical NaN either way.
    """
    order = np.minimum if operation == "min" else np.maximum
    neutral = np.int32(0x7FFF_FFFF if operation == "min" else -0x8000_0000)

    def reduce(values: np.ndarray, present: np.ndarray) -> np.ndarray:
        bits = values & np.uint32(0x7FFF_FFFF) if absolute else values
        nan = (bits & np.uint32(0x7FFF_FFFF)) > np.uint32(0x7F80_0000)
        keys = _ordered(bits.view(np.int32))
        best = order.reduce(np.where(present & ~nan, keys, neutral), axis=1)
        poisoned = (present & nan).any(axis=1) if keep_nan else ~(present & ~nan).any(axis=1)
        return np.where(poisoned, CANONICAL_NAN, _ordered(best).view(np.uint32))

    return reduce


def _ordered(bits: np.ndarray) -> np.ndarray:
    """int32 bits of floats to integers of the same order, and back: the mapping is its own inverse."""
    return bits ^ ((bits >> 31) & np.int32(0x7FFF_FFFF))


# -- bar.warp.sync -------------------------------------------------------------------------------------------------


class WarpBarriers:
    """The warp barriers of a CTA on which lanes wait now, by warp and membermask."""

    def __init__(self, cta) -> None:
        self.cta = cta
        self.gathering: dict[tuple[int, int], Gathering] = {}

    def arrive(self, warp: int, named: int, lanes: np.ndarray) -> Gathering:
        """Adds lanes (bool (L,)) to a barrier; once all have come the next arrival starts anew."""
        key = (warp, named)
        gathering = self.gathering.setdefault(key, Gathering(self.cta, warp, named))
        gathering.arrived |= lanes
        if gathering.complete:
            del self.gathering[key]
        return gathering


class Gathering:
    """One use of a warp barrier: the lanes it is for, those that have come (bool (L,)), and the paths that wait."""

    def __init__(self, cta, warp: int, named: int) -> None:
        self.cta = cta
        self.wanted = np.zeros(cta.lanes, bool)
        self.wanted[warp * WARP : (warp + 1) * WARP] = named >> np.arange(WARP) & 1
        self.arrived = np.zeros(cta.lanes, bool)
        self.waiting: list = []

    @property
    def missing(self) -> np.ndarray:
        return self.wanted & self.cta.alive & ~self.arrived

    @property
    def complete(self) -> bool:
        return not self.missing.any()


class WarpBarrier(Control):
    """`bar.warp.sync`: lanes may come from different instructions, as long as the membermask is the same."""

    def __init__(self, members: int | None) -> None:
        super().__init__()
        self.members = members

    def run(self, cta, path) -> None:
        named = None if self.members is None else cta.frame[self.members]
        if named is not None:
            check_members(named, path.mask)
        if cta.converged(path.mask, named) and not cta.unit(WarpBarriers).gathering:
            cta.advance(path)
            return
        rest: Mask | None = path.mask
        while rest is not None:
            first = int(rest.numbers[0])
            warp, mask = first // WARP, FULL if named is None else int(named[first])
            same = np.arange(cta.lanes) // WARP == warp
            group, rest = rest.split_by(same if named is None else same & (named == mask))
            part = path
            if rest is None:
                path.mask = group
            else:
                part = cta.fork(path, group, path.segment.index)
            self._arrive(cta, part, warp, mask)

    def _arrive(self, cta, path, warp: int, named: int) -> None:
        barrier = cta.unit(WarpBarriers)
        gathering = barrier.arrive(warp, named, path.mask.lanes)
        if gathering.complete:
            cta.advance(path)
            for other in gathering.waiting:
                cta.release(other)
            return

        exits = cta.exits

        def ready() -> bool:
            if exits == cta.exits or not gathering.complete:
                return False
            barrier.gathering.pop((warp, named), None)  # the missing lanes have exited
            return True

        cta.block(path, lambda: f"at a warp barrier for the other lanes of membermask {named:#010x}", ready)
        path.wait = path.wait._replace(awaited=gathering.missing)
        gathering.waiting.append(path)


def decode_warp_barrier(inst: Instruction, b: Binder) -> Control:
    """`bar.warp.sync membermask`"""
    mods = b.modifiers(inst)
    mods.one_of("warp")
    mods.one_of("sync")
    mods.done()
    (membermask,) = inst.operands
    return WarpBarrier(bind_members(b, membermask))
