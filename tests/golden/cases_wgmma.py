"""wgmma with both operands in shared memory, for its layouts, which tcgen05.mma shares. All sums are exact."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from common.emulator.hardware.operand_layout import PERIOD
from common.emulator.hardware.smem_descriptor import SmemDescriptor
from common.emulator.hardware.swizzle import Swizzle
from tests.golden.case import HEADER, Buffer, Case, Dice, Result
from tests.golden.copy_kernels import SHARED_DECLARATION
from tests.golden.patterns import pattern

M, N, THREADS = 64, 64, 128
IMAGE = 32 << 10  # bytes of shared memory that the operands may lie in
_REGISTERS = M * N // THREADS
_K_BYTES = 32  # of one instruction
_CODES = {Swizzle.NONE: 0, Swizzle.B128: 1, Swizzle.B64: 2, Swizzle.B32: 3}  # bits 62-63 of a Hopper descriptor
_SPANS = {Swizzle.NONE: 16, Swizzle.B32: 32, Swizzle.B64: 64, Swizzle.B128: 128}
_ELEMENTS = {"f16": 2, "bf16": 2, "tf32": 4, "e4m3": 1, "e5m2": 1}
_PATTERNS = {"f16": "f16x2", "bf16": "bf16x2", "tf32": "tf32", "e4m3": "e4m3x4", "e5m2": "e5m2x4"}
_PAIRS = (
    ("f16", "f16"),
    ("bf16", "bf16"),
    ("tf32", "tf32"),
    *((a, b) for a in ("e4m3", "e5m2") for b in ("e4m3", "e5m2")),
)


@dataclass(frozen=True)
class Operand:
    """A multiplicand: its type, its rows (of A, or of B^T), the order of its elements, and where it is."""

    kind: str
    rows: int
    mn_major: bool
    descriptor: SmemDescriptor


def _hopper_bits(d: SmemDescriptor) -> int:
    return d.address >> 4 | d.lbo >> 4 << 16 | d.sbo >> 4 << 32 | d.base_offset << 49 | _CODES[d.swizzle] << 62


def _kernel(name: str, a: str, b: str, majors: str) -> str:
    k = _K_BYTES // _ELEMENTS[a]
    registers = ", ".join(f"%d{place}" for place in range(_REGISTERS))
    transposed = f", {majors}" if _ELEMENTS[a] == 2 else ""
    stores = "".join(f"st.global.f32 [%g+{4 * THREADS * place}], %d{place};" for place in range(_REGISTERS))
    parameters = ", ".join(f".param .u32 {name_}" for name_ in ("a_low", "a_high", "b_low", "b_high"))
    return f"""
.visible .entry {name}({parameters}, .param .u64 image, .param .u64 out)
{{ .reg .b32 %thread, %base, %at, %end, %low, %high, %v<4>; .reg .b64 %g, %o, %a, %b; .reg .pred %p;
.reg .f32 %d<{_REGISTERS}>;
mov.u32 %thread, %tid.x; mov.u32 %base, memory; mad.lo.u32 %at, %thread, 16, %base; add.u32 %end, %base, {IMAGE};
ld.param.u64 %g, [image]; cvta.to.global.u64 %g, %g; mul.wide.u32 %o, %thread, 16; add.u64 %g, %g, %o;
FILL: ld.global.v4.b32 {{%v0, %v1, %v2, %v3}}, [%g]; st.shared.v4.b32 [%at], {{%v0, %v1, %v2, %v3}};
add.u32 %at, %at, {16 * THREADS}; add.u64 %g, %g, {16 * THREADS}; setp.lt.u32 %p, %at, %end; @%p bra FILL;
fence.proxy.async; bar.sync 0; shr.u32 %base, %base, 4;
ld.param.u32 %low, [a_low]; add.u32 %low, %low, %base; ld.param.u32 %high, [a_high]; mov.b64 %a, {{%low, %high}};
ld.param.u32 %low, [b_low]; add.u32 %low, %low, %base; ld.param.u32 %high, [b_high]; mov.b64 %b, {{%low, %high}};
wgmma.fence.sync.aligned;
wgmma.mma_async.sync.aligned.m64n{N}k{k}.f32.{a}.{b} {{{registers}}}, %a, %b, 0, 1, 1{transposed};
wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0;
ld.param.u64 %g, [out]; cvta.to.global.u64 %g, %g; mul.wide.u32 %o, %thread, 4; add.u64 %g, %g, %o; {stores} ret; }}
"""


def _kernels() -> dict[str, str]:
    found = {}
    for a, b in _PAIRS:
        for majors in ("0, 0", "0, 1", "1, 0", "1, 1") if _ELEMENTS[a] == 2 else ("0, 0",):
            name = _kernel_name(a, b, majors)
            found[name] = _kernel(name, a, b, majors)
    return found


def _kernel_name(a: str, b: str, majors: str) -> str:
    return f"{a}_{b}_{majors.replace(', ', '')}"


_PTX = HEADER + SHARED_DECLARATION + "".join(_kernels().values())


def _descriptor(dice: Dice, kind: str, mn_major: bool, swizzle: Swizzle, canonical: bool) -> SmemDescriptor:
    """Canonical: strides as a densely packed tile has them, and a start on the pattern's boundary or a step of K.

    Otherwise strides of any 16 bytes without a swizzle, of whole patterns with one, and any line as a start.
    """
    while True:
        span = _SPANS[swizzle]
        if canonical:
            lbo, sbo, address = _packed_strides(swizzle, span, mn_major), 8 * span, PERIOD * dice.below(8)
            if swizzle is Swizzle.NONE:
                lbo, sbo = (8 * 16, 2 * 8 * 16) if dice.chance(50) else (8 * 16 * 8, 8 * 16)
            elif not mn_major:
                address += 32 * dice.below(span // 32)  # a step of K within the atom
            base_offset = 0
        else:
            unit = 16 if swizzle is Swizzle.NONE else 8 * span
            lbo, sbo = unit * dice.between(1, 8), unit * dice.between(1, 4)
            address = (16 if swizzle is Swizzle.NONE else 128) * dice.below(64)
            base_offset = 0 if swizzle is Swizzle.NONE else dice.below(8)
        if address + _reach(kind, mn_major, span, lbo, sbo) <= IMAGE:
            return SmemDescriptor(address, lbo, sbo, base_offset, swizzle)


def _reach(kind: str, mn_major: bool, span: int, lbo: int, sbo: int) -> int:
    """Bytes from the start to the end of an operand, if nothing were swizzled: that moves no byte to another line.

    Not taken from the code under test, so that its mistakes do not choose other cases.
    """
    ks, wide = _K_BYTES // _ELEMENTS[kind], span // 16
    if not mn_major:
        return 7 * span + (M // 8 - 1) * sbo + (lbo if wide == 1 else 16) + 16
    last = M * _ELEMENTS[kind] // 16 - 1
    if wide == 1:
        return 7 * 16 + (ks // 8 - 1) * lbo + last * sbo + 16
    return 7 * span + (ks // 8 - 1) * sbo + last % wide * 16 + last // wide * lbo + 16


def _packed_strides(swizzle: Swizzle, span: int, mn_major: bool) -> int:
    """LBO: for MN-major operands the distance of atoms along the rows, for swizzled K-major ones it does not count."""
    return 16 * span if mn_major and swizzle is not Swizzle.NONE else 16


def cases() -> Iterator[Case]:
    dice = Dice(13)
    for a_kind, b_kind in _PAIRS:
        orders = (False, True) if _ELEMENTS[a_kind] == 2 else (False,)
        for a_mn in orders:
            for b_mn in orders:
                for a_swizzle in _CODES:
                    for b_swizzle in _CODES if _ELEMENTS[a_kind] == 2 else (a_swizzle, dice.pick(tuple(_CODES))):
                        for canonical in (True, False):
                            a = Operand(a_kind, M, a_mn, _descriptor(dice, a_kind, a_mn, a_swizzle, canonical))
                            b = Operand(b_kind, N, b_mn, _descriptor(dice, b_kind, b_mn, b_swizzle, canonical))
                            yield _case(a, b, canonical)


def _case(a: Operand, b: Operand, canonical: bool) -> Case:
    bits = [_hopper_bits(operand.descriptor) for operand in (a, b)]
    words = [part for number in bits for part in (number & 0xFFFF_FFFF, number >> 32)]
    # Both operands may use all of the image; when their types differ, their codes mean numbers in either.
    image = np.resize(pattern(f"exact {_PATTERNS[a.kind]}:31"), IMAGE // 4).view(np.uint8)
    out = np.zeros(4 * M * N, np.uint8)
    majors = f"{int(a.mn_major)}, {int(b.mn_major)}"
    order = {False: "K", True: "MN"}
    name = (
        f"{'canonical' if canonical else 'free'} {a.kind} {order[a.mn_major]} {a.descriptor.swizzle.name} "
        f"{b.kind} {order[b.mn_major]} {b.descriptor.swizzle.name} {bits[0]:#x} {bits[1]:#x}"
    )
    return Case(
        name,
        _PTX,
        _kernel_name(a.kind, b.kind, majors),
        (*words, Buffer(image), Buffer(out)),
        (Result("accumulators", 5, 0, 4 * M * N),),
        block=THREADS,
        shared_bytes=IMAGE,
    )
