"""Fences, hints, and what stops or delays a thread (PTX ISA 9.7.9.15 to .18, 9.7.13.4, .11, .13 and 9.7.19).

The emulator's memory is sequentially consistent and its caches are invisible, except for that of tensor maps: other
fences and cache hints are checked for a form that exists and then change nothing.
"""

from __future__ import annotations

import re

import numpy as np

from common.emulator.faults import ProgramTrap, UnsupportedInstruction
from common.emulator.isa.binder import Binder
from common.emulator.isa.load_store import addresses_of, bind_address
from common.emulator.isa.registry import Control, Decoded, Run, instruction
from common.emulator.isa.tensormap import acquire_map
from common.emulator.machine.mask import WARP
from common.emulator.machine.memory import POISON, refuse_write
from common.emulator.ptx.module import Immediate, Instruction

LINE = 128  # bytes that discard and applypriority work on
POLICY = 0x1000_0000_0000_0000  # an opaque cache policy
_PROXIES = r"(alias|async(\.global|\.shared::cta|\.shared::cluster)?)"
_FENCES = re.compile(
    r"((sc|acq_rel|acquire|release)\.)?(cta|cluster|gpu|sys)"
    r"|(proxy\.async::generic\.)?acquire\.sync_restrict::shared::cluster\.cluster"
    r"|(proxy\.async::generic\.)?release\.sync_restrict::shared::cta\.cluster"
    r"|mbarrier_init\.release\.cluster"
    rf"|proxy\.{_PROXIES}"
    r"|proxy\.tensormap::generic\.(acquire|release)\.(cta|cluster|gpu|sys)"
)
_SHARED_PROXY_FENCES = ("proxy.async", "proxy.async.shared::cta", "proxy.async.shared::cluster")
_MEMORY_BARRIERS = re.compile(rf"cta|gl|sys|proxy\.{_PROXIES}")
_PREFETCHES = re.compile(r"((global|local)\.)?(L1|L2)|(global\.)?L2::evict_(last|normal)|((const|param)\.)?tensormap")
_EVICTION = r"L2::evict_(last|normal|first|unchanged)(\.L2::evict_(first|unchanged))?"
_POLICIES = re.compile(rf"range(\.global)?\.{_EVICTION}\.b64|fractional\.{_EVICTION}\.b64|cvt\.L2\.b64")


def _require(inst: Instruction, forms: re.Pattern) -> str:
    """The modifiers as one string; raises UnsupportedInstruction unless they are one of the forms."""
    text = ".".join(inst.modifiers)
    if not forms.fullmatch(text):
        raise UnsupportedInstruction(f"`{inst.opcode}.{text}` is not supported: no such form")
    return text


def _require_operands(inst: Instruction, *counts: int) -> None:
    if len(inst.operands) not in counts:
        raise UnsupportedInstruction(f"`{inst.opcode}` does not take {len(inst.operands)} operands in this form")


def _nothing(f: list, m, cta) -> None:
    """What an instruction without an effect here does."""


# -- memory ordering and caches ------------------------------------------------------------------------------------


@instruction("fence", "membar")
def decode_fence(inst: Instruction, b: Binder) -> Decoded:
    form = _require(inst, _FENCES if inst.opcode == "fence" else _MEMORY_BARRIERS)
    if not form.startswith("proxy.tensormap::generic.acquire"):
        _require_operands(inst, 0)
        return _fence_shared if form in _SHARED_PROXY_FENCES or "sync_restrict" in form else _nothing
    _require_operands(inst, 2)
    _require_line(inst)
    space, base, offset = bind_address(b, inst.operands[0], "generic")
    scope = inst.modifiers[-1]
    check = _touch(space, base, offset, 1)

    def acquire(f, m, cta) -> None:
        check(f, m, cta)
        for address in set(addresses_of(f, m, base, offset).tolist()):
            acquire_map(cta, address, scope)

    return acquire


def _fence_shared(f: list, m, cta) -> None:
    """`fence.proxy.async`, as far as shared memory is concerned."""
    for block in cta.cluster.blocks:
        block.shared.generic_writes.fence()


def _require_line(inst: Instruction) -> None:
    size = inst.operands[1]
    if not isinstance(size, Immediate) or int(size.value) != LINE:
        raise UnsupportedInstruction(f"the size operand of {inst.opcode} must be the constant {LINE}")


def _touch(space: str, base: int | None, offset: int, width: int) -> Run:
    """Checks that the addresses exist (and are aligned to `width` bytes), and does nothing else."""

    def run(f, m, cta) -> None:
        cta.locate(space, addresses_of(f, m, base, offset), width, m)

    return run


@instruction("prefetch", "prefetchu")
def decode_prefetch(inst: Instruction, b: Binder) -> Decoded:
    """A prefetch of an address that does not exist does nothing on the hardware either: no address is checked."""
    _require(inst, _PREFETCHES if inst.opcode == "prefetch" else re.compile("L1"))
    _require_operands(inst, 1)
    bind_address(b, inst.operands[0], "generic")
    return _nothing


@instruction("applypriority")
def decode_apply_priority(inst: Instruction, b: Binder) -> Decoded:
    space = _global_or_generic(inst, re.compile(r"(global\.)?L2::evict_normal"))
    return _touch(*bind_address(b, inst.operands[0], space), LINE)


@instruction("discard")
def decode_discard(inst: Instruction, b: Binder) -> Decoded:
    """The bytes hold an indeterminate value afterwards: they are poisoned."""
    space = _global_or_generic(inst, re.compile(r"(global\.)?L2"))
    space, base, offset = bind_address(b, inst.operands[0], space)

    def run(f, m, cta) -> None:
        addresses = addresses_of(f, m, base, offset)
        for piece in cta.locate(space, addresses, LINE, m):
            refuse_write(piece.region, m.numbers[piece.chosen], int(addresses[piece.chosen][0]))
            bytes_of_lines = piece.offsets[:, None] + np.arange(LINE)
            piece.region.data[bytes_of_lines] = POISON
        cta.activity()

    return run


def _global_or_generic(inst: Instruction, forms: re.Pattern) -> str:
    form = _require(inst, forms)
    _require_operands(inst, 2)
    _require_line(inst)
    return "global" if form.startswith("global") else "generic"


@instruction("createpolicy")
def decode_create_policy(inst: Instruction, b: Binder) -> Decoded:
    form = _require(inst, _POLICIES)
    target, *sources = inst.operands
    if form.startswith("range"):
        _require_operands(inst, 4)
        bind_address(b, sources[0], "generic")
        b.read(sources[1], "b32"), b.read(sources[2], "b32")
    elif form.startswith("fractional"):
        _require_operands(inst, 1, 2)
        for fraction in sources:
            b.read(fraction, "f32")
    else:
        _require_operands(inst, 2)
        b.read(sources[0], "b64")
    d, policy = b.write(target, "b64"), b.constant(POLICY, "b64")

    def run(f, m, cta) -> None:
        np.copyto(f[d], f[policy], where=m.where)

    return run


@instruction("griddepcontrol")
def decode_dependent_grids(inst: Instruction, b: Binder) -> Decoded:
    mods = b.modifiers(inst)
    what = mods.one_of("launch_dependents", "wait")
    mods.done()
    return PrerequisiteWait() if what == "wait" else DependentsRelease()


class DependentsRelease(Control):
    """`griddepcontrol.launch_dependents`: the first thread of a CTA that executes it speaks for all of them.

    Where another launch depends on this one, what comes after it is put off until that one has started, unless nothing
    else can run (not under `early`): so the dependent launch misses what it does not wait for.
    """

    def run(self, cta, path) -> None:
        machine = cta.machine
        machine.release_dependents(cta)
        if not machine.has_dependent or machine.schedule == "early":
            cta.advance(path)
            return
        cta.block(
            path,
            reason=lambda: "for the other CTAs to let dependent launches start",
            ready=lambda: machine.dependents_may_start,
            timed=True,
        )


class PrerequisiteWait(Control):
    """`griddepcontrol.wait`: until the launch before this one is complete, with all its memory operations."""

    def run(self, cta, path) -> None:
        before = cta.machine.prerequisite
        if before is None or before.complete:
            cta.advance(path)
            return
        cta.block(path, reason=lambda: "for the launch before this one to complete", ready=lambda: before.complete)


# -- threads -------------------------------------------------------------------------------------------------------


@instruction("activemask")
def decode_active_mask(inst: Instruction, b: Binder) -> Decoded:
    mods = b.modifiers(inst)
    mods.one_of("b32")
    mods.done()
    d = b.write(inst.operands[0], "b32")

    def run(f, m, cta) -> None:
        masks = np.packbits(m.lanes, bitorder="little").view("<u4")
        np.copyto(f[d], np.repeat(masks, WARP), where=m.where)

    return run


@instruction("trap", "brkpt")
def decode_trap(inst: Instruction, b: Binder) -> Decoded:
    """Without a debugger a breakpoint ends the kernel with an error, as `trap` does."""
    b.modifiers(inst).done()
    message = f"the program executed `{inst.opcode}`"

    def run(f, m, cta) -> None:
        raise ProgramTrap(message, lanes=m.numbers)

    return run


@instruction("nanosleep")
def decode_sleep(inst: Instruction, b: Binder) -> Decoded:
    mods = b.modifiers(inst)
    mods.one_of("u32")
    mods.done()
    return Sleep(b.read(inst.operands[0], "u32"))


class Sleep(Control):
    """The others go first, and the clocks move on by the time asked for."""

    def __init__(self, duration: int) -> None:
        super().__init__()
        self.duration = duration

    def run(self, cta, path) -> None:
        cta.machine.ticks += int(cta.frame[self.duration][path.mask.numbers].max())
        cta.give_way(path, lambda: "in nanosleep: it polls for something that does not happen")


@instruction("pmevent")
def decode_performance_event(inst: Instruction, b: Binder) -> Decoded:
    mods = b.modifiers(inst)
    is_mask = mods.take("mask")
    mods.done()
    (event,) = inst.operands
    if not isinstance(event, Immediate) or not 0 <= int(event.value) < (1 << 16 if is_mask else 16):
        raise UnsupportedInstruction("pmevent takes a constant from 0 to 15, or a 16-bit mask with .mask")
    return _nothing
