"""Straight-line code rearranged so that NumPy does more at once.

Unrolled loops are long runs of instructions that differ in their registers alone: 64 `ex2` of one tile row, say. Those
that do not depend on one another become one *group*, decoded once with a bundle of registers for each operand and
executed by one NumPy call on (registers, lanes). To find groups, instructions change places as far as their registers
allow. Only lane-wise ones do (`isa.registry`): what touches memory, other lanes or other machinery keeps its order, and
nothing can see a register in between.

Registers that a group writes get neighbouring rows in the frame, so that bundles are views (`FrameLayout.settle`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from heapq import heapify, heappop, heappush
from itertools import islice

from common.emulator.isa.binder import Binder, FrameLayout, ImmediateBundle, RegisterBundle
from common.emulator.isa.registry import Decoder, Run, decoder_of, is_lanewise
from common.emulator.machine.scoreboard import registers_of
from common.emulator.ptx.module import Immediate, Instruction, Operand, Pair, Register, Vector

MOST = 64  # instructions of a group: more would leave the cache
GATHERING = 1  # instructions that take as long as collecting the registers of one operand
# Instructions whose literals are plain values: those of a group may have different ones.
_FREE_LITERALS = frozenset(("add", "sub", "mul", "mad", "fma", "min", "max", "setp", "selp", "mov", "and", "or", "xor"))


@dataclass
class Node:
    """An instruction of a segment: what must come before it, and what kind of group it can be part of, if any.

    `op` is its own closure, `lanewise` says that it can run in a window.
    """

    inst: Instruction
    op: Run
    lanewise: bool
    kind: Hashable
    waits_for: int = 0
    successors: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Group:
    """Nodes that are executed together."""

    nodes: tuple[Node, ...]


def make_nodes(ops: Sequence[Run], instructions: Sequence[Instruction], fixed: set[int]) -> list[Node]:
    """The nodes of a segment with their dependences. `fixed`: positions that must be treated as not lane-wise."""
    nodes = [
        Node(inst, op, lanewise, _kind(inst) if lanewise else None)
        for place, (op, inst) in enumerate(zip(ops, instructions))
        for lanewise in [place not in fixed and is_lanewise(inst)]
    ]
    writer: dict[int, int] = {}
    readers: defaultdict[int, list[int]] = defaultdict(list)
    last_fixed = -1
    for place, node in enumerate(nodes):
        reads, writes = _effects(node)
        before = {writer[register] for register in reads | writes if register in writer}
        before.update(reader for register in writes for reader in readers[register])
        if not node.lanewise:
            before.add(last_fixed)
            last_fixed = place
        before -= {-1, place}
        node.waits_for = len(before)
        for other in before:
            nodes[other].successors.append(place)
        for register in reads:
            readers[register].append(place)
        for register in writes:
            writer[register] = place
            readers[register] = []
    return nodes


def _effects(node: Node) -> tuple[set[int], set[int]]:
    """The registers an instruction reads and writes. Under a guard, the old value of what it writes matters too."""
    everything = set(registers_of((*node.inst.operands, node.inst.guard)))
    if not node.lanewise:
        return everything, everything
    target, *sources = node.inst.operands
    writes = set(registers_of((target,)))
    return (everything if node.inst.guard else set(registers_of(sources))), writes


def _kind(inst: Instruction) -> Hashable:
    """Equal for instructions that can form a group; None for those that cannot."""
    if inst.guard is not None:
        return None
    free = inst.opcode in _FREE_LITERALS
    shapes = [_shape(operand, free) for operand in inst.operands]
    return None if None in shapes else (inst.opcode, inst.modifiers, *shapes)


def _shape(operand: Operand, free: bool) -> Hashable:
    if isinstance(operand, Register):
        return operand.type
    if isinstance(operand, Immediate):
        return ("literal", operand.kind) if free else operand
    if isinstance(operand, Vector | Pair):
        items = operand.items if isinstance(operand, Vector) else (operand.first, operand.second)
        shapes = tuple(_shape(item, free) for item in items)
        return None if None in shapes else (type(operand), *shapes)
    return None


def schedule(nodes: list[Node]) -> list[Group]:
    """All nodes in an order that respects their dependences: the oldest first, and with it all of its kind."""
    waits_for = [node.waits_for for node in nodes]
    ready = [place for place, count in enumerate(waits_for) if count == 0]
    heapify(ready)
    alike: defaultdict[Hashable, list[int]] = defaultdict(list)
    for place in ready:
        alike[nodes[place].kind].append(place)
    taken = [False] * len(nodes)
    groups = []
    while ready:
        first = heappop(ready)
        if taken[first]:
            continue
        kind = nodes[first].kind
        chosen = [first] if kind is None else sorted(alike.pop(kind))
        for place in chosen:
            taken[place] = True
            for successor in nodes[place].successors:
                waits_for[successor] -= 1
                if waits_for[successor] == 0:
                    heappush(ready, successor)
                    if nodes[successor].kind is not None:
                        alike[nodes[successor].kind].append(successor)
        rest = iter(nodes[place] for place in chosen)
        while part := tuple(islice(rest, MOST)):
            groups.append(Group(part))
    return groups


def settle_registers(groups: Iterable[Group], layout: FrameLayout) -> None:
    """Gives rows to the registers that groups, and long vectors, write."""
    for group in groups:
        target = group.nodes[0].inst.operands[:1]
        if len(group.nodes) > 1 or (target and isinstance(target[0], Vector)):
            for node in group.nodes:
                layout.settle(_registers_in(node.inst.operands[0]))


def _registers_in(operand: Operand) -> list[Register]:
    if isinstance(operand, Register):
        return [operand]
    if isinstance(operand, Vector):
        return [register for item in operand.items for register in _registers_in(item)]
    if isinstance(operand, Pair):
        return _registers_in(operand.first) + _registers_in(operand.second)
    return []


def decode_groups(groups: Iterable[Group], binder: Binder) -> tuple[list[Run], list[Instruction]]:
    """The closures to run one after another, and for each the (first) instruction it stands for.

    Neighbouring groups of lane-wise instructions make one closure, which looks for the window of its path once.
    """
    ops: list[Run] = []
    origins: list[Instruction] = []
    lanewise: list[Run] = []
    start: Instruction | None = None

    def close() -> None:
        if lanewise:
            ops.append(_windowed(list(lanewise)))
            origins.append(start)
            lanewise.clear()

    for group in groups:
        first = group.nodes[0]
        if not first.lanewise:
            close()
            ops.append(first.op)
            origins.append(first.inst)
            continue
        if not lanewise:
            start = first.inst
        for part in _evenly_spaced(group.nodes, binder.layout):
            lanewise += [part[0].op] if len(part) == 1 else _decode_together(part, binder)
    close()
    return ops, origins


def _windowed(ops: list[Run]) -> Run:
    def run(f, m, cta) -> None:
        window = cta.slot.window(m)
        if window is None:
            for op in ops:
                op(f, m, cta)
        else:
            every = window.every
            for op in ops:
                op(window, every, cta)

    return run


def _evenly_spaced(nodes: tuple[Node, ...], layout: FrameLayout) -> list[tuple[Node, ...]]:
    """Parts of a group whose destinations are evenly spaced rows."""
    parts: list[list[Node]] = []
    for node in nodes:
        if parts and _fits([*parts[-1], node], layout):
            parts[-1].append(node)
        else:
            parts.append([node])
    return [tuple(part) for part in parts]


def _fits(nodes: list[Node], layout: FrameLayout) -> bool:
    """Whether the last node goes on as the others have begun."""
    if len(nodes) > 3:
        nodes = nodes[-3:]
    columns = zip(*(_registers_in(node.inst.operands[0]) for node in nodes))
    return all(layout.spacing(column) is not None for column in columns)


def _decode_together(nodes: tuple[Node, ...], binder: Binder) -> list[Run]:
    instructions = [node.inst for node in nodes]
    operands = tuple(_bundle(column) for column in zip(*(inst.operands for inst in instructions)))
    together = replace(instructions[0], operands=operands)
    binder.prelude = []
    decode: Decoder = decoder_of(together)
    run = decode(together, binder)
    if len(nodes) <= GATHERING * len(binder.prelude):
        return [node.op for node in nodes]
    return [*binder.prelude, run]


def _bundle(operands: Sequence[Operand]) -> Operand:
    first = operands[0]
    if all(operand == first for operand in operands):
        return first
    if isinstance(first, Register):
        return RegisterBundle(first.name, first.type, first.index, members=tuple(operands))
    if isinstance(first, Immediate):
        return ImmediateBundle(first.value, first.kind, members=tuple(operands))
    if isinstance(first, Vector):
        return Vector(tuple(_bundle(items) for items in zip(*(operand.items for operand in operands))))
    return Pair(_bundle([operand.first for operand in operands]), _bundle([operand.second for operand in operands]))
