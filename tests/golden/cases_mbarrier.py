"""mbarrier objects under random, legal sequences of operations by one thread, and arrivals of a whole warp.

Compared: what each operation says (pending counts of the states it returns, completed phases). The states themselves
are opaque; they are recorded for whoever is curious.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from tests.golden.case import HEADER, Buffer, Case, Dice, Result

SEQUENCES, STEPS = 48, 40
_REGISTERS = ".reg .b64 %out, %state; .reg .b32 %bar, %said; .reg .pred %p;"
_OPEN = "ld.param.u64 %out, [out]; cvta.to.global.u64 %out, %out; mov.u32 %bar, barrier;"


class _Model:
    """Writes a sequence, and knows enough of the barrier to write a legal one."""

    def __init__(self, seed: int) -> None:
        self.dice = Dice(seed)
        self.lines: list[str] = []
        self.fresh(self.dice.between(1, 6))

    def fresh(self, count: int) -> None:
        self.expected = self.pending = count
        self.owed = self.phase = 0
        self.known: int | None = None  # the phase of the state in %state
        self.fusible = False  # whether the last step was an expect_tx that completed the phase
        self.lines.append(f"mbarrier.init.shared::cta.b64 [%bar], {count};")

    def settle(self, step: Callable[[_Model], bool]) -> None:
        completes = self.pending == 0 and self.owed == 0
        self.fusible = completes and step is _Model.expect
        if completes:
            self.phase += 1
            self.pending = self.expected

    # Each step is a method; it returns False when the state of the barrier does not allow it.

    def arrive(self) -> bool:
        if not self.pending:
            return False
        count = self.dice.between(1, self.pending)
        self._returned_state(f"mbarrier.arrive.shared::cta.b64 %state, [%bar], {count};")
        self.pending -= count
        return True

    def arrive_incomplete(self) -> bool:
        if self.pending < 2:
            return False
        count = self.dice.between(1, self.pending - 1)
        drop = self.expected - count >= 1 and self.dice.chance(40)
        name = "arrive_drop" if drop else "arrive"
        self._returned_state(f"mbarrier.{name}.noComplete.shared::cta.b64 %state, [%bar], {count};")
        self.pending -= count
        self.expected -= count * drop
        return True

    def arrive_drop(self) -> bool:
        limit = min(self.pending, self.expected - 1)
        if limit < 1:
            return False
        count = self.dice.between(1, limit)
        self._returned_state(f"mbarrier.arrive_drop.shared::cta.b64 %state, [%bar], {count};")
        self.pending -= count
        self.expected -= count
        return True

    def arrive_expecting(self) -> bool:
        if not self.pending or self.fusible:  # ptxas makes one instruction of expect_tx and arrive.expect_tx
            return False
        size = 8 * self.dice.below(9)
        drop = self.expected > 1 and self.dice.chance(25)
        name = "arrive_drop" if drop else "arrive"
        self._returned_state(f"mbarrier.{name}.expect_tx.shared::cta.b64 %state, [%bar], {size};")
        self.owed += size
        self.pending -= 1
        self.expected -= drop
        return True

    def expect(self) -> bool:
        size = -self.owed if self.owed < 0 and self.dice.chance(50) else 8 * self.dice.between(1, 8)
        self.lines.append(f"mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%bar], {size};")
        self.owed += size
        return True

    def complete(self) -> bool:
        size = self.owed if self.owed > 0 and self.dice.chance(70) else 8 * self.dice.between(1, 8)
        self.lines.append(f"mbarrier.complete_tx.relaxed.cluster.shared::cta.b64 [%bar], {size};")
        self.owed -= size
        return True

    def test_parity(self) -> bool:
        parity = self.dice.below(2)
        # A try_wait for a phase that is not complete may see what the thread does next.
        operation = "test_wait" if parity == self.phase & 1 else self.dice.pick(("test_wait", "try_wait"))
        self._asked(f"mbarrier.{operation}.parity.shared::cta.b64 %p, [%bar], {parity};")
        return True

    def test_state(self) -> bool:
        if self.known is None or self.phase - self.known > 1:
            return False
        self._asked("mbarrier.test_wait.shared::cta.b64 %p, [%bar], %state;")
        return True

    def restart(self) -> bool:
        self.lines.append("mbarrier.inval.shared::cta.b64 [%bar];")
        self.fresh(self.dice.pick((1, 2, 3, 1000, (1 << 20) - 1)))
        return True

    def _returned_state(self, instruction: str) -> None:
        self.known = self.phase
        self.lines.append(f"{instruction} mbarrier.pending_count.b64 %said, %state;")

    def _asked(self, instruction: str) -> None:
        self.lines.append(f"{instruction} selp.u32 %said, 1, 0, %p;")


_CHOICES: tuple[tuple[Callable[[_Model], bool], int], ...] = (
    (_Model.arrive, 5),
    (_Model.arrive_incomplete, 3),
    (_Model.arrive_drop, 2),
    (_Model.arrive_expecting, 3),
    (_Model.expect, 2),
    (_Model.complete, 4),
    (_Model.test_parity, 4),
    (_Model.test_state, 3),
    (_Model.restart, 1),
)


def _sequence(number: int) -> str:
    """The body of a kernel: steps, each followed by what it said, and by the last state that an arrival returned."""
    model = _Model(700 + number)
    steps = [step for step, weight in _CHOICES for _ in range(weight)]
    body = []
    while len(body) < STEPS:
        model.lines = model.lines if not body else []
        step = model.dice.pick(steps)
        while not step(model):
            step = model.dice.pick(steps)
        model.settle(step)
        place = len(body)
        body.append(
            "\n".join(model.lines) + f"\nst.global.u32 [%out+{4 * place}], %said; "
            f"st.global.b64 [%out+{4 * STEPS + 8 * place}], %state; mov.u32 %said, 0; membar.cta;"
        )
    return "\n".join(body)


def _kernel(name: str, body: str) -> str:
    return (
        f".visible .entry {name}(.param .u64 out)\n{{\n{_REGISTERS}\n.shared .align 8 .b8 barrier[8];\n"
        f"{_OPEN} mov.u32 %said, 0; mov.u64 %state, 0;\n{body}\nret;\n}}\n"
    )


# 64 threads arrive, each waits for the phase; then half of them drop out, and the others complete a phase alone.
_WARPS = """
.reg .b32 %thread; .reg .b64 %o; .reg .pred %first, %low;
mov.u32 %thread, %tid.x; setp.eq.u32 %first, %thread, 0; setp.lt.u32 %low, %thread, 32;
@%first mbarrier.init.shared::cta.b64 [%bar], 64;
bar.sync 0;
mbarrier.arrive.shared::cta.b64 %state, [%bar];
WAIT0: mbarrier.try_wait.shared::cta.b64 %p, [%bar], %state; @!%p bra WAIT0;
mbarrier.test_wait.parity.shared::cta.b64 %p, [%bar], 0; selp.u32 %said, 1, 0, %p;
bar.sync 0;
@%low bra STAY;
mbarrier.arrive_drop.shared::cta.b64 %state, [%bar];
bra JOIN;
STAY: mbarrier.arrive.shared::cta.b64 %state, [%bar];
WAIT1: mbarrier.try_wait.shared::cta.b64 %p, [%bar], %state; @!%p bra WAIT1;
mbarrier.arrive.shared::cta.b64 %state, [%bar];
WAIT2: mbarrier.try_wait.shared::cta.b64 %p, [%bar], %state; @!%p bra WAIT2;
JOIN: bar.sync 0;
mbarrier.test_wait.parity.shared::cta.b64 %p, [%bar], 0; @%p add.u32 %said, %said, 2;
mbarrier.test_wait.parity.shared::cta.b64 %p, [%bar], 1; @%p add.u32 %said, %said, 4;
mul.wide.u32 %o, %thread, 4; add.u64 %out, %out, %o; st.global.u32 [%out], %said;
"""


def cases() -> Iterator[Case]:
    kernels = [_kernel(f"sequence{number}", _sequence(number)) for number in range(SEQUENCES)]
    ptx = HEADER + "".join(kernels)
    memory = Buffer(np.zeros(12 * STEPS, np.uint8))
    for number in range(SEQUENCES):
        said = Result("said", 0, 0, 4 * STEPS)
        states = Result("states", 0, 4 * STEPS, 8 * STEPS)
        yield Case(f"mbarrier sequence {number}", ptx, f"sequence{number}", (memory,), (said,), opaque=(states,))
    said = (Result("said", 0, 0, 256),)
    yield Case(
        "mbarrier two warps",
        HEADER + _kernel("warps", _WARPS),
        "warps",
        (Buffer(np.zeros(256, np.uint8)),),
        said,
        block=64,
    )
