"""What all asynchronous data movement shares: issuing operations, their memory and signals, waiting for groups."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from common.emulator.faults import EmulatorError, Fault, InvalidAddress, Misaligned, Place, UnsupportedInstruction
from common.emulator.isa.binder import Binder, Modifiers
from common.emulator.isa.load_store import bind_address
from common.emulator.isa.registry import Control, Decoded, Run
from common.emulator.machine import mbarrier
from common.emulator.machine.async_groups import AsyncGroups, BulkGroups, over
from common.emulator.machine.events import Operation
from common.emulator.machine.generic_writes import chunks_of, require_fence
from common.emulator.machine.mask import WARP, Mask
from common.emulator.machine.memory import (
    POISON,
    RANK_MASK,
    RANK_SHIFT,
    RESERVED_SHARED,
    Region,
    check_alignment,
    refuse_write,
    shared_offsets,
)
from common.emulator.ptx.module import Immediate, Instruction, Operand

if TYPE_CHECKING:
    from common.emulator.machine.thread_block import Path, ThreadBlock

BARRIER_BYTES = 8
CHUNK = 16  # bulk copies move whole chunks of this many bytes
MASK_BITS = 16
COMPLETION = "mbarrier::complete_tx::bytes"


class Issuer:
    """Puts operations of one instruction in flight, so that a fault at their completion still names the instruction."""

    def __init__(self, inst: Instruction) -> None:
        self._text, self._line, self._origin = inst.text, inst.line, inst.origin

    def __call__(
        self,
        cta: ThreadBlock,
        lanes: int | Mask,
        kind: str,
        steps: Sequence[Callable[[], None]],
        detail: object = "",
        after: tuple[Operation, ...] = (),
    ) -> Operation:
        """`lanes`: the thread, or the threads, that issued it. `detail`: see `Operation`."""
        operation = cta.machine.events.issue(self.prepare(cta, lanes, kind, steps, detail, after))
        cta.activity()
        return operation

    def prepare(
        self,
        cta: ThreadBlock,
        lanes: int | Mask,
        kind: str,
        steps: Sequence[Callable[[], None]],
        detail: object = "",
        after: tuple[Operation, ...] = (),
    ) -> Operation:
        """The operation, not in flight yet."""

        def place() -> Place:
            if isinstance(lanes, Mask):
                warps, numbers = tuple(lanes.warps.tolist()), tuple(lanes.numbers.tolist())
            else:
                warps, numbers = (lanes // WARP,), (lanes,)
            return Place(self._text, self._line, self._origin, cta.ctaid, warps, numbers)

        return Operation(kind, list(steps), detail, place, after)


def poisons(cta: ThreadBlock) -> bool:
    """Whether destinations must read as poison until completion: not when operations complete as they are issued."""
    return cta.machine.schedule != "early"


class SharedSpan(NamedTuple):
    """Bytes of the shared memory of `block`, from `offset` on."""

    block: ThreadBlock
    offset: int

    def bytes(self, size: int) -> np.ndarray:
        return self.block.shared.data[self.offset : self.offset + size]

    def require_fence(self, size: int, what: str) -> None:
        """Raises MissingFence where threads have written what `what` is going to read."""
        require_fence(self.block, chunks_of(self.offset, size), what)

    def overwritten(self, size: int) -> None:
        """An asynchronous operation has written the bytes."""
        self.block.shared.generic_writes.overwritten(self.offset, size)

    def in_block(self, block: ThreadBlock) -> SharedSpan:
        """The same offset in another CTA."""
        return SharedSpan(block, self.offset)

    def __str__(self) -> str:
        return f"shared {self.block.machine.shared_names.describe(self.offset)} of CTA {self.block.ctaid}"


class GlobalSpan(NamedTuple):
    """Bytes of a global allocation, from `offset` on."""

    region: Region
    offset: int

    def bytes(self, size: int) -> np.ndarray:
        return self.region.data[self.offset : self.offset + size]

    def __str__(self) -> str:
        return f"{self.region.name} + {self.offset:#x}"


def shared_span(cta: ThreadBlock, address: int, size: int, alignment: int, lane: int, *, own: bool) -> SharedSpan:
    """Resolves a shared::cta (`own`) or shared::cluster address. Raises Misaligned, OutOfBounds, InvalidAddress."""
    rank = address >> RANK_SHIFT
    if own and rank not in (cta.rank, 0):
        raise InvalidAddress(
            f"shared::cta address {address:#x} lies outside the window of CTA rank {cta.rank}",
            lanes=[lane], address=address,
        )  # fmt: skip
    block = cta if own else cta.peer(rank, [lane])
    offset = address & RANK_MASK
    if address % alignment or not RESERVED_SHARED <= offset <= block.shared.size - size:
        lanes, addresses = np.array([lane]), np.array([address], np.int64)
        check_alignment(addresses, alignment, lanes, "asynchronous access to shared memory")
        shared_offsets(addresses, size, block.shared.size, lanes)
    return SharedSpan(block, offset)


def global_span(cta: ThreadBlock, address: int, size: int, alignment: int, lane: int, *, writes: bool) -> GlobalSpan:
    """Resolves a global address. Raises Misaligned, OutOfBounds, InvalidAddress."""
    region = cta.machine.memory.region_at(address)
    if address % alignment or region is None or address + size > region.base + region.size:
        lanes, addresses = np.array([lane]), np.array([address], np.int64)
        check_alignment(addresses, alignment, lanes, "asynchronous access to global memory")
        cta.machine.memory.locate(addresses, size, lanes)
    if writes:
        refuse_write(region, np.array([lane]), address)
    return GlobalSpan(region, address - region.base)


def check_bulk_size(size: int, lane: int) -> None:
    if size % CHUNK:
        raise Misaligned(f"a bulk operation of {size} bytes: the size must be a multiple of {CHUNK}", lanes=[lane])


def masked_blocks(cta: ThreadBlock, mask: int, lane: int) -> list[ThreadBlock]:
    """The CTAs of a ctaMask. Raises InvalidAddress for an empty one and for bits beyond the cluster."""
    ranks = [rank for rank in range(MASK_BITS) if mask >> rank & 1]
    if not ranks:
        raise InvalidAddress("ctaMask 0 of a multicast names no CTA", lanes=[lane])
    return [cta.peer(rank, [lane]) for rank in ranks]


def require_receiver(block: ThreadBlock, what: str) -> None:
    """A copy into shared memory, or a signal, needs a CTA that is still there."""
    if block.finished:
        raise InvalidAddress(
            f"{what} completes after CTA {block.ctaid}, whose shared memory it writes, has exited: wait for its "
            "mbarrier before the exit"
        )


def require_source(block: ThreadBlock, remedy: str) -> None:
    """An operation that has yet to read shared memory needs the CTA that owns it.

    Not so the stores of a bulk group: the hardware keeps a CTA's shared memory until they have read it. No manual says
    so, but kernels in production rely on it: the epilogue of CUTLASS 4 for SM100 exits without `wait_group.read` when
    it loads no C.
    """
    if block.finished:
        raise Fault(
            f"CTA {block.ctaid} has exited before an asynchronous operation has read its shared memory: {remedy} "
            "before the exit"
        )


WAIT_BARRIER = "a wait for its mbarrier is missing"


def signal(barrier: SharedSpan, size: int) -> None:
    """`complete_tx` of `size` bytes on an mbarrier."""
    require_receiver(barrier.block, "an asynchronous operation")
    mbarrier.complete_tx(barrier.block, barrier.offset, size)


def issue_store(
    issuer: Issuer,
    cta: ThreadBlock,
    lane: int,
    kind: str,
    read: Callable[[], np.ndarray],
    write: Callable[[np.ndarray], None],
    detail: object,
) -> None:
    """A two-step operation of the thread's bulk group: `read` gives what `write` later gets."""
    buffer: list[np.ndarray] = []
    steps = [lambda: buffer.append(read()), lambda: write(buffer.pop())]
    operation = issuer(cta, lane, kind, steps, detail)
    lanes = np.zeros(cta.lanes, bool)
    lanes[lane] = True
    cta.unit(BulkGroups).add(operation, lanes)


def poison_bytes(target: np.ndarray) -> None:
    target[...] = POISON


# -- decoding ------------------------------------------------------------------------------------------------------


def bind_pointer(b: Binder, operand: Operand, space: str) -> Callable[[list, int], int]:
    """A reader of one lane's address: `pointer(f, lane)` -> int."""
    _, base, offset = bind_address(b, operand, space)
    if base is None:
        return lambda f, lane: offset
    return lambda f, lane: int(f[base][lane]) + offset


def bind_options(b: Binder, operands: Sequence[Operand], *kinds: str | None) -> list[int | None]:
    """Slots of the optional operands at an instruction's end, one per kind; None for a kind that is None.

    Raises UnsupportedInstruction when there are more or fewer operands than kinds.
    """
    wanted = [kind for kind in kinds if kind is not None]
    if len(operands) != len(wanted):
        raise UnsupportedInstruction(f"{len(operands)} optional operands where the modifiers ask for {len(wanted)}")
    rest = iter(operands)
    return [None if kind is None else b.read(next(rest), kind) for kind in kinds]


def take_cache_hint(mods: Modifiers) -> str | None:
    """Consumes `.L2::cache_hint`; the kind of its operand, a 64-bit policy that changes no value."""
    return "u64" if mods.take("L2::cache_hint") else None


def constant_operand(operand: Operand) -> int:
    if not isinstance(operand, Immediate) or operand.kind != "int":
        raise UnsupportedInstruction(f"{operand} must be an integer constant")
    return int(operand.value)


def per_lane(action: Callable[[list, int, ThreadBlock], None]) -> Run:
    """A closure that performs `action(f, lane, cta)` for each active lane, in lane order."""

    def run(f, m, cta) -> None:
        for lane in m.numbers.tolist():
            try:
                action(f, lane, cta)
            except EmulatorError as error:
                error.lanes = error.lanes or (lane,)
                raise

    return run


class WaitGroups(Control):
    """`wait_group latest`: the warps with operations in older groups wait for these, the other warps go on."""

    def __init__(self, groups: type[AsyncGroups], latest: int, *, reading: bool = False, commits: bool = False) -> None:
        super().__init__()
        self.groups, self.latest, self.reading, self.commits = groups, latest, reading, commits

    def run(self, cta: ThreadBlock, path: Path) -> None:
        groups = cta.unit(self.groups)
        if self.commits:
            groups.commit(path.mask)
        waiting, operations = groups.due(path.mask, self.latest, self.reading)
        if not operations:
            cta.advance(path)
            return
        stay, go = path.mask.split_by(np.repeat(waiting.reshape(-1, WARP).any(axis=1), WARP))
        if go is not None:
            cta.fork(path, go, path.segment.next)
        path.mask = stay
        reading = self.reading
        cta.block(
            path,
            reason=lambda: self.reason(cta, [o for o in operations if not over(o, reading)]),
            ready=lambda: all(over(o, reading) for o in operations),
        )

    def reason(self, cta: ThreadBlock, pending: list[Operation]) -> str:
        """What a wait for these is called in a report."""
        return f"for {len(pending)} asynchronous operations of its groups"


def decode_group_instruction(inst: Instruction, b: Binder, groups: type[AsyncGroups]) -> Decoded:
    """`commit_group`, `wait_group{.read} N` and `wait_all`, of either kind of group."""
    mods = b.modifiers(inst)
    mods.take("async")
    bulk = mods.take("bulk")
    what = mods.one_of("commit_group", "wait_group", *(() if bulk else ("wait_all",)))
    reading = bulk and what == "wait_group" and mods.take("read")
    mods.done()
    if what == "wait_group":
        (latest,) = inst.operands
        return WaitGroups(groups, constant_operand(latest), reading=reading)
    if inst.operands:
        raise UnsupportedInstruction(f"{what} takes no operands")
    if what == "wait_all":
        return WaitGroups(groups, 0, commits=True)

    def commit(f, m, cta) -> None:
        cta.unit(groups).commit(m)

    return commit
