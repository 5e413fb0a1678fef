"""mbarrier instructions (PTX ISA 9.7.13.15). The object itself is in `machine.mbarrier`.

Operations on an mbarrier of the own CTA happen at once, lane after lane. Those on another CTA's are asynchronous: they
are operations in flight, one after the other for each CTA that issues them. Memory is sequentially consistent here, so
.sem and .scope are checked and change nothing. Time hints are not simulated: a `try_wait` blocks until its phase
completes, and returns false only where nothing else in the launch can run.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from common.emulator.faults import BarrierFault, InvalidAddress, Place, UnsupportedInstruction
from common.emulator.isa.binder import Binder, Modifiers
from common.emulator.isa.load_store import addresses_of, bind_address
from common.emulator.isa.registry import Control, Decoded, Run, instruction
from common.emulator.machine import mbarrier
from common.emulator.machine.events import Operation
from common.emulator.machine.mask import WARP, Mask
from common.emulator.machine.memory import RANK_MASK, RANK_SHIFT, RESERVED_SHARED, SHARED_WINDOW
from common.emulator.ptx.module import Instruction, Operand, Sink

OPERATIONS = (
    "init", "inval", "expect_tx", "complete_tx", "arrive", "arrive_drop", "test_wait", "try_wait", "pending_count",
)  # fmt: skip


class Location(NamedTuple):
    """The address operand: state space (shared, shared::cluster or generic), slot of the base, constant offset."""

    space: str
    base: int | None
    offset: int


def _location(b: Binder, operand: Operand, space: str) -> Location:
    return Location(*bind_address(b, operand, space))


def _space(mods: Modifiers, *, remote: bool) -> str:
    space = mods.optional("shared", "shared::cta", *(("shared::cluster",) if remote else ()))
    return {None: "generic", "shared::cta": "shared"}.get(space, space)


def _order(mods: Modifiers, *semantics: str) -> None:
    """Consumes .sem and .scope, which stand together or not at all."""
    semantic, scope = mods.optional(*semantics), mods.optional("cta", "cluster")
    if (semantic is None) != (scope is None):
        raise UnsupportedInstruction(f"`{mods.opcode}`: .{semantic or scope} needs both an ordering and a scope")


# -- which mbarrier ------------------------------------------------------------------------------------------------


def local_offsets(f: list, m: Mask, cta, location: Location, what: str) -> np.ndarray:
    """Offsets (int64, one per active lane) of mbarriers in the CTA's own shared memory.

    Raises BarrierFault for one of another CTA, InvalidAddress outside shared memory, Misaligned.
    """
    common = _common_offset(f, m, cta, location)
    if common is not None:
        return np.full(m.count, common, np.int64)
    addresses = addresses_of(f, m, location.base, location.offset)
    if location.space == "shared":
        ranks = addresses >> RANK_SHIFT
        _refuse_remote(cta, m, (ranks != cta.rank) & (ranks != 0), what)
    offsets = np.empty(m.count, np.int64)
    for piece in cta.locate(location.space, addresses, mbarrier.BYTES, m):
        holder = _holder(cta, piece.region, m.numbers[piece.chosen])
        chosen = np.zeros(m.count, bool)
        chosen[piece.chosen] = holder is not cta
        _refuse_remote(cta, m, chosen, what)
        offsets[piece.chosen] = piece.offsets
    return offsets


def _common_offset(f: list, m: Mask, cta, location: Location) -> int | None:
    """The offset where all active lanes name one place in the CTA's own shared memory that an mbarrier may have.

    None says nothing: the general way finds out what the address is, or what is wrong with it.
    """
    address = location.offset
    if location.base is not None:
        base = m.common(f[location.base])
        if base is None:
            return None
        address = base + address if f[location.base].dtype == np.int64 else base + address & 0xFFFF_FFFF
    if location.space == "generic":
        address -= SHARED_WINDOW
    rank, offset = address >> RANK_SHIFT, address & RANK_MASK
    own = rank == cta.rank or (rank == 0 and location.space == "shared")
    inside = RESERVED_SHARED <= offset <= cta.shared.size - mbarrier.BYTES
    return offset if own and inside and offset % mbarrier.BYTES == 0 else None


def _refuse_remote(cta, m: Mask, remote: np.ndarray, what: str) -> None:
    if remote.any():
        raise BarrierFault(
            f"{what} names an mbarrier of another CTA (this is rank {cta.rank}): only arrive, expect_tx and "
            "complete_tx may",
            lanes=m.numbers[remote],
        )


def _holder(cta, region, lanes: np.ndarray):
    """The CTA whose shared memory `region` is."""
    for block in cta.cluster.blocks:
        if block.shared is region:
            return block
    raise InvalidAddress(f"an mbarrier must lie in shared memory, not in {region}", lanes=lanes)


class Target(NamedTuple):
    """One mbarrier that an instruction names: its CTA, offset, and the positions of its lanes among the active ones."""

    holder: object
    offset: int
    positions: np.ndarray


def _targets(f: list, m: Mask, cta, location: Location) -> Iterator[Target]:
    common = _common_offset(f, m, cta, location)
    if common is not None:
        yield Target(cta, common, np.arange(m.count))
        return
    addresses = addresses_of(f, m, location.base, location.offset)
    active = np.arange(m.count)
    for piece in cta.locate(location.space, addresses, mbarrier.BYTES, m):
        positions = active[piece.chosen]
        holder = _holder(cta, piece.region, m.numbers[positions])
        for offset in np.unique(piece.offsets):
            yield Target(holder, int(offset), positions[piece.offsets == offset])


class _Journey(NamedTuple):
    """From whom to which mbarrier, for messages."""

    sender: object
    target: Target

    def __str__(self) -> str:
        name = self.sender.machine.shared_names.describe(self.target.offset)
        return f"from CTA rank {self.sender.rank} to mbarrier {name} of CTA rank {self.target.holder.rank}"


class RemoteOperations:
    """What a CTA has in flight to mbarriers of others, in program order: a release covers what came before it.

    `last` is the newest operation, or None; when it has finished, all have.
    """

    def __init__(self, cta) -> None:
        self.cta = cta
        self.last: Operation | None = None

    @property
    def outstanding(self) -> tuple[Operation, ...]:
        return () if self.last is None or self.last.finished else (self.last,)

    def issue(self, inst: Instruction, target: Target, lanes: np.ndarray, perform) -> None:
        """Puts `perform(holder)` in flight."""
        cta, rank = self.cta, target.holder.rank
        warps = tuple(np.unique(lanes // WARP).tolist())
        self.last = Operation(
            f"remote {inst.opcode}.{inst.modifiers[0]}",
            [lambda: perform(cta.peer(rank, lanes))],
            detail=_Journey(cta, target),
            place=lambda: Place(inst.text, inst.line, inst.origin, cta.ctaid, warps, tuple(lanes.tolist())),
            after=self.outstanding,
        )
        cta.machine.events.issue(self.last)


# -- decoders ------------------------------------------------------------------------------------------------------


@instruction("mbarrier")
def decode_mbarrier(inst: Instruction, b: Binder) -> Decoded:
    mods = b.modifiers(inst)
    operation = mods.one_of(*OPERATIONS)
    decode = {
        "init": _init,
        "inval": _inval,
        "expect_tx": _transaction,
        "complete_tx": _transaction,
        "arrive": _arrive,
        "arrive_drop": _arrive,
        "test_wait": _wait,
        "try_wait": _wait,
        "pending_count": _pending_count,
    }[operation]
    return decode(operation, inst, mods, b)


def _operands(inst: Instruction, *counts: int) -> tuple[Operand, ...]:
    if len(inst.operands) not in counts:
        raise UnsupportedInstruction(f"`mbarrier.{inst.modifiers[0]}` does not take {len(inst.operands)} operands")
    return inst.operands


def _finish(mods: Modifiers) -> None:
    mods.one_of("b64")
    mods.done()


def _init(_operation: str, inst: Instruction, mods: Modifiers, b: Binder) -> Run:
    space = _space(mods, remote=False)
    _finish(mods)
    address, number = _operands(inst, 2)
    location, count = _location(b, address, space), b.read(number, "u32")

    def run(f, m, cta) -> None:
        offsets = local_offsets(f, m, cta, location, "mbarrier.init")
        for offset, number, lane in zip(offsets.tolist(), f[count][m.index].tolist(), m.numbers):
            mbarrier.init(cta, offset, number, [lane])

    return run


def _inval(_operation: str, inst: Instruction, mods: Modifiers, b: Binder) -> Run:
    space = _space(mods, remote=False)
    _finish(mods)
    (address,) = _operands(inst, 1)
    location = _location(b, address, space)

    def run(f, m, cta) -> None:
        for offset, lane in zip(local_offsets(f, m, cta, location, "mbarrier.inval").tolist(), m.numbers):
            mbarrier.inval(cta, offset, [lane])

    return run


def _transaction(operation: str, inst: Instruction, mods: Modifiers, b: Binder) -> Run:
    _order(mods, "relaxed")
    space = _space(mods, remote=True)
    _finish(mods)
    address, size = _operands(inst, 2)
    location, slot = _location(b, address, space), b.read(size, "u32")
    change = mbarrier.expect_tx if operation == "expect_tx" else mbarrier.complete_tx

    def run(f, m, cta) -> None:
        for target in _targets(f, m, cta, location):
            lanes = m.numbers[target.positions]
            sizes = f[slot][lanes].tolist()

            def perform(holder, offset=target.offset, lanes=lanes, sizes=sizes) -> None:
                for lane, size in zip(lanes, sizes):
                    change(holder, offset, size, [lane])

            if target.holder is cta:
                perform(cta)
            else:
                cta.unit(RemoteOperations).issue(inst, target, lanes, perform)

    return run


def _arrive(operation: str, inst: Instruction, mods: Modifiers, b: Binder) -> Run:
    expecting, incomplete = mods.take("expect_tx"), mods.take("noComplete")
    _order(mods, "release", "relaxed")
    space = _space(mods, remote=not incomplete)
    _finish(mods)
    destination, address, *extra = _operands(inst, 3) if expecting or incomplete else _operands(inst, 2, 3)
    location = _location(b, address, space)
    wanted = not isinstance(destination, Sink)
    if space == "shared::cluster" and wanted:
        raise UnsupportedInstruction(
            "an arrival on a .shared::cluster mbarrier returns no state: its destination is `_`"
        )
    state = b.write(destination, "b64") if wanted else None
    number = b.read(extra[0], "u32") if extra else b.constant(1, "u32")
    arrival = _Arrival(expecting, incomplete, operation == "arrive_drop")

    def run(f, m, cta) -> None:
        for target in _targets(f, m, cta, location):
            lanes = m.numbers[target.positions]
            numbers = f[number][lanes]
            if target.holder is cta:
                states = arrival.perform(cta, target.offset, numbers, lanes)
                if state is not None:
                    f[state][lanes] = states
                continue
            if state is not None or incomplete:
                raise BarrierFault("an arrival on another CTA's mbarrier returns no state: use `_`", lanes=lanes)

            def perform(holder, offset=target.offset, numbers=numbers, lanes=lanes) -> None:
                arrival.perform(holder, offset, numbers, lanes)

            cta.unit(RemoteOperations).issue(inst, target, lanes, perform)

    return run


class _Arrival(NamedTuple):
    """The variants of arrive: with expect_tx the number of each lane is bytes, else its arrival count."""

    expecting: bool
    incomplete: bool
    drop: bool

    def perform(self, holder, offset: int, numbers: np.ndarray, lanes: np.ndarray) -> list[int]:
        """Arrives for each lane in turn; returns the states before."""
        before = mbarrier.phase(holder, offset, lanes)
        if self.expecting:
            states = []
            for lane, size in zip(lanes, numbers.tolist()):
                mbarrier.expect_tx(holder, offset, size, [lane])
                states.append(mbarrier.arrive(holder, offset, 1, [lane], self.drop))
        else:
            states = mbarrier.arrive_each(holder, offset, numbers, lanes, self.drop)
        if self.incomplete and mbarrier.phase(holder, offset) != before:
            raise BarrierFault(f"a .noComplete arrival completed phase {before}", lanes=lanes, address=offset)
        return states


def _pending_count(_operation: str, inst: Instruction, mods: Modifiers, b: Binder) -> Run:
    _finish(mods)
    target, source = _operands(inst, 2)
    state, d = b.read(source, "b64"), b.write(target, "u32")

    def run(f, m, cta) -> None:
        np.copyto(f[d], (f[state] & np.uint64(mbarrier.LIMIT)).astype(np.uint32), where=m.where)

    return run


# -- waiting -------------------------------------------------------------------------------------------------------


def _wait(operation: str, inst: Instruction, mods: Modifiers, b: Binder) -> Control:
    parity = mods.take("parity")
    _order(mods, "acquire", "relaxed")
    space = _space(mods, remote=False)
    _finish(mods)
    target, address, which, *hint = _operands(inst, 3, 4) if operation == "try_wait" else _operands(inst, 3)
    for limit in hint:
        b.read(limit, "u32")
    wanted = b.read(which, "u32" if parity else "b64")
    return MbarrierWait(operation, parity, _location(b, address, space), wanted, b.write(target, "pred"))


class MbarrierWait(Control):
    """`mbarrier.test_wait` and `.try_wait`; `wanted` is the slot of the parity or of the state."""

    def __init__(self, operation: str, parity: bool, location: Location, wanted: int, result: int) -> None:
        super().__init__()
        self.blocking = operation == "try_wait"
        self.name = f"mbarrier.{operation}"
        self.parity = parity
        self.location, self.wanted, self.result = location, wanted, result

    def run(self, cta, path) -> None:
        m = path.mask
        complete, unfinished = self._test(cta, m)
        cta.frame[self.result][m.index] = complete
        given_up, path.timed_out = path.timed_out, False
        if not unfinished or (self.blocking and given_up):
            cta.advance(path)
            return
        if complete is not False and complete.any():
            done = np.zeros(cta.lanes, bool)
            done[m.numbers[complete]] = True
            finished, path.mask = m.split_by(done)
            cta.fork(path, finished, path.segment.next)
        self._suspend(cta, path, unfinished)

    def _suspend(self, cta, path, unfinished: list[tuple[int, int]]) -> None:
        def reason() -> str:
            return " and ".join(self._describe(cta, offset, value) for offset, value in unfinished)

        if not self.blocking:
            cta.give_way(path, reason)
            return
        live = cta.unit(mbarrier.Mbarriers).live
        phases = [(offset, live[offset], live[offset].phase) for offset, _ in unfinished]
        first, barrier, seen = phases[0]

        def ready() -> bool:
            return barrier.phase != seen or live.get(first) is not barrier

        def any_ready() -> bool:
            return any(live.get(offset) is not barrier or barrier.phase != seen for offset, barrier, seen in phases)

        cta.machine.counters.events["mbarrier waits"] += len(path.mask.warps)
        cta.block(path, reason, ready if len(phases) == 1 else any_ready, retry=True, timed=True)

    def _test(self, cta, m: Mask) -> tuple[np.ndarray | bool, list[tuple[int, int]]]:
        """Whether each active lane's phase is complete, and the (offset, parity or state) pairs that are not."""
        offset, asked = _common_offset(cta.frame, m, cta, self.location), m.common(cta.frame[self.wanted])
        if offset is not None and asked is not None:
            done = self._is_complete(cta, offset, asked, m.numbers)
            return done, [] if done else [(offset, asked)]
        wanted = cta.frame[self.wanted][m.index]
        offsets = local_offsets(cta.frame, m, cta, self.location, self.name)
        complete, unfinished = np.zeros(m.count, bool), []
        for pair in sorted(set(zip(offsets.tolist(), wanted.tolist()))):
            lanes = (offsets == pair[0]) & (wanted == wanted.dtype.type(pair[1]))
            if self._is_complete(cta, *pair, m.numbers[lanes]):
                complete |= lanes
            else:
                unfinished.append(pair)
        return complete, unfinished

    def _is_complete(self, cta, offset: int, wanted: int, lanes: np.ndarray) -> bool:
        barrier = mbarrier.find(cta, offset, lanes)
        if self.parity:
            if wanted > 1:
                raise BarrierFault(f"phase parity {wanted}: it must be 0 or 1", lanes=lanes, address=offset)
            return barrier.phase & 1 != wanted
        ahead = (barrier.phase - mbarrier.phase_of(wanted)) & 3
        if wanted >> 63 or ahead > 1:
            raise BarrierFault(
                f"{self.name} with a state that is neither of the current phase {barrier.phase} nor of the one before: "
                f"{wanted:#018x}",
                lanes=lanes,
                address=offset,
            )
        return ahead == 1

    def _describe(self, cta, offset: int, wanted: int) -> str:
        barrier = cta.unit(mbarrier.Mbarriers).live.get(offset)
        if barrier is None:
            return f"for the mbarrier at {cta.machine.shared_names.describe(offset)}, which has been invalidated"
        asked = f"parity {wanted}" if self.parity else f"the state of phase {mbarrier.phase_of(wanted)} modulo 4"
        return f"for {barrier} (asks for {asked}, the current phase is {barrier.phase})"
