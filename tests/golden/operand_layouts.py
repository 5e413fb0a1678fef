"""Where wgmma finds the elements of a matrix in shared memory, by descriptor: `python -m tests.golden.operand_layouts`.

`cases_wgmma` compares products of layouts that programs use. This looks at the places themselves, for start addresses
and strides that no program uses and for the 64-byte rows of B that only sparse instructions have; the file that it
writes is what the emulator's operand layouts are tested against. Needs a Hopper GPU, as `capture` does.

Every element of the image is its own number, given in two launches as float16: its low digits, then its high digits.
The other operand picks single elements: the unit matrix as B shows A, and rows of a sparse A with one 1 show B.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from tests.golden.case import HEADER, Buffer, Case, Dice
from tests.golden.copy_kernels import SHARED_DECLARATION
from tests.golden.cuda_driver import Gpu

FILE = Path(__file__).parent / "h200" / "operand_layouts.npz"
KINDS = ("dense_k", "dense_mn", "sparse_k", "sparse_mn")
CHUNK = 16  # bytes
IMAGE = 96 << 10  # bytes; the other operand follows
PICKER = 4 << 10
THREADS = 128
PER_SWIZZLE = 14
SPANS = {0: 16, 6: 32, 4: 64, 2: 128}  # by the swizzle code of a Blackwell descriptor
_HOPPER_CODES = {0: 0, 6: 3, 4: 2, 2: 1}
_DIGIT = 1024
_PICKER_BITS = 128 >> 4 << 16 | 256 >> 4 << 32  # K-major without swizzle, 16 elements per row
_INDICES = ((0x4444_4444, (0, 1)), (0xEEEE_EEEE, (2, 3)))  # sparsity metadata: which two of four elements are stored


def _kernel(name: str, shape: str, operands: str, sparse: str, majors: str) -> str:
    registers = ", ".join(f"%d{place}" for place in range(8))
    opcode = f"wgmma.mma_async{'.sp' if sparse else ''}.sync.aligned.{shape}.f32.f16.f16"
    stores = "".join(f"st.global.f32 [%g+{4 * THREADS * place}], %d{place};" for place in range(8))
    parameters = ", ".join(f".param .u32 {word}" for word in ("low", "high", "metadata"))
    return f"""
.visible .entry {name}({parameters}, .param .u64 image, .param .u64 out)
{{ .reg .b32 %thread, %base, %at, %end, %low, %high, %metadata, %v<4>; .reg .b64 %g, %o, %matrix, %picker;
.reg .pred %p; .reg .f32 %d<8>;
mov.u32 %thread, %tid.x; mov.u32 %base, memory; mad.lo.u32 %at, %thread, 16, %base;
add.u32 %end, %base, {IMAGE + PICKER};
ld.param.u64 %g, [image]; cvta.to.global.u64 %g, %g; mul.wide.u32 %o, %thread, 16; add.u64 %g, %g, %o;
FILL: ld.global.v4.b32 {{%v0, %v1, %v2, %v3}}, [%g]; st.shared.v4.b32 [%at], {{%v0, %v1, %v2, %v3}};
add.u32 %at, %at, {16 * THREADS}; add.u64 %g, %g, {16 * THREADS}; setp.lt.u32 %p, %at, %end; @%p bra FILL;
fence.proxy.async; bar.sync 0; shr.u32 %base, %base, 4; ld.param.u32 %metadata, [metadata];
ld.param.u32 %low, [low]; add.u32 %low, %low, %base; ld.param.u32 %high, [high]; mov.b64 %matrix, {{%low, %high}};
add.u32 %low, %base, {IMAGE // 16 | _PICKER_BITS & 0xFFFF_FFFF}; mov.u32 %high, {_PICKER_BITS >> 32};
mov.b64 %picker, {{%low, %high}};
wgmma.fence.sync.aligned;
{opcode} {{{registers}}}, {operands},{sparse} 0, 1, 1, {majors};
wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0;
ld.param.u64 %g, [out]; cvta.to.global.u64 %g, %g; mul.wide.u32 %o, %thread, 4; add.u64 %g, %g, %o; {stores} ret; }}
"""


_PTX = (
    HEADER
    + SHARED_DECLARATION
    + _kernel("dense_k", "m64n16k16", "%matrix, %picker", "", "0, 0")
    + _kernel("dense_mn", "m64n16k16", "%matrix, %picker", "", "1, 0")
    + _kernel("sparse_k", "m64n16k32", "%picker, %matrix", " %metadata, 0,", "0, 0")
    + _kernel("sparse_mn", "m64n16k32", "%picker, %matrix", " %metadata, 0,", "0, 1")
)


def _packed(matrix: np.ndarray) -> np.ndarray:
    """(rows, 16) as core matrices of 8 rows by 8 elements, PICKER bytes of float16."""
    blocks = matrix.reshape(-1, 8, 2, 8).transpose(0, 2, 1, 3).astype(np.float16).reshape(-1)
    return np.concatenate((blocks, np.zeros(PICKER // 2 - blocks.size, np.float16)))


def descriptors(kind: str) -> list[tuple[int, int, int, int, int]]:
    """(start, LBO, SBO, base offset, swizzle code) to probe, in bytes."""
    dice = Dice(KINDS.index(kind) + 101)
    found = []
    for code in SPANS:
        for _ in range(PER_SWIZZLE):
            start, lbo, sbo = CHUNK * dice.below(160), CHUNK * dice.between(1, 96), CHUNK * dice.between(1, 96)
            found.append((start, lbo, sbo, dice.below(8) if code and dice.chance(50) else 0, code))
    return found


def _accumulators(gpu: Gpu, kind: str, descriptor: tuple[int, ...], metadata: int, digits: np.ndarray) -> np.ndarray:
    """The (64, 16) result for an image of float16 `digits`."""
    start, lbo, sbo, base_offset, code = descriptor
    bits = start >> 4 | lbo >> 4 << 16 | sbo >> 4 << 32 | base_offset << 49 | _HOPPER_CODES[code] << 62
    picker = np.eye(16) if kind.startswith("dense") else np.tile(np.eye(16), (4, 1))
    image = np.concatenate((digits, _packed(picker))).view(np.uint8)
    out = np.zeros(4 * 64 * 16, np.uint8)
    arguments = (bits & 0xFFFF_FFFF, bits >> 32, metadata, Buffer(image), Buffer(out))
    case = Case(kind, _PTX, kind, arguments, (), block=THREADS, shared_bytes=IMAGE + PICKER)
    values = gpu.run(case)[4].view(np.float32).reshape(8, THREADS)
    registers, threads = np.arange(8)[:, None], np.arange(THREADS)
    result = np.empty((64, 16), np.float32)
    row = 16 * (threads // 32) + threads % 32 // 4 + 8 * (registers // 2 % 2)
    result[row, 8 * (registers // 4) + 2 * (threads % 4) + registers % 2] = values
    return result


def probe(gpu: Gpu, kind: str, descriptor: tuple[int, ...]) -> np.ndarray:
    """Byte addresses of the elements, (rows, K): 64 by 16 of A, or 16 by 32 of B."""
    numbers = np.arange(IMAGE // 2)
    dense = kind.startswith("dense")
    places = np.zeros((64, 16) if dense else (16, 32), np.int64)
    for digits, weight in ((numbers % _DIGIT, 1), (numbers // _DIGIT, _DIGIT)):
        image = digits.astype(np.float16)
        if dense:
            places += weight * _accumulators(gpu, kind, descriptor, 0, image).astype(np.int64)
            continue
        for metadata, chosen in _INDICES:
            shown = _accumulators(gpu, kind, descriptor, metadata, image)[:16].astype(np.int64)
            stored = np.arange(16)
            places[:, 4 * (stored // 2) + np.array(chosen)[stored % 2]] += weight * shown.T
    return 2 * places


def main() -> None:
    gpu = Gpu()
    arrays = {kind: np.array([probe(gpu, kind, d) for d in descriptors(kind)], np.int32) for kind in KINDS}
    np.savez_compressed(FILE, **arrays)
    print({kind: array.shape for kind, array in arrays.items()}, FILE.stat().st_size, "bytes")


if __name__ == "__main__":
    main()
