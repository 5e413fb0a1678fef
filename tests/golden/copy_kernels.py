"""Shared by the kernels of asynchronous copies: filling and dumping shared memory, waiting for an mbarrier, data."""

from __future__ import annotations

import numpy as np

from tests.golden.case import Buffer, random_bits

GLOBAL = 1 << 18  # bytes of global memory
REGION = 24 << 10  # bytes of shared memory; an mbarrier follows them
BLOCK = 256

SHARED_DECLARATION = ".extern .shared .align 1024 .b8 memory[];\n"
SHARED_BYTES = REGION + 16

START = f"""
.reg .b32 %thread, %rank, %base, %bar, %at, %end, %x, %y, %offset, %bytes, %tries, %said, %c<5>, %v<4>;
.reg .b64 %map, %g, %o; .reg .pred %p, %q, %first;
mov.u32 %thread, %tid.x; setp.eq.u32 %first, %thread, 0; mov.u32 %base, memory; add.u32 %bar, %base, {REGION};
mad.lo.u32 %at, %thread, 16, %base; add.u32 %end, %base, {REGION}; mov.u32 %rank, %cluster_ctarank; mov.u32 %said, 0;
ld.param.u32 %offset, [offset]; add.u32 %offset, %offset, %base;
"""
FILL = f"""
mov.b32 %x, 0xA5A5A5A5;
FILL: st.shared.v4.b32 [%at], {{%x, %x, %x, %x}}; add.u32 %at, %at, {16 * BLOCK}; setp.lt.u32 %p, %at, %end;
@%p bra FILL;
"""
_OWN_PART = f"mul.wide.u32 %o, %rank, {REGION}; add.u64 %g, %g, %o;"
_OWN_ROW = "mul.wide.u32 %o, %thread, 16; add.u64 %g, %g, %o;"
_READ_LOOP = f"""
FILL: ld.global.v4.b32 {{%v0, %v1, %v2, %v3}}, [%g]; st.shared.v4.b32 [%at], {{%v0, %v1, %v2, %v3}};
add.u32 %at, %at, {16 * BLOCK}; add.u64 %g, %g, {16 * BLOCK}; setp.lt.u32 %p, %at, %end; @%p bra FILL;
"""
_SOURCE = "ld.param.u64 %g, [source]; cvta.to.global.u64 %g, %g;"
READ_SOURCE = f"{_SOURCE} {_OWN_ROW} {_READ_LOOP}"
READ_SOURCE_BY_RANK = f"{_SOURCE} {_OWN_PART} {_OWN_ROW} {_READ_LOOP}"
_OUT = "ld.param.u64 %g, [out]; cvta.to.global.u64 %g, %g; mad.lo.u32 %at, %thread, 16, %base;"
_DUMP_LOOP = f"""
DUMP: ld.shared.v4.b32 {{%v0, %v1, %v2, %v3}}, [%at]; st.global.v4.b32 [%g], {{%v0, %v1, %v2, %v3}};
add.u32 %at, %at, {16 * BLOCK}; add.u64 %g, %g, {16 * BLOCK}; setp.lt.u32 %p, %at, %end; @%p bra DUMP;
"""
DUMP = f"{_OUT} {_OWN_ROW} {_DUMP_LOOP}"
DUMP_BY_RANK = f"{_OUT} {_OWN_PART} {_OWN_ROW} {_DUMP_LOOP}"
_TRIES = 2000


def wait(label: str, parity: int, bit: int) -> str:
    """Waits, not for ever; sets `bit` of %said when the phase has completed."""
    return f"""
mov.u32 %tries, 0;
{label}: mbarrier.try_wait.parity.shared::cta.b64 %p, [%bar], {parity}; @%p bra {label}_OVER;
add.u32 %tries, %tries, 1; setp.lt.u32 %q, %tries, {_TRIES}; @%q bra {label};
{label}_OVER: selp.u32 %x, {bit}, 0, %p; or.b32 %said, %said, %x;
"""


def numbered(size: int, first: int) -> np.ndarray:
    """uint8 (size,): 32-bit words that count up from `first`, so that each can be told from the others."""
    return (np.arange(size // 4, dtype=np.uint32) + np.uint32(first)).view(np.uint8)


GLOBAL_WORDS = Buffer(numbered(GLOBAL, 0x1000_0000))
SHARED_WORDS = Buffer(numbered(REGION, 0x2000_0000))
EMPTY = Buffer(np.zeros(REGION, np.uint8))
FLAGS = Buffer(np.zeros(16, np.uint8))

_SPECIAL_32 = (
    *(0, 0x80000000, 1, 0x80000001, 0x7FFFFF, 0x807FFFFF, 0x800000, 0x3F800000, 0x3F800FFF, 0x3F801000, 0x3F801001),
    *(0x3F803000, 0x3F802FFF, 0xBF801000, 0x7F7FFFFF, 0x7F800000, 0xFF800000, 0x7FC00000, 0x7F800001, 0xFFC12345),
    *(0x7FFFFFFF, 0x7F802000, 0x1000, 0x2000, 0x7F7FF000, 0x7F7FE000, 0xFF7FFFFF, 0x7FF000, 0x80001FFF, 0x33333333),
    *(0x3F805000, 0xFFFFFFFF, 0x80000002, 0x8000, 0xFFFF),
)
_SPECIAL_16 = (
    *(0, 0x8000, 1, 0x8001, 0x3FF, 0x400, 0x7F, 0x80, 0x3C00, 0xBC00, 0x7BFF, 0xFBFF, 0x7C00, 0xFC00, 0x7E00, 0x7C01),
    *(0x7FFF, 0xFFFF, 0x7F80, 0xFF80, 0x7FC0, 0x7F81, 0x7F7F, 0x3F80, 0xBF80, 0x8400, 0xFE01),
)
_MANTISSA = {"f16": 10, "bf16": 7, "f32": 23, "f64": 52}


def special_values(kind: str, count: int) -> np.ndarray:
    """uint8: zeros, subnormals, infinities, NaNs, ties of TF32's rounding, extremes of integers; then numbers near 1;
    then random bits. The special values repeat every 64 elements. `kind`: u32, u64, f16, bf16, f32 or f64.
    """
    width = {"bf16": 16}.get(kind) or int(kind[1:])
    values = random_bits(width + 40, count)
    special = np.array(_SPECIAL_16 if width == 16 else _SPECIAL_32, np.uint64)
    if width == 64:
        special = special << np.uint64(32) | special
    values[: 16 * 64] = np.tile(np.resize(special, 64), 16)
    if kind in _MANTISSA:
        mantissa = _MANTISSA[kind]
        near_one = values[16 * 64 : 24 * 64]
        exponent = np.uint64((1 << width - mantissa - 2) - 2) + (near_one >> np.uint64(60)) % np.uint64(3)
        near_one[:] = exponent << np.uint64(mantissa) | near_one & np.uint64((1 << mantissa) - 1)
    return values.astype(f"u{width // 8}").view(np.uint8)
