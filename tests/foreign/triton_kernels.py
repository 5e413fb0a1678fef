"""Kernels in Triton, and the program that compiles all of `tests/foreign` that Triton compiles, without a GPU.

    python -m tests.foreign.triton_kernels

writes `tests/foreign/triton/NAME.ptx.gz` and `programs.json`, from which `triton_programs.launch` learns how each one
is launched. Triton is needed for this alone; see the README beside this file.
"""

import gzip
import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource
from triton.language.extra import libdevice

FOLDER = Path(__file__).parent / "triton"
LOG2E = tl.constexpr(1.4426950408889634)


@dataclass(frozen=True)
class Build:
    """One program: a kernel, the types of its arguments in order, its constants, and Triton's options.

    Types are Triton's: `*fp16`, `i32`, `tensordesc<fp16[128, 64]>` for a tensor map made by the host.
    """

    kernel: Any
    types: list[str]
    constants: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    gluon: bool = False
    capability: int = 100

    def compile(self) -> Any:
        names = self.kernel.arg_names
        signature = dict(zip(names, self.types)) | dict.fromkeys(self.constants, "constexpr")
        aligned = {(names.index(n),): [["tt.divisibility", 16]] for n, t in signature.items() if t.startswith("*")}
        source = (GluonASTSource if self.gluon else ASTSource)(self.kernel, signature, self.constants, aligned)
        return triton.compile(source, target=GPUTarget("cuda", self.capability, 32), options=self.options)


# -- rows and elements -----------------------------------------------------------------------------------------------


@triton.jit
def softmax(x, out, columns, width: tl.constexpr):
    row = tl.program_id(0)
    place = tl.arange(0, width)
    values = tl.load(x + row * columns + place, place < columns, other=-float("inf")).to(tl.float32)
    values = tl.exp(values - tl.max(values, 0))
    tl.store(out + row * columns + place, values / tl.sum(values, 0), place < columns)


@triton.jit
def functions(x, out, count, width: tl.constexpr):
    place = tl.program_id(0) * width + tl.arange(0, width)
    v = tl.load(x + place, place < count)
    result = tl.sin(v) + tl.cos(v) * tl.exp2(v * 0.1) + tl.log(tl.abs(v) + 1) + tl.sqrt(tl.abs(v)) + tl.erf(v)
    result += libdevice.tanh(v) + libdevice.pow(tl.abs(v) + 0.1, 1.7) + libdevice.lgamma(tl.abs(v) + 1.0) + tl.floor(v)
    tl.store(out + place, result, place < count)


@triton.jit
def larger(a, b):
    return tl.maximum(a, b)


@triton.jit
def primitives(x, summed, ordered, tops, bins, count: tl.constexpr, bin_count: tl.constexpr):
    place = tl.arange(0, count)
    v = tl.load(x + place)
    tl.store(summed + place, tl.cumsum(v, 0))
    tl.store(ordered + place, tl.sort(v, 0))
    tl.store(tops + place, tl.associative_scan(v, 0, larger))
    tl.store(bins + tl.arange(0, bin_count), tl.histogram(v % bin_count, bin_count))


# -- matrix products -------------------------------------------------------------------------------------------------


@triton.jit
def gemm_pointers(
    a,
    b,
    c,
    rows,
    columns,
    depth,
    tile_m: tl.constexpr,
    tile_n: tl.constexpr,
    tile_k: tl.constexpr,
    stages: tl.constexpr,
):
    """c = a b: cp.async into shared memory, tcgen05.mma; any sizes."""
    m = tl.program_id(0) * tile_m + tl.arange(0, tile_m)
    n = tl.program_id(1) * tile_n + tl.arange(0, tile_n)
    k = tl.arange(0, tile_k)
    total = tl.zeros((tile_m, tile_n), tl.float32)
    for start in tl.range(0, depth, tile_k, num_stages=stages):
        left = tl.load(
            a + m[:, None] * depth + (start + k)[None, :],
            mask=(m[:, None] < rows) & ((start + k)[None, :] < depth),
            other=0.0,
        )
        right = tl.load(
            b + (start + k)[:, None] * columns + n[None, :],
            mask=((start + k)[:, None] < depth) & (n[None, :] < columns),
            other=0.0,
        )
        total = tl.dot(left, right, total)
    tl.store(c + m[:, None] * columns + n[None, :], total, (m[:, None] < rows) & (n[None, :] < columns))


@triton.jit
def gemm_persistent(
    a, b, c, rows, columns, depth, programs,
    tile_m: tl.constexpr, tile_n: tl.constexpr, tile_k: tl.constexpr, flatten: tl.constexpr,
):  # fmt: skip
    """c = a b^T: persistent, warp-specialised, tensor maps, the output in two halves."""
    across = tl.cdiv(columns, tile_n)
    tiles = tl.cdiv(rows, tile_m) * across
    for tile in tl.range(tl.program_id(0), tiles, programs, flatten=flatten, warp_specialize=True, num_stages=3):
        m, n = tile // across * tile_m, tile % across * tile_n
        total = tl.zeros((tile_m, tile_n), tl.float32)
        for k in range(tl.cdiv(depth, tile_k)):
            total = tl.dot(a.load([m, k * tile_k]), b.load([n, k * tile_k]).T, total)
        first, second = tl.split(tl.permute(tl.reshape(total, (tile_m, 2, tile_n // 2)), (0, 2, 1)))
        c.store([m, n], first.to(c.dtype))
        c.store([m, n + tile_n // 2], second.to(c.dtype))


@triton.jit
def gemm_pair(a, b, c, depth, tile_m: tl.constexpr, tile_n: tl.constexpr, tile_k: tl.constexpr):
    """c = a b^T, one tile for the two CTAs of a cluster."""
    m, n = tl.program_id(0) * tile_m, tl.program_id(1) * tile_n
    total = tl.zeros((tile_m, tile_n), tl.float32)
    for k in tl.range(0, depth, tile_k, num_stages=3):
        total = tl.dot(a.load([m, k]), b.load([n, k]).T, total)
    c.store([m, n], total.to(c.dtype))


@triton.jit
def gemm_rows_of_k(a, b, c, depth, tile_m: tl.constexpr, tile_n: tl.constexpr, tile_k: tl.constexpr):
    """c = a b with b (depth, columns): for tf32 the tiles of b pass through registers, which transpose them."""
    m, n = tl.program_id(0) * tile_m, tl.program_id(1) * tile_n
    total = tl.zeros((tile_m, tile_n), tl.float32)
    for k in tl.range(0, depth, tile_k, num_stages=3):
        total = tl.dot(a.load([m, k]), b.load([k, n]), total)
    c.store([m, n], total)


@triton.jit
def gemm_split_k(
    a, b, c, columns, depth, tile_m: tl.constexpr, tile_n: tl.constexpr, tile_k: tl.constexpr, parts: tl.constexpr
):
    """c += a b^T, the depth dealt out to `parts` programs that add with atomics."""
    m, n = tl.program_id(0) * tile_m, tl.program_id(1) * tile_n
    part = tl.program_id(2)
    total = tl.zeros((tile_m, tile_n), tl.float32)
    for k in tl.range(part * tile_k, depth, tile_k * parts):
        total = tl.dot(a.load([m, k]), b.load([n, k]).T, total)
    place = (m + tl.arange(0, tile_m))[:, None] * columns + (n + tl.arange(0, tile_n))[None, :]
    tl.atomic_add(c + place, total)


@triton.jit
def gemm_own_maps(a, b, c, rows, columns, depth, tile_m: tl.constexpr, tile_n: tl.constexpr, tile_k: tl.constexpr):
    """c = a b^T through tensor maps that the kernel makes in global memory."""
    left = tl.make_tensor_descriptor(a, [rows, depth], [depth, 1], [tile_m, tile_k])
    right = tl.make_tensor_descriptor(b, [columns, depth], [depth, 1], [tile_n, tile_k])
    out = tl.make_tensor_descriptor(c, [rows, columns], [columns, 1], [tile_m, tile_n])
    m, n = tl.program_id(0) * tile_m, tl.program_id(1) * tile_n
    total = tl.zeros((tile_m, tile_n), tl.float32)
    for k in tl.range(0, depth, tile_k, warp_specialize=True, num_stages=3):
        total = tl.dot(left.load([m, k]), right.load([n, k]).T, total)
    out.store([m, n], total.to(c.dtype.element_ty))


@triton.jit
def move_rows(x, sources, out, targets, count: tl.constexpr):
    """out[targets] = x[sources], rows that the copy engine gathers and scatters four at a time."""
    place = tl.arange(0, count)
    out.scatter(x.gather(tl.load(sources + place), 0), tl.load(targets + place), 0)


@triton.jit
def block_scaled(
    a, b, scale_a, scale_b, c, depth,
    kind: tl.constexpr, packed: tl.constexpr, vector: tl.constexpr,
    tile_m: tl.constexpr, tile_n: tl.constexpr, tile_k: tl.constexpr,
):  # fmt: skip
    """c = (a * scale_a) (b * scale_b)^T; the factors come in the order of tcgen05.cp: 512 bytes for 128 rows by 4."""
    m, n = tl.program_id(0), tl.program_id(1)
    groups_m: tl.constexpr = tile_m // 128
    groups_n: tl.constexpr = tile_n // 128
    groups_k: tl.constexpr = tile_k // vector // 4
    total = tl.zeros((tile_m, tile_n), tl.float32)
    for k in tl.range(0, tl.cdiv(depth, tile_k), num_stages=2):
        left = a.load([m * tile_m, k * (tile_k // packed)])
        right = b.load([n * tile_n, k * (tile_k // packed)])
        factors_a = scale_a.load([0, m * groups_m, k * groups_k, 0, 0]).reshape(groups_m, groups_k, 32, 4, 4)
        factors_b = scale_b.load([0, n * groups_n, k * groups_k, 0, 0]).reshape(groups_n, groups_k, 32, 4, 4)
        factors_a = factors_a.trans(0, 3, 2, 1, 4).reshape(tile_m, tile_k // vector)
        factors_b = factors_b.trans(0, 3, 2, 1, 4).reshape(tile_n, tile_k // vector)
        total = tl.dot_scaled(left, factors_a, kind, right.T, factors_b, kind, total)
    c.store([m * tile_m, n * tile_n], total)


@triton.jit
def attention(
    q, k, v, out, sums, scale, length,
    size: tl.constexpr, tile_m: tl.constexpr, tile_n: tl.constexpr, roles: tl.constexpr,
):  # fmt: skip
    """Causal attention, forward, one head per program of the second dimension; `sums` gets log2 of the row sums."""
    start, head = tl.program_id(0) * tile_m, tl.program_id(1) * length
    rows = start + tl.arange(0, tile_m)
    query = q.load([head + start, 0])
    top = tl.full((tile_m,), -float("inf"), tl.float32)
    weight = tl.zeros((tile_m,), tl.float32)
    total = tl.zeros((tile_m, size), tl.float32)
    for at in tl.range(0, start + tile_m, tile_n, num_stages=2, warp_specialize=roles):
        scores = tl.dot(query, k.load([head + at, 0]).T) * (scale * LOG2E)
        scores = tl.where(rows[:, None] >= at + tl.arange(0, tile_n)[None, :], scores, -1e30)
        new_top = tl.maximum(top, tl.max(scores, 1))
        probabilities = tl.math.exp2(scores - new_top[:, None])
        shrink = tl.math.exp2(top - new_top)
        weight = weight * shrink + tl.sum(probabilities, 1)
        values = v.load([head + at, 0])
        total = tl.dot(probabilities.to(values.dtype), values, total * shrink[:, None])
        top = new_top
    tl.store(sums + head + rows, top + tl.math.log2(weight))
    out.store([head + start, 0], (total / weight[:, None]).to(out.dtype))


def _tiles(m: int, n: int, k: int) -> dict[str, int]:
    return {"tile_m": m, "tile_n": n, "tile_k": k}


def _maps(kind: str, m: int, n: int, k: int, width: int, out: str = "fp16") -> list[str]:
    return [f"tensordesc<{kind}[{m}, {k}]>", f"tensordesc<{kind}[{n}, {k}]>", f"tensordesc<{out}[{m}, {width}]>"]


def _scaled(kind: str, packed: int, vector: int, element: str, scale: str, tile_k: int) -> Build:
    a, b, c = _maps(element, 128, 128, tile_k // packed, 128, "fp32")
    factors = f"tensordesc<{scale}[1, 1, {tile_k // vector // 4}, 2, 256]>"
    constants = {"kind": kind, "packed": packed, "vector": vector} | _tiles(128, 128, tile_k)
    return Build(block_scaled, [a, b, factors, factors, c, "i32"], constants)


BUILDS = {
    "softmax": Build(softmax, ["*fp16", "*fp32", "i32"], {"width": 1024}),
    "functions": Build(functions, ["*fp32", "*fp32", "i32"], {"width": 512}),
    "primitives": Build(primitives, ["*i32"] * 5, {"count": 256, "bin_count": 32}, {"num_warps": 2}),
    "gemm_fp8": Build(
        gemm_pointers, ["*fp8e4nv", "*fp8e4nv", "*fp32"] + ["i32"] * 3, _tiles(128, 64, 128) | {"stages": 3}
    ),
    "gemm_tf32": Build(
        gemm_rows_of_k, [f"tensordesc<fp32[{m}, {n}]>" for m, n in ((128, 32), (32, 64), (128, 64))] + ["i32"],
        _tiles(128, 64, 32),
    ),
    "gemm_persistent": Build(
        gemm_persistent, _maps("fp16", 128, 128, 64, 64) + ["i32"] * 4, _tiles(128, 128, 64) | {"flatten": True}
    ),
    "gemm_persistent_8_warps": Build(
        gemm_persistent,
        _maps("bf16", 128, 256, 64, 128, "bf16") + ["i32"] * 4,
        _tiles(128, 256, 64) | {"flatten": False},
        {"num_warps": 8},
    ),
    "gemm_pair": Build(gemm_pair, _maps("fp16", 256, 128, 64, 128) + ["i32"], _tiles(256, 128, 64), {"num_ctas": 2}),
    "gemm_split_k": Build(
        gemm_split_k, _maps("fp16", 128, 128, 64, 1)[:2] + ["*fp32", "i32", "i32"], _tiles(128, 128, 64) | {"parts": 3}
    ),
    "gemm_own_maps": Build(gemm_own_maps, ["*bf16"] * 3 + ["i32"] * 3, _tiles(128, 128, 64)),
    "move_rows": Build(
        move_rows, ["tensordesc<fp16[1, 64]>", "*i32", "tensordesc<fp16[1, 64]>", "*i32"], {"count": 32}
    ),
    "mxfp8": _scaled("e4m3", 1, 32, "fp8e4nv", "u8", 128),
    "nvfp4": _scaled("e2m1", 2, 16, "u8", "fp8e4nv", 256),
    "attention": Build(
        attention,
        [f"tensordesc<fp16[{n}, 64]>" for n in (128, 64, 64, 128)] + ["*fp32", "fp32", "i32"],
        {"size": 64, "tile_m": 128, "tile_n": 64, "roles": True},
    ),
}  # fmt: skip
for _name in ("gemm_fp8", "gemm_tf32", "gemm_persistent", "gemm_persistent_8_warps", "attention"):
    BUILDS[f"{_name}_hopper"] = replace(BUILDS[_name], capability=90)
# Triton 3.9.0 cannot give this kernel's warps roles on Hopper.
BUILDS["attention_hopper"] = replace(
    BUILDS["attention_hopper"], constants=BUILDS["attention"].constants | {"roles": False}
)


def write(builds: dict[str, Build]) -> None:
    """Compiles the programs and writes what `triton_programs` reads."""
    programs = {}
    for name, build in builds.items():
        compiled = build.compile()
        meta = compiled.metadata
        assert not any(m["fp4_padded"] for m in meta.tensordesc_meta), f"{name} pads fp4: triton_programs does not"
        programs[name] = {
            "kernel": meta.name,
            "threads": 32 * meta.num_warps,
            "ctas": meta.num_ctas,
            "shared": meta.shared,
            "scratch": meta.global_scratch_size,
            "maps": [{"box": m["block_size"], "swizzle": m["swizzle"]} for m in meta.tensordesc_meta],
        }
        (FOLDER / f"{name}.ptx.gz").write_bytes(gzip.compress(compiled.asm["ptx"].encode(), 9, mtime=0))
    record = {"triton": triton.__version__, "programs": programs}
    (FOLDER / "programs.json").write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    from tests.foreign import gluon_kernels

    triton.knobs.compilation.disable_line_info = True  # the lines name files of the machine that compiled
    write(BUILDS | gluon_kernels.BUILDS)
