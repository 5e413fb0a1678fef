"""The order of asynchronous tcgen05 operations (PTX ISA 9.7.16.6).

One queue per CTA, or per CTA pair for .cta_group::2. An operation waits only for those before it that the ISA orders:

    mma -> mma (same accumulator and shape)     cp -> mma     shift -> mma     mma -> shift     shift -> cp.4x256b

and for two that the ISA does not list but that shipped kernels rely on:

- a cp or an mma is not performed before an earlier mma that reads the tensor memory it overwrites: every block-scaled
  kernel copies the next scale factors, and attention kernels write the next scores over the probabilities;
- the arrivals that one thread's commits make in one CTA come in the order of the commits: a CTA whose last wait is for
  the last of them may exit.

`ld` and `st` are ordered with their `wait`, and after earlier `st` of the same cells (`isa.tcgen05_registers`).
Threads of a CTA share its queue: what they issue without synchronisation is ordered as it happened to be issued.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from common.emulator.faults import TensorMemoryFault
from common.emulator.machine.events import Operation
from common.emulator.machine.mask import Mask
from common.emulator.machine.tensor_memory import BLOCK, Span, use_cta_group

if TYPE_CHECKING:
    from common.emulator.isa.async_issue import Issuer
    from common.emulator.machine.thread_block import ThreadBlock


@dataclass(eq=False)
class Entry:
    """An operation in a pipeline. `thread`: (CTA rank, lane) of who issued it."""

    operation: Operation
    kind: str
    thread: tuple[int, int]
    accumulator: tuple | None
    reads: tuple[Span, ...]


@dataclass
class TensorPipeline:
    """The queue of mma, cp and shift operations of one CTA or pair."""

    cta: ThreadBlock
    _entries: list[Entry] = field(default_factory=list)
    _signals: dict[tuple[tuple[int, int], ThreadBlock], Operation] = field(default_factory=dict)

    def pending(self) -> list[Entry]:
        """What is in flight, oldest first."""
        if self._entries:
            self._entries = [entry for entry in self._entries if not entry.operation.finished]
        return self._entries

    def add(self, entry: Entry) -> None:
        if not entry.operation.finished:
            self._entries.append(entry)

    def before(self, kind: str, accumulator: tuple | None, writes: Sequence[Span]) -> tuple[Operation, ...]:
        """The operations in flight that must complete before a new one of that kind."""
        return tuple(e.operation for e in self.pending() if _ordered(e, kind, accumulator, writes))

    def issued_by(self, thread: tuple[int, int]) -> tuple[Operation, ...]:
        """What `tcgen05.commit` of that thread tracks."""
        return tuple(entry.operation for entry in self.pending() if entry.thread == thread)

    def signals(self, thread: tuple[int, int], receiver: ThreadBlock) -> tuple[Operation, ...]:
        """The latest commit of that thread, in flight, that arrives in the shared memory of `receiver`."""
        latest = self._signals.get((thread, receiver))
        return () if latest is None or latest.finished else (latest,)

    def add_signal(self, thread: tuple[int, int], receiver: ThreadBlock, operation: Operation) -> None:
        self._signals[thread, receiver] = operation


def _ordered(earlier: Entry, kind: str, accumulator: tuple | None, writes: Sequence[Span]) -> bool:
    if kind == "mma" and (earlier.kind != "mma" or earlier.accumulator == accumulator):
        return True
    if kind == "shift":
        return earlier.kind == "mma"
    if earlier.kind == "shift":
        return kind == "cp.4x256b"
    return earlier.kind == "mma" and _reads_any(earlier, writes)


def _reads_any(earlier: Entry, writes: Sequence[Span]) -> bool:
    return any(read.overlaps(write) for read in earlier.reads for write in writes)


def pipeline(cta: ThreadBlock, group: int) -> TensorPipeline:
    """The queue of the CTA, or for `group` 2 that of its pair."""
    owner = cta if group == 1 else cta.cluster.blocks[cta.rank & ~1]
    return owner.unit(TensorPipeline)


def issue_tcgen05(
    issuer: Issuer,
    cta: ThreadBlock,
    lane: int,
    kind: str,
    steps: Sequence[Callable[[], None]],
    *,
    group: int,
    accumulator: tuple | None = None,
    reads: tuple[Span, ...] = (),
    writes: tuple[Span, ...] = (),
    detail: object = "",
) -> Operation:
    """Puts an mma, cp (`cp.4x256b` is a kind of its own) or shift in flight; returns its operation.

    `lane` is the issuing thread, `accumulator` the address and the shape of D (mma only). `writes` are the
    cells it is going to change: until its last step begins, `tcgen05.ld` sees poison there. `reads` are its operands
    in tensor memory (A, scale factors, metadata); read those, and the accumulator, through `Span.read`. Steps run in
    order, at moments that the schedule picks.
    """
    use_cta_group(cta, group)
    queue = pipeline(cta, group)
    after = queue.before(kind, accumulator, writes)
    if group == 2 and cta.cluster.blocks[cta.rank ^ 1].finished:
        raise TensorMemoryFault(f"tcgen05.{kind}.cta_group::2 after the peer CTA has exited")
    operation = issue_writing(issuer, cta, lane, f"tcgen05.{kind}", steps, writes, "computing", detail, after=after)
    queue.add(Entry(operation, kind, (cta.rank, lane), accumulator, reads))
    return operation


def issue_writing(
    issuer: Issuer,
    cta: ThreadBlock,
    lanes: int | Mask,
    kind: str,
    steps: Sequence[Callable[[], None]],
    writes: Sequence[Span],
    marks: str,
    detail: object = "",
    *,
    after: tuple[Operation, ...] = (),
) -> Operation:
    """Issues an operation whose `writes` count in `marks` ("storing" or "computing") until its last step begins.

    Spans that do not fill blocks of 16 lanes are not marked, for the sake of the other lanes of the block.
    """
    steps = list(steps)
    if writes and cta.machine.schedule != "early":
        counted = [span.marks(getattr(span.memory, marks)) for span in writes if span.lanes % BLOCK == 0]
        for counts in counted:
            counts += 1
        last = steps.pop()

        def finish() -> None:
            for counts in counted:
                counts -= 1
            for span in writes:
                span.require_allocated(kind)
            last()

        steps.append(finish)
    return issuer(cta, lanes, kind, steps, detail, after)
