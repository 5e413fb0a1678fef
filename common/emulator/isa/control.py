"""Branches, calls and exits (PTX ISA 9.7.12)."""

from __future__ import annotations

import numpy as np

from common.emulator.faults import InvalidAddress, UnsupportedInstruction
from common.emulator.isa.binder import Binder
from common.emulator.isa.device_functions import BUILTINS
from common.emulator.isa.registry import Control, Decoded, Run, instruction
from common.emulator.machine.mask import Mask
from common.emulator.machine.memory import FUNCTION_BASE
from common.emulator.ptx.module import Arguments, Function, Immediate, Instruction, Operand, Register, Symbol


class Branch(Control):
    ends = True

    def __init__(self, target: str) -> None:
        super().__init__()
        self.targets = (target,)

    def run(self, cta, path) -> None:
        cta.jump(path, self.segments[0])


class IndexedBranch(Control):
    """`brx.idx index, targets`"""

    ends = True

    def __init__(self, index: int, targets: tuple[str, ...]) -> None:
        super().__init__()
        self.index, self.targets = index, targets

    def run(self, cta, path) -> None:
        indices = cta.frame[self.index]
        chosen = np.unique(indices[path.mask.numbers])
        if int(chosen[-1]) >= len(self.segments):
            lanes = path.mask.numbers[indices[path.mask.numbers] >= len(self.segments)]
            raise InvalidAddress(
                f"brx.idx index {int(chosen[-1])} is past its {len(self.segments)} targets", lanes=lanes
            )
        rest = path.mask
        for index in chosen[:-1]:
            lanes, rest = rest.split_by(indices == index)
            cta.fork(path, lanes, self.segments[int(index)])
        path.mask = rest
        cta.jump(path, self.segments[int(chosen[-1])])


class Exit(Control):
    ends = True

    def run(self, cta, path) -> None:
        cta.retire(path)


class Return(Control):
    """`ret`: back to the caller, or the end of the thread in a kernel.

    Results travel through one area at the start of each thread's local memory, so that a caller need not know which
    function it called.
    """

    ends = True

    def __init__(self, function: Function) -> None:
        super().__init__()
        self.results = [(function.name, variable.name, variable.size) for variable in function.returns]

    def run(self, cta, path) -> None:
        if not path.stack:
            cta.retire(path)
            return
        place = 0
        for function, name, size in self.results:
            copy_local(cta, path.mask, cta.program.local_offsets[function, name], place, size)
            place += size
        *rest, target = path.stack
        path.stack = tuple(rest)
        cta.jump(path, target)


class Call(Control):
    """A call; `callee` is a function name, or None when `address` (a slot) holds one per lane."""

    def __init__(
        self, caller: Function, callee: str | None, address: int, arguments: list[str], results: list[str]
    ) -> None:
        super().__init__()
        self.caller, self.callee, self.address, self.arguments = caller.name, callee, address, arguments
        self.after = _take_results(caller, results) if results else None

    def run(self, cta, path) -> None:
        if self.callee is not None:
            self._enter(cta, path, path.mask, self.callee, last=True)
            return
        addresses = cta.frame[self.address].astype(np.int64)
        functions = {FUNCTION_BASE + entry: name for name, entry in cta.program.function_entries.items()}
        rest = path.mask
        for address in np.unique(addresses[path.mask.numbers]):
            if int(address) not in functions:
                raise InvalidAddress(f"call of {int(address):#x}, which is no function", lanes=rest.numbers)
            lanes, others = rest.split_by(addresses == address)
            self._enter(cta, path, lanes, functions[int(address)], last=others is None)
            rest = others

    def _refuse_recursion(self, cta, path, name: str) -> None:
        """A function has one set of registers: calls through pointers may not lead back into one that is running."""
        segments = cta.program.segments
        if name == self.caller or any(segments[index].function == name for index in path.stack):
            raise UnsupportedInstruction(f"recursive call of {name}: recursion is not supported")

    def _enter(self, cta, path, lanes: Mask, name: str, last: bool) -> None:
        function = cta.program.module.functions[name]
        self._refuse_recursion(cta, path, name)
        if len(function.parameters) != len(self.arguments):
            raise InvalidAddress(f"{name} is called with {len(self.arguments)} arguments", lanes=lanes.numbers)
        offsets = cta.program.local_offsets
        for argument, parameter in zip(self.arguments, function.parameters):
            copy_local(cta, lanes, offsets[self.caller, argument], offsets[name, parameter.name], parameter.size)
        stack = (*path.stack, self.next)
        entry = cta.program.function_entries[name]
        if last:
            path.mask, path.stack = lanes, stack
            cta.jump(path, entry)
        else:
            cta.fork(path, lanes, entry, stack)


def _take_results(caller: Function, results: list[str]) -> Run:
    """What runs on return: the results move from the common area to the caller's variables."""
    sizes = [(name, caller.variables[name].size) for name in results]

    def take(f, m, cta) -> None:
        place = 0
        for name, size in sizes:
            copy_local(cta, m, place, cta.program.local_offsets[caller.name, name], size)
            place += size

    return take


def copy_local(cta, mask: Mask, source: int, target: int, size: int) -> None:
    """Copies `size` bytes of each active thread's local memory."""
    rows = cta.local.data.reshape(cta.lanes, -1)
    rows[mask.index, target : target + size] = rows[mask.index, source : source + size]


@instruction("bra")
def decode_branch(inst: Instruction, b: Binder) -> Decoded:
    mods = b.modifiers(inst)
    mods.drop("uni")
    mods.done()
    (target,) = inst.operands
    if not isinstance(target, Symbol):
        raise UnsupportedInstruction("bra needs a label")
    return Branch(target.name)


@instruction("brx")
def decode_indexed_branch(inst: Instruction, b: Binder) -> Decoded:
    mods = b.modifiers(inst)
    mods.one_of("idx")
    mods.drop("uni")
    mods.done()
    index, table = inst.operands
    return IndexedBranch(b.read(index, "u32"), b.function.branch_targets[table.name])


@instruction("exit")
def decode_exit(inst: Instruction, b: Binder) -> Decoded:
    b.modifiers(inst).done()
    return Exit()


@instruction("ret")
def decode_return(inst: Instruction, b: Binder) -> Decoded:
    mods = b.modifiers(inst)
    mods.drop("uni")
    mods.done()
    return Return(b.function)


@instruction("call")
def decode_call(inst: Instruction, b: Binder) -> Decoded:
    mods = b.modifiers(inst)
    mods.drop("uni")
    mods.done()
    results, callee, arguments = _call_operands(inst.operands)
    result_names, names = [_parameter_name(r) for r in results], [_parameter_name(a) for a in arguments]
    if isinstance(callee, Register):
        return Call(b.function, None, b.read(callee, "u64"), names, result_names)
    name = b.module.aliases.get(callee.name, callee.name)
    function = b.module.functions.get(name)
    if function is None or not function.has_body:
        if name in BUILTINS:
            return BUILTINS[name](b.function, names, result_names)
        raise UnsupportedInstruction(f"{name} has no body in this PTX, and the emulator has no built-in of that name")
    b.want(name)
    return Call(b.function, name, 0, names, result_names)


def _call_operands(operands: tuple[Operand, ...]) -> tuple[tuple, Operand, tuple]:
    rest = list(operands)
    results = rest.pop(0).items if isinstance(rest[0], Arguments) else ()
    callee = rest.pop(0)
    arguments = rest.pop(0) if rest and isinstance(rest[0], (Arguments, Immediate)) else ()
    arguments = arguments.items if isinstance(arguments, Arguments) else (arguments,) if arguments else ()
    return results, callee, arguments


def _parameter_name(operand: Operand) -> str:
    if isinstance(operand, Symbol):
        return operand.name
    raise UnsupportedInstruction("call arguments must be .param variables, not registers or constants")
