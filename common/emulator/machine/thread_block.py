"""One CTA: its frame, its memory, and the paths its lanes are on.

The lanes of a CTA are partitioned into *paths*: sets of lanes that stand at the same place of the program. A path runs
segment after segment until it blocks, splits or gives way. Lanes of one warp that diverged are run lowest place first
(`ptx.flow.convergence_order`), so they meet again; every lane makes progress, because a path that has used up its turn
yields to the others (independent thread scheduling, PTX ISA 3.2).
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np

from common.emulator.faults import EmulatorError, InvalidAddress, Place
from common.emulator.machine.generic_writes import GenericWrites
from common.emulator.machine.mask import WARP, Mask, Visitors
from common.emulator.machine.memory import (
    LOCAL_WINDOW,
    POISON,
    RANK_SHIFT,
    RESERVED_SHARED,
    SHARED_WINDOW,
    Piece,
    Region,
    check_alignment,
    shared_offsets,
)
from common.emulator.machine.program import Diverged, Segment
from common.emulator.machine.scoreboard import Stalled

if TYPE_CHECKING:
    from common.emulator.machine.scheduler import Cluster, Machine

TURN = 4096  # segments a path runs before others of its CTA and other CTAs get a turn
SHORT_TURN = 64  # the same for a path known to wait in a loop
WATCHED = 64  # turns that a place is watched before another one is, in case the path has left it
POLL_COST = 64  # segments that a read of memory others may write (volatile, acquire, a failed CAS) takes off a turn
NO_HORIZON = 1 << 62
FOR_LANES = "for other lanes of its warp to reach the same instruction"
Unit = TypeVar("Unit")


class Wait(NamedTuple):
    """Why a path does not run. `ready` is asked again whenever anything happened.

    `retry`: the instruction is executed again when ready; otherwise the path goes on with what follows.
    `timed`: silicon ends this wait by itself after some time (`try_wait`, a polling loop).
    `awaited`: bool (L,), the lanes that must come to the same instruction first; None for any other wait.
    `at`: (segment, index) of the waiting instruction where the path already stands behind it.
    """

    reason: Callable[[], str]
    ready: Callable[[], bool]
    retry: bool = False
    timed: bool = False
    awaited: np.ndarray | None = None
    at: tuple[Segment, int] | None = None


class Path:
    """Lanes at one place: op `index` of a segment (`len(ops)` is its control instruction)."""

    __slots__ = (
        "segment",
        "index",
        "mask",
        "stack",
        "wait",
        "turns",
        "turn",
        "group",
        "retrying",
        "watch",
        "seen",
        "slept",
        "timed_out",
        "done",
    )

    def __init__(self, segment: Segment, mask: Mask, group: int, stack: tuple[int, ...] = ()) -> None:
        self.segment = segment
        self.index = 0
        self.mask = mask
        self.stack = stack  # segments to return to, innermost last
        self.wait: Wait | None = None
        self.turns = 0
        self.turn = TURN
        self.group = group
        self.retrying = False
        self.watch: tuple[Segment, int] | None = None  # a place and the registers' checksum there
        self.seen = -1
        self.slept = -1  # checksum of the registers when it last slept and nothing had happened
        self.timed_out = False  # the last wait ended without its condition: a try_wait that gave up
        self.done = False

    @property
    def position(self) -> tuple:
        return (self.group, self.segment.index, self.index, self.retrying, self.stack)


class ThreadBlock:
    """A CTA while it runs. Instruction closures get it as `cta`."""

    def __init__(self, machine: Machine, cluster: Cluster, rank: int, ctaid: tuple[int, int, int]) -> None:
        launch = machine.launch
        self.machine = machine
        self.cluster = cluster
        self.rank = rank
        self.ctaid = ctaid
        self.sm = cluster.first_sm + rank
        self.threads = launch.threads
        self.lanes = -(-self.threads // WARP) * WARP
        self.program = machine.program
        self.shared = Region("shared memory", RESERVED_SHARED, np.full(launch.shared_size, POISON, np.uint8))
        self.shared.generic_writes = GenericWrites(launch.shared_size)
        self.local = Region("local memory", 0, np.full(self.lanes * max(self.program.local_bytes, 1), POISON, np.uint8))
        self.alive = np.arange(self.lanes) < self.threads
        self.releases_dependents = False  # has said that launches which depend on this one may start
        self.everyone = Mask(self.alive.copy())
        self._units: dict[Any, Any] = {}
        self.at_exit: list[Callable[[], None]] = []  # what the CTA's hardware checks when its last lane has exited
        self.slot = machine.frames.acquire(self)
        self.frame = self.slot.arrays
        self.runnable: list[Path] = []
        self.blocked: list[Path] = []
        self._horizon = NO_HORIZON
        self._checked_at = -1
        self.exits = 0  # how often lanes have exited: `alive` changes with it
        self._visits: dict[tuple[int, Visitors], int] = {}  # how often lanes ran a segment
        self.waits = [0] * len(self.program.segments)  # of warps, at the segment's control instruction
        for group, mask in machine.policy.groups(self.everyone):
            self.runnable.append(Path(self.program.segments[self.program.entry], mask, group))

    # -- services to instructions ----------------------------------------------------------------------------------

    def unit(self, kind: Callable[[ThreadBlock], Unit]) -> Unit:
        """The CTA's own instance of a piece of hardware (named barriers, bulk groups, ...), made on first use."""
        if kind not in self._units:
            self._units[kind] = kind(self)
        return self._units[kind]

    def clock(self, name: str) -> int:
        """Value of %clock, %clock64, %globaltimer, ...: counts what the machine did, not time."""
        ticks = self.machine.tick()
        if name in ("clock_hi", "globaltimer_hi"):
            return ticks >> 32
        return ticks & 0xFFFF_FFFF if name in ("clock", "globaltimer_lo") else ticks

    def activity(self) -> None:
        """Something happened that another path may be waiting for (a store, an arrival, an exit)."""
        self.machine.activity += 1

    def locate(self, space: str, addresses: np.ndarray, width: int, mask: Mask) -> list[Piece]:
        """Where an access of `width` bytes at `addresses` (int64, one per active lane) goes.

        `space` is global, const, param, shared (also shared::cta), shared::cluster, local or generic. Raises
        Misaligned, OutOfBounds, InvalidAddress.
        """
        lanes = mask.numbers
        check_alignment(addresses, width, lanes, f"{space} access of {width} bytes")
        if space == "generic":
            return self._locate_generic(addresses, width, mask)
        if space in ("shared", "shared::cta"):
            return [Piece(self.shared, self._own_offsets(addresses, width, lanes), slice(None))]
        if space == "shared::cluster":
            return self._locate_cluster(addresses, width, lanes)
        if space == "local":
            return [self._locate_local(addresses, width, lanes)]
        return self.machine.memory.locate(addresses, width, lanes)

    def _own_offsets(self, addresses: np.ndarray, width: int, lanes: np.ndarray) -> np.ndarray:
        ranks = addresses >> RANK_SHIFT
        foreign = (ranks != self.rank) & (ranks != 0)
        if foreign.any():
            address = int(addresses[foreign][0])
            raise InvalidAddress(
                f"shared::cta access at {address & 0xFFFF_FFFF:#x} lies outside the window of CTA rank {self.rank}",
                lanes=lanes[foreign], address=address,
            )  # fmt: skip
        return shared_offsets(addresses, width, self.shared.size, lanes)

    def _locate_cluster(self, addresses: np.ndarray, width: int, lanes: np.ndarray) -> list[Piece]:
        ranks = addresses >> RANK_SHIFT
        first = int(ranks[0])
        if (ranks == first).all():
            target = self.peer(first, lanes)
            return [Piece(target.shared, shared_offsets(addresses, width, target.shared.size, lanes), slice(None))]
        pieces = []
        for rank in np.unique(ranks):
            chosen = ranks == rank
            target = self.peer(int(rank), lanes[chosen])
            offsets = shared_offsets(addresses[chosen], width, target.shared.size, lanes[chosen])
            pieces.append(Piece(target.shared, offsets, chosen))
        return pieces

    def peer(self, rank: int, lanes: np.ndarray | tuple = ()) -> ThreadBlock:
        """The CTA of the cluster with that rank. Raises InvalidAddress when there is none or it has exited."""
        if not 0 <= rank < len(self.cluster.blocks):
            raise InvalidAddress(
                f"shared::cluster address names CTA rank {rank}: the cluster has {len(self.cluster.blocks)}",
                lanes=lanes,
            )
        target = self.cluster.blocks[rank]
        if target.finished:
            raise InvalidAddress(
                f"shared memory of CTA rank {rank} is accessed after that CTA has exited: "
                "a cluster barrier before its exit is missing",
                lanes=lanes,
            )
        return target

    def _locate_local(self, addresses: np.ndarray, width: int, lanes: np.ndarray) -> Piece:
        size = self.program.local_bytes
        bad = (addresses < 0) | (addresses > size - width)
        if bad.any():
            address = int(addresses[bad][0])
            raise InvalidAddress(
                f"local access of {width} bytes at {address:#x}: a thread has {size} bytes of local memory",
                lanes=lanes[bad], address=address,
            )  # fmt: skip
        return Piece(self.local, lanes * size + addresses, slice(None))

    def _locate_generic(self, addresses: np.ndarray, width: int, mask: Mask) -> list[Piece]:
        windows = addresses >> 40
        first = int(windows[0])
        if (windows == first).all():
            return self._locate_window(first, addresses, width, mask)
        pieces = []
        for window in np.unique(windows):
            chosen = windows == window
            lanes = np.zeros(self.lanes, bool)
            lanes[mask.numbers[chosen]] = True
            for piece in self._locate_window(int(window), addresses[chosen], width, Mask(lanes)):
                inside = np.flatnonzero(chosen)[piece.chosen]
                pieces.append(Piece(piece.region, piece.offsets, inside))
        return pieces

    def _locate_window(self, window: int, addresses: np.ndarray, width: int, mask: Mask) -> list[Piece]:
        if window == SHARED_WINDOW >> 40:
            return self._locate_cluster(addresses - SHARED_WINDOW, width, mask.numbers)
        if window == LOCAL_WINDOW >> 40:
            return [self._locate_local(addresses - LOCAL_WINDOW, width, mask.numbers)]
        return self.machine.memory.locate(addresses, width, mask.numbers)

    def converged(self, mask: Mask, members: np.ndarray | None) -> bool:
        """Whether `mask` has all live lanes that an instruction waits for: of its warps, or of its membermasks."""
        if mask.whole:  # and a membermask names lanes of its own warp
            return True
        missing = self.alive & ~mask.lanes
        if members is None:
            return not (missing.reshape(-1, WARP).any(axis=1) & mask.present).any()
        absent = np.packbits(missing, bitorder="little").view(np.uint32)
        numbers = mask.numbers
        return not (members[numbers] & absent[numbers // WARP]).any()

    def divergence(self, mask: Mask, members: np.ndarray | None) -> Diverged:
        """For a mask that is not `converged`: which of its lanes must wait, and for which lanes."""
        missing = self.alive & ~mask.lanes
        if members is None:
            torn = self._torn(mask)
            waiting = mask.lanes & np.repeat(torn, WARP)
            return Diverged(waiting, missing & np.repeat(torn, WARP))
        absent = np.packbits(missing, bitorder="little").view(np.uint32)
        wanted = np.where(mask.lanes, members & np.repeat(absent, WARP), np.uint32(0))
        needed = np.bitwise_or.reduce(wanted.reshape(-1, WARP), axis=1)
        return Diverged(wanted != 0, np.unpackbits(needed.view(np.uint8), bitorder="little").astype(bool))

    def _torn(self, mask: Mask) -> np.ndarray:
        """Bool (L / 32,): the warps of `mask` that have live lanes elsewhere."""
        return (self.alive & ~mask.lanes).reshape(-1, WARP).any(axis=1) & mask.present

    def whole_warps(self, path: Path) -> bool:
        """For a control instruction that is `.aligned`: the lanes of a warp meet before they execute it.

        True: `path` holds the warps that are complete. The lanes of other warps are parked until the rest of their warp
        comes to the same instruction or exits; False when that leaves no warp.
        """
        if path.mask.whole:
            return True
        place = (path.group, path.segment.index, len(path.segment.ops), path.stack)
        for other in [p for p in self.blocked if p.wait.awaited is not None]:
            if (other.group, other.segment.index, other.index, other.stack) == place:
                self.blocked.remove(other)
                path.mask = path.mask.union(other.mask)
        torn, whole = path.mask.split_by(np.repeat(self._torn(path.mask), WARP))
        if torn is None:
            return True
        if whole is None:
            self._park(path)
            return False
        path.mask = whole
        self._park(self.fork(path, torn, path.segment.index))
        return True

    def _park(self, path: Path) -> None:
        mask = path.mask
        self.block(path, lambda: FOR_LANES, lambda: bool((mask.present & ~self._torn(mask)).any()), retry=True)
        path.wait = path.wait._replace(awaited=self.divergence(mask, None).missing)

    # -- paths -----------------------------------------------------------------------------------------------------

    @property
    def finished(self) -> bool:
        return not self.runnable and not self.blocked

    def advance(self, path: Path) -> None:
        """The path goes on with what follows its control instruction."""
        self.jump(path, path.segment.next)

    def jump(self, path: Path, segment: int) -> None:
        path.segment = self.program.segments[segment]
        path.index = 0
        path.retrying = False

    def fork(self, path: Path, mask: Mask, segment: int, stack: tuple[int, ...] | None = None) -> Path:
        """Lanes of `path` that go elsewhere. The caller gives `path` the remaining mask."""
        other = Path(self.program.segments[segment], mask, path.group, path.stack if stack is None else stack)
        other.turns, other.turn = path.turns, path.turn
        self.runnable.append(other)
        self._horizon = min(self._horizon, other.segment.order)
        return other

    def block(
        self,
        path: Path,
        reason: Callable[[], str],
        ready: Callable[[], bool],
        *,
        retry: bool = False,
        timed: bool = False,
    ) -> None:
        """Takes the path out of the running until `ready()`; see `Wait`."""
        path.wait = Wait(reason, ready, retry, timed)
        self.waits[path.segment.index] += path.mask.warps.size
        path.index = len(path.segment.ops)
        path.retrying = retry
        self.runnable.remove(path)
        self.blocked.append(path)

    def give_way(self, path: Path, reason: Callable[[], str]) -> None:
        """The path polls (test_wait, nanosleep): it goes on with what follows, after the others.

        When nothing happened since its last poll it parks until something does.
        """
        at = (path.segment, len(path.segment.ops))
        self.advance(path)
        path.turns += 1
        if path.seen == self.machine.activity:
            seen = path.seen
            slept, path.slept = path.slept, self._checksum(path)
            self.machine.napping |= slept != path.slept
            path.wait = Wait(reason, lambda: self.machine.activity != seen, retry=True, timed=True, at=at)
            self.runnable.remove(path)
            self.blocked.append(path)
        path.seen = self.machine.activity
        self._horizon = -1

    def release(self, path: Path) -> None:
        """Ends the wait of a blocked path of this CTA now, so that it can join the running path where both go on."""
        self._unblock(path)
        self._horizon = -1

    def retire(self, path: Path) -> None:
        """The lanes of the path have exited."""
        self.alive &= ~path.mask.lanes
        self.exits += 1
        self.runnable.remove(path)
        path.done = True
        self.activity()
        if self.finished:
            for check in self.at_exit:
                check()
            self.machine.block_finished(self)

    def wake(self, expired: bool = False) -> bool:
        """Makes blocked paths runnable whose wait is over (or, with `expired`, would end by itself)."""
        if not self.blocked or (not expired and self._checked_at == self.machine.activity):
            return False
        self._checked_at = self.machine.activity
        woken = [path for path in self.blocked if path.wait.ready() or (expired and path.wait.timed)]
        for path in woken:
            path.timed_out = expired
            self._unblock(path)
        return bool(woken)

    def _unblock(self, path: Path) -> None:
        self.blocked.remove(path)
        self.runnable.append(path)
        if not path.wait.retry:
            self.advance(path)
        path.wait = None

    # -- running ---------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Runs one path until it blocks, exits, gives way to another of its warps, or its turn is over."""
        path = self._pick()
        left = path.turn
        before, polls = self.machine.activity, self.machine.polls
        while path.wait is None:
            segment = path.segment
            if path.watch is not None and self._is_stuck(path, segment):
                return
            if not self._run_ops(path, segment):
                return
            control = segment.control
            if control is None:
                self.jump(path, segment.next)
            else:
                try:
                    control.run(self, path)
                except EmulatorError as error:
                    raise error.at(self._place(segment, len(segment.ops), error.lanes or path.mask.numbers)) from None
            if path.done:
                return
            left -= 1
            if polls != self.machine.polls:
                polls = self.machine.polls
                left -= POLL_COST
            if left <= 0:
                self._end_turn(path, before)
                return
            if path.segment.order >= self._horizon:
                return

    def _run_ops(self, path: Path, segment: Segment) -> bool:
        """Runs the straight-line part. False when the path stopped at a collective that waits for lanes."""
        frame, mask = self.frame, path.mask
        start = path.index
        ops = iter(segment.ops[start:] if start else segment.ops)
        if not start and not path.retrying:
            self._visit(segment, mask, 1)
        try:
            for op in ops:
                op(frame, mask, self)
        except Diverged:
            position = len(segment.ops) - ops.__length_hint__() - 1
            return self._meet(path, segment, position) and self._run_ops(path, segment)
        except Stalled as stalled:
            self._stall(path, len(segment.ops) - ops.__length_hint__() - 1, stalled)
            return False
        except EmulatorError as error:
            position = len(segment.ops) - ops.__length_hint__() - 1
            raise error.at(self._place(segment, position, error.lanes or mask.numbers)) from None
        self.machine.ticks += len(segment.instructions)
        return True

    def _visit(self, segment: Segment, mask: Mask, times: int) -> None:
        key = (segment.index, mask.visitors)
        self._visits[key] = self._visits.get(key, 0) + times

    def executed(self) -> tuple[np.ndarray, np.ndarray]:
        """How often each segment was run, by warp (segments, L / 32) and in lanes (segments,)."""
        by_warp = np.zeros((len(self.program.segments), self.lanes // WARP), np.int64)
        lanes = np.zeros(len(self.program.segments), np.int64)
        for (segment, visitors), times in self._visits.items():
            by_warp[segment] += times * np.frombuffer(visitors.warps, bool)
            lanes[segment] += times * visitors.lanes
        return by_warp, lanes

    def _place(self, segment: Segment, position: int, lanes: np.ndarray | tuple) -> Place:
        place = self.program.place(segment, position)
        numbers = np.asarray(lanes, int)
        warps = tuple(np.unique(numbers // WARP).tolist())
        return Place(place.instruction, place.ptx_line, place.source, self.ctaid, warps, tuple(numbers.tolist()))

    def _pick(self) -> Path:
        """The path to run: lowest place first within a group of warps; paths at the same place become one."""
        if len(self.runnable) == 1:
            self._horizon = NO_HORIZON
            return self.runnable[0]
        merged: dict[tuple, Path] = {}
        for path in self.runnable:
            other = merged.setdefault(path.position, path)
            if other is not path:
                other.mask = other.mask.union(path.mask)
                other.turns = max(other.turns, path.turns)
                other.watch = None
        self.runnable = list(merged.values())
        chosen = self.machine.policy.pick(self.runnable)
        orders = [
            p.segment.order
            for p in self.runnable
            if p is not chosen and p.group == chosen.group and p.turns <= chosen.turns
        ]
        self._horizon = min(orders, default=NO_HORIZON)
        if self._horizon <= chosen.segment.order:
            self._horizon = chosen.segment.order + 1
        return chosen

    def _meet(self, path: Path, segment: Segment, position: int) -> bool:
        """Lanes arrive at a collective: warps that are complete execute it, the others wait for their missing lanes.

        Returns whether any warp is complete; `path` then holds those warps and stands after the instruction.
        """
        path.index = position
        place = (path.group, segment.index, position, False, path.stack)
        for other in [p for p in self.blocked if p.wait.awaited is not None and p.position == place]:
            self.blocked.remove(other)
            path.mask = path.mask.union(other.mask)
        complete = np.zeros(self.lanes, bool)
        for warp in path.mask.warps:
            lanes = np.zeros(self.lanes, bool)
            window = slice(warp * WARP, (warp + 1) * WARP)
            lanes[window] = path.mask.lanes[window]
            complete |= self._execute_met(path, position, lanes)
        if not complete.any():
            self.runnable.remove(path)
            return False
        path.mask = Mask(complete)
        path.index = position + 1
        return True

    def _execute_met(self, path: Path, position: int, lanes: np.ndarray) -> np.ndarray:
        """Executes a collective for those of `lanes` whose partners are all there, and parks the others.

        Lanes of a warp may name disjoint membermasks: one group does not wait for another. Returns those that executed.
        """
        while lanes.any():
            try:
                path.segment.ops[position](self.frame, Mask(lanes), self)
                break
            except Diverged as diverged:
                self._wait_for_lanes(path, position, diverged)
                lanes = lanes & ~diverged.waiting
            except EmulatorError as error:
                raise error.at(self._place(path.segment, position, error.lanes or np.flatnonzero(lanes))) from None
        return lanes

    def _stall(self, path: Path, position: int, stalled: Stalled) -> None:
        """The path waits in front of an instruction whose registers are not there yet."""
        if position == 0:
            self._visit(path.segment, path.mask, -1)  # the segment starts over
        path.index = position
        path.wait = Wait(lambda: stalled.reason, stalled.ready, retry=True)
        self.runnable.remove(path)
        self.blocked.append(path)

    def _wait_for_lanes(self, path: Path, position: int, diverged: Diverged) -> None:
        waiting = Path(path.segment, Mask(diverged.waiting), path.group, path.stack)
        waiting.index = position
        alive = int(np.count_nonzero(self.alive))
        changed = lambda: int(np.count_nonzero(self.alive)) != alive  # noqa: E731
        waiting.wait = Wait(lambda: FOR_LANES, changed, retry=True, awaited=diverged.missing)
        self.blocked.append(waiting)

    def _end_turn(self, path: Path, before: int) -> None:
        path.turns += 1
        self.machine.turn_over = True
        if self.machine.activity == before:
            if path.watch is None or path.turns % WATCHED == 0:
                path.watch = (path.segment, self._checksum(path))
                path.seen = -1  # the loop is to come round once more before it counts as stuck
            path.turn = SHORT_TURN
        else:
            path.watch = None
            path.turn = TURN

    def _is_stuck(self, path: Path, segment: Segment) -> bool:
        """Whether a loop came back to the same place with the same registers although nothing else happened.

        Such a path can only go on when memory changes: it parks.
        """
        watched, checksum = path.watch
        if watched is not segment or path.index:
            return False
        now = self._checksum(path)
        if now != checksum:
            path.watch = (segment, now)
            return False
        seen = self.machine.activity
        if path.seen != seen:
            path.seen = seen
            return False
        path.wait = Wait(
            lambda: "in a loop that polls memory nobody changes",
            lambda: self.machine.activity != seen,
            retry=True,
            timed=True,
        )
        path.seen = -1
        self.runnable.remove(path)
        self.blocked.append(path)
        return True

    def _checksum(self, path: Path) -> int:
        value = 0
        for bank in self.slot.banks.values():
            value = zlib.crc32(np.ascontiguousarray(bank[:, path.mask.numbers]).view(np.uint8).reshape(-1), value)
        return value
