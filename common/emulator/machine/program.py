"""A kernel decoded for execution: segments of closures, and the layout of the frame they work on."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from common.emulator.faults import LaunchError, Place, PtxSyntaxError, UnsupportedInstruction
from common.emulator.isa import load_families
from common.emulator.isa.binder import Binder, FrameLayout
from common.emulator.isa.registry import Collective, Control, Run, decoder_of
from common.emulator.machine.fusion import decode_groups, make_nodes, schedule, settle_registers
from common.emulator.machine.operations import operations_of
from common.emulator.machine.scoreboard import guard_loads
from common.emulator.ptx.flow import convergence_order
from common.emulator.ptx.module import Function, Instruction, Module, Symbol


class Diverged(Exception):
    """Raised by a collective instruction whose lanes have not all arrived; the thread block catches it.

    `waiting` and `missing` are bool (L,): the lanes that have to wait, and those they wait for.
    """

    def __init__(self, waiting: np.ndarray, missing: np.ndarray) -> None:
        super().__init__()
        self.waiting = waiting
        self.missing = missing


@dataclass
class Segment:
    """Straight-line code. It ends with a control instruction, or falls into the segment `next`.

    `instructions` are those of the text, the control instruction last. `ops` is what runs, after `fuse` in another
    order, with the instruction of each in `origins`. `fixed`: positions of ops that do more than their instruction.
    """

    index: int
    function: str
    ops: list[Run] = field(default_factory=list)
    instructions: list[Instruction] = field(default_factory=list)
    origins: list[Instruction] = field(default_factory=list)
    fixed: set[int] = field(default_factory=set)
    control: Control | None = None
    next: int = -1
    order: int = 0


@dataclass
class Program:
    """A kernel and the functions it calls, ready to run. `local_bytes` is per thread; `local_offsets` places .local and
    function-scope .param variables by (function, name)."""

    module: Module
    kernel: Function
    segments: list[Segment]
    entry: int
    function_entries: dict[str, int]
    layout: FrameLayout
    local_offsets: dict[tuple[str, str], int]
    local_bytes: int

    def place(self, segment: Segment, position: int) -> Place:
        inst = segment.origins[position] if position < len(segment.origins) else segment.instructions[-1]
        return Place(inst.text, inst.line, inst.origin)


class Compiler:
    """Decodes a kernel and everything it calls. Use `compile_kernel`."""

    def __init__(self, module: Module, name: str) -> None:
        self.module = module
        self.layout = FrameLayout()
        self.segments: list[Segment] = []
        self.function_entries: dict[str, int] = {}
        self.local_offsets: dict[tuple[str, str], int] = {}
        self.local_bytes = max((_results_size(f) for f in module.functions.values()), default=0)
        self._binders: dict[str, Binder] = {}
        self._labels: dict[tuple[str, str], int] = {}
        self._wanted: list[str] = [name, *_function_pointers(module)]
        self._calls: dict[str, set[str]] = {}
        self.current: Function = module.functions[name]

    def compile(self) -> Program:
        kernel = self.current
        while self._wanted:
            name = self._wanted.pop()
            if name not in self.function_entries:
                self._function(self.module.functions[name])
        self._refuse_recursion()
        self._link()
        successors = [self._successors(segment) for segment in self.segments]
        self._order(successors)
        guard_loads(self.segments, successors, self.function_entries)
        self._fuse()
        self.local_bytes = -(-self.local_bytes // 16) * 16
        return Program(
            self.module, kernel, self.segments, self.function_entries[kernel.name], self.function_entries,
            self.layout, self.local_offsets, self.local_bytes,
        )  # fmt: skip

    def want(self, name: str) -> None:
        """Called by the decoder of `call`: `name` must be compiled too."""
        self._calls.setdefault(self.current.name, set()).add(name)
        self._wanted.append(name)

    def _function(self, function: Function) -> None:
        self.current = function
        self._place_locals(function)
        binder = self._binders[function.name] = Binder(self.layout, self.module, function, self._space_of, self.want)
        starts = set(function.labels.values())
        labels_at: dict[int, list[str]] = {}
        for label, position in function.labels.items():
            labels_at.setdefault(position, []).append(label)
        segment = self._new_segment(function)
        self.function_entries[function.name] = segment.index
        for position, inst in enumerate(function.instructions):
            if position in starts and (segment.instructions or segment.control):
                segment = self._following(segment, function)
            for label in labels_at.get(position, ()):
                self._labels[function.name, label] = segment.index
            self._append(segment, inst, binder)
            if segment.control is not None:
                control = segment.control
                segment = self._following(segment, function)
                if control.after is not None:
                    segment.ops.append(control.after)
                    segment.instructions.append(inst)
                    segment = self._following(segment, function)
                    control.otherwise = segment.index
        for label in labels_at.get(len(function.instructions), ()):
            self._labels[function.name, label] = segment.index
        self._close(segment, function)

    def _new_segment(self, function: Function) -> Segment:
        segment = Segment(len(self.segments), function.name)
        self.segments.append(segment)
        return segment

    def _following(self, segment: Segment, function: Function) -> Segment:
        following = self._new_segment(function)
        segment.next = following.index
        return following

    def _close(self, segment: Segment, function: Function) -> None:
        """Falling off the end of a body is `ret`."""
        text = "ret;  // end of body"
        end = Instruction(
            "ret", (), (), None, False, function.instructions[-1].line if function.instructions else 0, None, text
        )
        self._append(segment, end, Binder(self.layout, self.module, function, self._space_of, self.want))

    def _append(self, segment: Segment, inst: Instruction, binder: Binder) -> None:
        binder.prelude = []
        try:
            decoded = decoder_of(inst)(inst, binder)
            guard = None if inst.guard is None else binder.read(inst.guard, "pred")
        except UnsupportedInstruction as error:
            raise error.at(Place(inst.text, inst.line, inst.origin)) from None
        except (ValueError, IndexError, KeyError, AttributeError, TypeError) as error:
            # The decoders unpack the operands that their instruction has: text with others is no PTX.
            message = f"`{inst.opcode}` cannot take these {len(inst.operands)} operands"
            raise PtxSyntaxError(message).at(Place(inst.text, inst.line, inst.origin)) from error
        segment.instructions.append(inst)
        if isinstance(decoded, Control):
            if binder.prelude:
                segment.ops.append(_sequence(binder.prelude))
                segment.instructions.append(inst)
            control = decoded if guard is None else GuardedControl(decoded, guard, inst.guard_negated)
            segment.control = control
            return
        run = _checked(decoded) if isinstance(decoded, Collective) else decoded
        if binder.prelude:
            run = _sequence([*binder.prelude, run])
            segment.fixed.add(len(segment.ops))
        if guard is not None:
            guarded = _predicated if operations_of(inst) is None else partial(_predicated_arithmetic, id(inst))
            run = guarded(run, guard, inst.guard_negated)
        segment.ops.append(run)

    def _fuse(self) -> None:
        """Has instructions that are alike run together (`machine.fusion`)."""
        groups = [schedule(make_nodes(s.ops, s.instructions, s.fixed)) for s in self.segments]
        for group in groups:
            settle_registers(group, self.layout)
        self.layout.settle_rest()
        for segment, group in zip(self.segments, groups):
            segment.ops, segment.origins = decode_groups(group, self._binders[segment.function])

    def _place_locals(self, function: Function) -> None:
        for variable in function.variables.values():
            is_local = variable.space == "local" or (variable.space == "param" and not function.is_entry)
            is_argument = variable.space == "param" and function.is_entry and variable not in function.parameters
            if is_local or is_argument:
                align = max(variable.align, 8)
                self.local_bytes = -(-self.local_bytes // align) * align
                self.local_offsets[function.name, variable.name] = self.local_bytes
                self.local_bytes += variable.size or 0

    def _space_of(self, symbol: Symbol) -> str:
        """The state space of a variable as the current function sees it: global, const, shared, local, param or
        function."""
        variable = self.current.variables.get(symbol.name) or self.module.variables.get(symbol.name)
        if variable is not None:
            if variable.space == "param":
                return "param" if variable in self.current.parameters and self.current.is_entry else "local_param"
            return variable.space
        if symbol.name in self.module.functions or symbol.name in self.module.aliases:
            return "function"
        raise UnsupportedInstruction(f"unknown symbol {symbol.name}")

    def _refuse_recursion(self) -> None:
        state: Counter[str] = Counter()

        def visit(name: str) -> None:
            state[name] = 1
            for callee in self._calls.get(name, ()):
                if state[callee] == 1:
                    raise UnsupportedInstruction(f"recursive call of {callee}: recursion is not supported")
                if state[callee] == 0:
                    visit(callee)
            state[name] = 2

        for name in list(self._calls):
            if state[name] == 0:
                visit(name)

    def _link(self) -> None:
        for segment in self.segments:
            control = segment.control
            if control is not None:
                control.link(tuple(self._target(segment, name) for name in control.targets), segment.next)

    def _order(self, successors: list[list[int]]) -> None:
        for entry in self.function_entries.values():
            for order, index in enumerate(convergence_order(successors, entry)):
                self.segments[index].order = order

    def _target(self, segment: Segment, label: str) -> int:
        try:
            return self._labels[segment.function, label]
        except KeyError:
            inst = segment.instructions[-1]
            raise UnsupportedInstruction(f"unknown label {label}").at(
                Place(inst.text, inst.line, inst.origin)
            ) from None

    def _successors(self, segment: Segment) -> list[int]:
        control = segment.control
        following = [] if segment.next < 0 or (control is not None and control.ends) else [segment.next]
        if control is None:
            return following
        return following + list(control.segments) + ([] if control.otherwise < 0 else [control.otherwise])


def _function_pointers(module: Module) -> list[str]:
    """Functions whose address is the initial value of a variable."""
    names = [relocation.symbol for variable in module.variables.values() for relocation in variable.relocations]
    return [name for name in names if name in module.functions and module.functions[name].has_body]


def _results_size(function: Function) -> int:
    return sum(variable.size or 0 for variable in function.returns)


class GuardedControl(Control):
    """`@p` in front of a control instruction: the other lanes go on with the next segment."""

    def __init__(self, inner: Control, guard: int, negated: bool) -> None:
        super().__init__()
        self.inner, self.guard, self.negated = inner, guard, negated
        self.targets = inner.targets
        self.after = inner.after
        self.skipped = -1  # where the other lanes go on

    def link(self, segments: tuple[int, ...], following: int) -> None:
        super().link(segments, following)
        self.skipped = following if self.otherwise < 0 else self.otherwise
        self.inner.link(segments, following)

    def run(self, cta, path) -> None:
        if path.retrying:
            self.inner.run(cta, path)
            return
        taken = path.mask.narrow(cta.frame[self.guard], self.negated)
        if taken is None:
            cta.jump(path, self.skipped)
            return
        if taken is not path.mask:
            cta.fork(path, path.mask.narrow(taken.lanes, negated=True), self.skipped)
            path.mask = taken
        path.retrying = True  # from here on the path stands at the inner instruction
        self.inner.run(cta, path)


def _predicated(run: Run, guard: int, negated: bool) -> Run:
    def predicated(f, m, cta) -> None:
        narrowed = m.narrow(f[guard], negated)
        if narrowed is not None:
            run(f, narrowed, cta)

    return predicated


def _predicated_arithmetic(key: int, run: Run, guard: int, negated: bool) -> Run:
    """The same, and the lanes that are left are counted under `key`: the segment's mask does not tell them."""

    def predicated(f, m, cta) -> None:
        narrowed = m.narrow(f[guard], negated)
        if narrowed is not None:
            cta.machine.counters.guarded_lanes[key] += narrowed.count
            run(f, narrowed, cta)

    return predicated


def _sequence(runs: list[Run]) -> Run:
    def sequence(f, m, cta) -> None:
        for run in runs:
            run(f, m, cta)

    return sequence


def _checked(decoded: Collective) -> Run:
    run, members = decoded.run, decoded.members

    def checked(f, m, cta) -> None:
        named = None if members is None else f[members]
        if cta.converged(m, named):
            run(f, m, cta)
        else:
            raise cta.divergence(m, named)

    return checked


def compile_kernel(module: Module, name: str) -> Program:
    """Decodes kernel `name` of `module`. Raises UnsupportedInstruction, with the PTX line, for what cannot be
    executed, and LaunchError for a name that is no kernel of the module."""
    if name not in module.functions or not module.functions[name].is_entry:
        raise LaunchError(f"no kernel {name!r} in this PTX: it has {', '.join(module.entries) or 'none'}")
    load_families()
    return Compiler(module, name).compile()
