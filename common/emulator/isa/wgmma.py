"""`wgmma`: matrix products of a warpgroup (PTX ISA 9.7.15.5 to 9.7.15.7).

Nothing waits but `wait_group`: `mma_async` is issued by each warp for itself and starts when the last of the warpgroup
has issued it (`machine.warpgroups`). Shared memory and registers of A are read when the operation runs; descriptors,
scale-d and the metadata of a sparse A at issue.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import numpy as np

from common.emulator.faults import Fault, UnsupportedInstruction
from common.emulator.hardware.multiplicands import ELEMENT_BYTES
from common.emulator.isa.async_issue import Issuer, WaitGroups, constant_operand
from common.emulator.isa.binder import Binder, Modifiers
from common.emulator.isa.fragments import read_all, whole_warps, write_all
from common.emulator.isa.registry import Decoded, Run, collective, instruction
from common.emulator.machine.async_groups import WgmmaGroups
from common.emulator.machine.events import Operation
from common.emulator.machine.mask import WARP, Mask
from common.emulator.machine.scoreboard import registers_of
from common.emulator.machine.warpgroups import Inputs, Warpgroups, Wgmma
from common.emulator.machine.wgmma import A_REGISTERS, ROW_BYTES, WARPGROUP, WgmmaForm, WgmmaPlan
from common.emulator.ptx.module import Instruction, Operand, Vector

if TYPE_CHECKING:
    from common.emulator.machine.thread_block import Path, ThreadBlock

_FP8 = ("e4m3", "e5m2")
_INTEGERS = ("s8", "u8")
_TYPES: tuple[tuple[tuple[str, ...], tuple[str, ...]], ...] = (
    # A and B, D
    (("f16",), ("f16", "f32")),
    (("bf16",), ("f32",)),
    (("tf32",), ("f32",)),
    (_FP8, ("f16", "f32")),
    (_INTEGERS, ("s32",)),
    (("b1",), ("s32",)),
)
_MOST_COLUMNS = 256


@instruction("wgmma")
def decode_wgmma(inst: Instruction, b: Binder) -> Decoded:
    if b.module.target != "sm_90a":
        raise UnsupportedInstruction(f"wgmma exists on sm_90a alone, not on {b.module.target}")
    mods = b.modifiers(inst)
    what = mods.one_of("mma_async", "fence", "commit_group", "wait_group")
    sparse = what == "mma_async" and mods.take("sp")
    mods.one_of("sync")
    mods.one_of("aligned")
    if what == "mma_async":
        return _decode_mma(inst, b, mods, sparse)
    mods.done()
    if what == "wait_group":
        (latest,) = inst.operands
        return WaitWgmma(WgmmaGroups, constant_operand(latest))
    if inst.operands:
        raise UnsupportedInstruction(f"wgmma.{what} takes no operands")
    return collective(_fence if what == "fence" else _commit)


def _fence(f: list, m: Mask, cta: ThreadBlock) -> None:
    """Orders accesses to registers, which are in order here; that it is there at all is checked."""
    cta.unit(Warpgroups).fenced[m.warps] = True


def _commit(f: list, m: Mask, cta: ThreadBlock) -> None:
    cta.unit(WgmmaGroups).commit(m)


class WaitWgmma(WaitGroups):
    """`wgmma.wait_group`."""

    def run(self, cta: ThreadBlock, path: Path) -> None:
        if cta.whole_warps(path):
            super().run(cta, path)

    def reason(self, cta: ThreadBlock, pending: list[Operation]) -> str:
        missing = cta.unit(Warpgroups).missing(pending)
        if missing is None:
            return f"for {len(pending)} wgmma of its groups"
        return f"for the other warps of warpgroup {missing.group} to execute {missing.plan.form}"


# -- mma_async -----------------------------------------------------------------------------------------------------


def _decode_mma(inst: Instruction, b: Binder, mods: Modifiers, sparse: bool) -> Decoded:
    form = _form(mods, sparse)
    target, a, descriptor, *rest = inst.operands
    in_registers = isinstance(a, Vector)
    d_slots = tuple(write_all(b, target, "u32"))
    a_slots = tuple(read_all(b, a, "u32")) if in_registers else ()
    if len(d_slots) != form.registers or len(a_slots) not in (0, A_REGISTERS):
        raise UnsupportedInstruction(
            f"{form} takes {form.registers} registers of D and {A_REGISTERS} of A: "
            f"{len(d_slots)} and {len(a_slots)} are not supported"
        )
    metadata, selector = _take_metadata(b, rest, form)
    if not rest:
        raise UnsupportedInstruction(f"`{inst.text}`: scale-d is missing")
    keep = b.read(rest.pop(0), "pred")
    negate, a_mn_major, b_mn_major = _constants(inst, form, in_registers, rest)
    registers_d, registers_a = (frozenset(registers_of(part)) for part in ((target,), (a,) if in_registers else ()))
    plan = WgmmaPlan(form, d_slots, a_slots, registers_d, registers_a, a_mn_major, b_mn_major, negate, selector)
    slots = (None if in_registers else b.read(a, "u64"), b.read(descriptor, "u64"), keep, metadata)
    return collective(_issue(inst, plan, slots))


def _form(mods: Modifiers, sparse: bool) -> WgmmaForm:
    """Checks and consumes all modifiers."""
    saturate = mods.take("satfinite")
    bits = mods.take("popc")
    if bits:
        mods.one_of("and")
    shape, *types = mods.rest()
    size = re.fullmatch(r"m64n(\d+)k(\d+)", shape)
    if size is None or len(types) != 3:
        raise UnsupportedInstruction(f"`{mods.opcode}` is not a form of wgmma that is supported")
    form = WgmmaForm(int(size[1]), int(size[2]), *types, sparse, saturate)
    if not _exists(form) or bits != (form.a == "b1"):
        raise UnsupportedInstruction(f"`{mods.opcode}` is not a form of wgmma that exists")
    return form


def _exists(form: WgmmaForm) -> bool:
    integers = form.d == "s32"
    step = 16 if integers and form.n > 32 else 8
    if form.n % step or not step <= form.n <= _MOST_COLUMNS:
        return False
    k = 8 * ROW_BYTES if form.a == "b1" else ROW_BYTES // ELEMENT_BYTES.get(form.a, 1)
    if form.k != k * (2 if form.sparse else 1):
        return False
    if (form.saturate and form.a not in _INTEGERS) or (form.sparse and form.a == "b1"):
        return False
    return any(form.a in types and form.b in types and form.d in results for types, results in _TYPES)


def _take_metadata(b: Binder, rest: list[Operand], form: WgmmaForm) -> tuple[int | None, int]:
    """Takes sp-meta and sp-sel from the operands: the slot of one, the value of the other."""
    if not form.sparse:
        return None, 0
    if len(rest) < 2:
        raise UnsupportedInstruction(f"{form} needs sp-meta and sp-sel")
    slot, selector = b.read(rest.pop(0), "u32"), constant_operand(rest.pop(0))
    if selector not in ((0, 1) if form.a in ELEMENT_BYTES else (0,)):
        raise UnsupportedInstruction(f"sparsity selector {selector} of {form} is undefined")
    return slot, selector


def _constants(inst: Instruction, form: WgmmaForm, in_registers: bool, rest: list[Operand]) -> tuple[bool, bool, bool]:
    """imm-scale-a, imm-scale-b, imm-trans-a and imm-trans-b: whether to negate, whether A and B are MN-major."""
    values = [constant_operand(operand) for operand in rest]
    scales = 0 if form.d == "s32" else 2
    transposes = (1 if in_registers else 2) if form.a in ("f16", "bf16") else 0
    if len(values) != scales + transposes:
        raise UnsupportedInstruction(f"`{inst.text}`: {form} takes {scales + transposes} constants after scale-d")
    signs, majors = values[:scales], values[scales:]
    if not set(signs) <= {1, -1} or not set(majors) <= {0, 1}:
        raise UnsupportedInstruction(f"`{inst.text}`: imm-scale is 1 or -1, imm-trans is 0 or 1")
    majors = [0] * (2 - len(majors)) + majors
    return signs.count(-1) == 1, bool(majors[0]), bool(majors[1])


def _issue(inst: Instruction, plan: WgmmaPlan, slots: tuple[int | None, int, int, int | None]) -> Run:
    issuer = Issuer(inst)
    a, b, keep, metadata = slots

    def issue(f, m, cta) -> None:
        whole_warps(m)
        warpgroups = cta.unit(Warpgroups)
        for warp in m.warps.tolist():
            lanes = slice(warp * WARP, (warp + 1) * WARP)
            inputs = Inputs(
                None if a is None else _uniform(f[a][lanes], warp),
                _uniform(f[b][lanes], warp),
                _uniform(f[keep][lanes], warp),
            )
            wgmma = warpgroups.join(plan, warp, inputs, None if metadata is None else f[metadata][lanes])
            if wgmma.operation is None:
                wgmma.operation = _prepare(issuer, cta, wgmma)
            _add(cta, wgmma, lanes)
            if wgmma.joined.all():
                _start(cta, wgmma)

    return issue


def _uniform(values: np.ndarray, warp: int) -> int | bool:
    """The value that all threads of a warp must give."""
    first = values.item(0)
    if (values != first).any():
        raise Fault(
            "the threads of a warp give different descriptors or scale-d for wgmma",
            lanes=range(warp * WARP, (warp + 1) * WARP),
        )
    return first


def _prepare(issuer: Issuer, cta: ThreadBlock, wgmma: Wgmma) -> Operation:
    lanes = np.zeros(cta.lanes, bool)
    lanes[wgmma.group * WARPGROUP : (wgmma.group + 1) * WARPGROUP] = True
    return issuer.prepare(cta, Mask(lanes), "wgmma", [wgmma.run], wgmma)


def _add(cta: ThreadBlock, wgmma: Wgmma, lanes: slice) -> None:
    """The operation belongs to the warp's next group."""
    members = np.zeros(cta.lanes, bool)
    members[lanes] = True
    cta.unit(WgmmaGroups).add(wgmma.operation, members)


def _start(cta: ThreadBlock, wgmma: Wgmma) -> None:
    wgmma.operation.after = tuple(wgmma.predecessors)
    cta.machine.events.issue(wgmma.operation)
    counters = cta.machine.counters
    counters.events[str(wgmma.plan.form)] += 1
    counters.bytes["MMA shared read"] += wgmma.plan.shared_bytes
    cta.activity()
