"""atom and red against a definition that serves one lane after the other, in Python integers."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from common.emulator import Emulator, InvalidAddress, Misaligned, OutOfBounds, UnsupportedInstruction
from common.emulator.machine.events import SCHEDULES
from common.emulator.numerics import formats
from tests.common.emulator.cuda import compile_ptx
from tests.common.emulator.ptx_kernels import run_lanes

LANES = 96
WIDTHS = {
    "b16": 16, "b32": 32, "b64": 64, "u32": 32, "u64": 64, "s32": 32, "s64": 64, "f32": 32, "f64": 64,
    "f16": 16, "bf16": 16, "f16x2": 32, "bf16x2": 32,
}  # fmt: skip
SCALARS = [
    *((op, kind) for op in ("and", "or", "xor", "exch", "cas") for kind in ("b32", "b64")),
    ("cas", "b16"),
    *((op, kind) for op in ("min", "max") for kind in ("u32", "s32", "u64", "s64")),
    *(("add", kind) for kind in ("u32", "s32", "u64", "f32", "f64", "f16", "bf16", "f16x2", "bf16x2")),
    ("inc", "u32"),
    ("dec", "u32"),
]
VECTORS = [
    *((op, kind, count) for op in ("add", "min", "max") for kind in ("f16", "bf16") for count in (2, 4, 8)),
    *((op, kind, count) for op in ("add", "min", "max") for kind in ("f16x2", "bf16x2") for count in (2, 4)),
    *(("add", "f32", count) for count in (2, 4)),
]
PATTERNS = {
    "own": np.arange(LANES),
    "one": np.full(LANES, 5),
    "few": np.arange(LANES) * 7 % 10,
    "mixed": np.random.default_rng(0).integers(0, 40, LANES),
}


@dataclass(frozen=True)
class Space:
    """A state space as the instruction names it, where the cells are, and the address register that it takes."""

    modifier: str
    declared: str
    address: str

    def __str__(self) -> str:
        return f"{self.modifier or 'generic'}-{self.declared}"


SPACES = [
    Space("global", "global", "%at"),
    Space("shared", "shared", "%narrow"),
    Space("shared::cta", "shared", "%at"),
    Space("shared::cluster", "shared", "%narrow"),
    Space("", "global", "%generic"),
    Space("", "shared", "%generic"),
]


# -- the definition ------------------------------------------------------------------------------------------------


def _number(kind: str, bits: int) -> float:
    return float(formats.decode(formats.FORMATS[kind], np.array([bits], formats.FORMATS[kind].dtype))[0])


def _add_floats(kind: str, old: int, value: int, flush: bool) -> int:
    """Every sum of two f16, bf16 or f32 here is exact in float64 before it is rounded once."""
    if kind == "f64":
        return int(np.array([_number(kind, old) + _number(kind, value)]).view(np.uint64)[0])
    fmt = formats.FORMATS[kind]
    x, y = _number(kind, old), _number(kind, value)
    tiny = 2.0**fmt.min_exponent
    if flush:
        x, y = (np.copysign(0.0, v) if abs(v) < tiny else v for v in (x, y))
    total = x + y
    if flush and abs(total) < tiny:
        total = np.copysign(0.0, total)
    return int(formats.encode(fmt, np.array([total]))[0])


def _order_floats(op: str, kind: str, old: int, value: int) -> int:
    x, y = _number(kind, old), _number(kind, value)
    keys = {bits: (v, -1 if np.signbit(v) else 1) for bits, v in ((old, x), (value, y))}
    return (min if op == "min" else max)((old, value), key=lambda bits: keys[bits])


def combined(op: str, kind: str, old: int, value: int, other: int = 0, flush: bool = False) -> int:
    """Bits of memory after one lane's operation."""
    if kind.endswith("x2"):
        low, high = (combined(op, kind[:-2], old >> s & 0xFFFF, value >> s & 0xFFFF) for s in (0, 16))
        return low | high << 16
    if kind in formats.FORMATS and op == "add":
        return _add_floats(kind, old, value, flush)
    if kind in formats.FORMATS and op in ("min", "max"):
        return _order_floats(op, kind, old, value)
    width = WIDTHS[kind]
    sign = (lambda v: v - (v >> (width - 1) << width)) if kind[0] == "s" else (lambda v: v)
    result = {
        "and": lambda: old & value, "or": lambda: old | value, "xor": lambda: old ^ value, "exch": lambda: value,
        "cas": lambda: other if old == value else old, "add": lambda: old + value,
        "min": lambda: min(sign(old), sign(value)), "max": lambda: max(sign(old), sign(value)),
        "inc": lambda: 0 if old >= value else old + 1,
        "dec": lambda: value if old == 0 or old > value else old - 1,
    }[op]()  # fmt: skip
    return result & ((1 << width) - 1)


def serve(op: str, kind: str, cells: np.ndarray, pick: np.ndarray, values: list[np.ndarray], flush: bool):
    """(what each lane saw, final cells), lanes in order; arrays are (lanes, vector length)."""
    cells, seen = cells.copy(), np.zeros_like(values[0])
    for lane, place in enumerate(pick):
        for i in range(cells.shape[1]):
            seen[lane, i] = cells[place, i]
            operands = [int(value[lane, i]) for value in values]
            cells[place, i] = combined(op, kind, int(cells[place, i]), *operands, flush=flush)
    return seen, cells


# -- the kernel ----------------------------------------------------------------------------------------------------


def run_atomic(
    text: str, kind: str, space: Space, cells: np.ndarray, pick: np.ndarray, values: list[np.ndarray],
    *, schedule: str = "early", guard: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray]:  # fmt: skip
    """`text` with the address and operands filled in runs on cells (lanes, vector length) of memory.

    Returns what the destination registers hold afterwards (their initial value is 0) and the final cells.
    """
    width, count = WIDTHS[kind], cells.shape[1]
    names = "bc"[: len(values)]
    inputs = {f"{n}{i}": (f"u{width}", v[:, i]) for n, v in zip(names, values) for i in range(count)}
    inputs |= {f"m{i}": (f"u{width}", cells[:, i]) for i in range(count)} | {"pick": ("u32", pick.astype(np.uint32))}
    outputs = {f"{n}{i}": f"u{width}" for n in "de" for i in range(count)}
    if guard is not None:
        inputs["go"] = ("pred", guard)
    bundle = {n: ", ".join(f"%{n}{i}" for i in range(count)) for n in "bcd"}
    bundle = {n: f"{{{regs}}}" if count > 1 else regs for n, regs in bundle.items()}
    step, local = width // 8, "global" if space.declared == "global" else "shared"
    body = f"""
    .reg .b64 %at, %own, %generic, %far;
    .reg .b32 %narrow;
    {"" if local == "global" else f".shared .align 32 .b8 cells[{LANES * step * count}];"}
    mov.u64 %own, cells;
    mul.wide.u32 %at, %pick, {step * count};
    mad.wide.u32 %far, %lane_, {step * count}, %own;
    add.u64 %at, %at, %own;
    cvta.{local}.u64 %generic, %at;
    cvt.u32.u64 %narrow, %at;
    """
    body += "".join(f"st.{local}.b{width} [%far + {step * i}], %m{i};\nmov.b{width} %d{i}, 0;\n" for i in range(count))
    body += "bar.sync 0;\n" + ("" if guard is None else "@%go ")
    body += text.format(a=f"[{space.address}]", **bundle) + "\nbar.sync 0;\n"
    body += "".join(f"ld.{local}.b{width} %e{i}, [%far + {step * i}];\n" for i in range(count))
    variables = f".global .align 32 .b8 cells[{LANES * step * count}];" if local == "global" else ""
    found = run_lanes(body, inputs, outputs, schedule=schedule, variables=variables)
    return tuple(np.stack([found[f"{n}{i}"] for i in range(count)], axis=1) for n in "de")


def random_values(kind: str, count: int, rng: np.random.Generator) -> np.ndarray:
    """Bits (lanes, count) with edge values in the first lanes; no NaN for float kinds."""
    width = WIDTHS[kind]
    base = kind.removesuffix("x2")
    if base in formats.FORMATS:
        numbers = np.ldexp(rng.uniform(-1, 1, (LANES, 2 * count)), rng.integers(-6, 6, (LANES, 2 * count)))
        edge = 2.0 ** formats.FORMATS[base].min_exponent
        numbers[:8] = rng.choice([0.0, -0.0, edge / 2, -edge / 2, edge, 1.0, np.inf], (8, 2 * count))
        halves = numbers.view(np.uint64) if kind == "f64" else formats.encode(formats.FORMATS[base], numbers)
        if kind.endswith("x2"):
            return halves[:, ::2].astype(np.uint32) | halves[:, 1::2].astype(np.uint32) << np.uint32(16)
        return np.ascontiguousarray(halves[:, :count])
    top = 1 << (width - 1)
    values = rng.integers(0, 1 << min(width, 63), (LANES, count), np.uint64)
    small = rng.integers(0, 6, (LANES, count), np.uint64)
    values = np.where(rng.random((LANES, count)) < 0.4, small, values)
    edges = np.array([0, 1, top - 1, top, top + 1, 2 * top - 1], np.uint64)
    values[:12] = rng.choice(edges, (12, count))
    return values.astype(f"u{width // 8}")


def _check(op: str, kind: str, count: int, space: Space, pattern: str) -> None:
    rng = np.random.default_rng(len(op) + count)
    pick = PATTERNS[pattern]
    cells, value = random_values(kind, count, rng), random_values(kind, count, rng)
    values = [value]
    if op == "cas":
        value[::2] = cells[pick][::2]  # half of the comparisons hold at first
        values.append(random_values(kind, count, rng))
    half = ".noftz" if kind.startswith(("f16", "bf16")) else ""
    vector = f".v{count}" if count > 1 else ""
    named = f".{space.modifier}" if space.modifier else ""
    operands = "{b}, {c}" if op == "cas" else "{b}"
    flush = kind == "f32" and space.declared == "global"
    seen, final = serve(op, kind, cells, pick, values, flush)
    atom = f"atom.relaxed.gpu{named}.{op}{half}{vector}.{kind} {{d}}, {{a}}, {operands};"
    found_seen, found_final = run_atomic(atom, kind, space, cells, pick, values)
    np.testing.assert_array_equal(found_seen, seen)
    np.testing.assert_array_equal(found_final, final)
    if op not in ("cas", "exch"):
        red = f"red{named}.{op}{half}{vector}.{kind} {{a}}, {operands};"
        np.testing.assert_array_equal(run_atomic(red, kind, space, cells, pick, values)[1], final)


# -- tests ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("space", [SPACES[0], SPACES[1]], ids=str)
@pytest.mark.parametrize(("op", "kind"), SCALARS)
def test_scalar_forms(op: str, kind: str, space: Space, pattern: str) -> None:
    _check(op, kind, 1, space, pattern)


@pytest.mark.parametrize("space", SPACES[2:], ids=str)
@pytest.mark.parametrize(
    ("op", "kind"), [("add", "u32"), ("cas", "b64"), ("add", "f32"), ("add", "bf16x2"), ("dec", "u32")]
)
def test_other_spaces(op: str, kind: str, space: Space) -> None:
    _check(op, kind, 1, space, "mixed")


@pytest.mark.parametrize("pattern", ["own", "few"])
@pytest.mark.parametrize(("op", "kind", "count"), VECTORS)
def test_vector_forms(op: str, kind: str, count: int, pattern: str) -> None:
    _check(op, kind, count, SPACES[0], pattern)


@pytest.mark.parametrize(("op", "kind", "count"), [("add", "f32", 4), ("max", "f16", 8)])
def test_vectors_at_generic_addresses(op: str, kind: str, count: int) -> None:
    _check(op, kind, count, SPACES[4], "mixed")


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("space", SPACES, ids=str)
def test_each_lane_draws_its_own_ticket(space: Space, schedule: str) -> None:
    cells, pick, one = np.zeros((LANES, 1), np.uint32), PATTERNS["one"], np.ones((LANES, 1), np.uint32)
    named = f".{space.modifier}" if space.modifier else ""
    seen, final = run_atomic(
        f"atom{named}.add.u32 {{d}}, {{a}}, {{b}};", "u32", space, cells, pick, [one], schedule=schedule
    )
    assert sorted(seen[:, 0].tolist()) == list(range(LANES))
    assert final[5, 0] == LANES and final.sum() == LANES


def test_inc_and_dec_wrap_at_the_bound() -> None:
    cells, pick, bound = np.zeros((LANES, 1), np.uint32), PATTERNS["one"], np.full((LANES, 1), 6, np.uint32)
    seen, final = run_atomic("atom.global.inc.u32 {d}, {a}, {b};", "u32", SPACES[0], cells, pick, [bound])
    assert seen[:, 0].tolist() == [lane % 7 for lane in range(LANES)] and final[5, 0] == LANES % 7
    seen, final = run_atomic("atom.shared.dec.u32 {d}, {a}, {b};", "u32", SPACES[1], cells, pick, [bound])
    assert seen[:, 0].tolist() == [-lane % 7 for lane in range(LANES)]
    cells[:] = 1000
    _, final = run_atomic("atom.shared.dec.u32 {d}, {a}, {b};", "u32", SPACES[1], cells, np.arange(LANES), [bound])
    assert (final == 6).all()


def test_only_one_lane_wins_a_compare_and_swap() -> None:
    cells, pick = np.zeros((LANES, 1), np.uint32), PATTERNS["one"]
    values = [np.zeros((LANES, 1), np.uint32), np.arange(100, 100 + LANES, dtype=np.uint32)[:, None]]
    seen, final = run_atomic(
        "atom.global.acq_rel.gpu.cas.b32 {d}, {a}, {b}, {c};", "b32", SPACES[0], cells, pick, values
    )
    assert seen[:, 0].tolist() == [0] + [100] * (LANES - 1) and final[5, 0] == 100


@pytest.mark.parametrize("space", SPACES, ids=str)
def test_f32_subnormals_are_flushed_in_global_memory_alone(space: Space) -> None:
    tiny = np.array([1, 0x8000_0001, 0x007F_FFFF, 0x0080_0000, 0x8080_0000, 0], np.uint32)
    cells, value = (np.resize(v, (LANES, 1)) for v in (tiny, np.repeat(tiny, 6)))
    named = f".{space.modifier}" if space.modifier else ""
    _, final = run_atomic(f"red{named}.add.f32 {{a}}, {{b}};", "f32", space, cells, np.arange(LANES), [value])
    expected = serve("add", "f32", cells, np.arange(LANES), [value], space.declared == "global")[1]
    np.testing.assert_array_equal(final, expected)
    assert (final[0] == 0) == (space.declared == "global")


def test_guarded_lanes_leave_memory_and_registers_alone() -> None:
    guard = np.arange(LANES) % 3 == 0
    cells, value = np.zeros((LANES, 1), np.uint32), np.full((LANES, 1), 9, np.uint32)
    cells[:] = 4
    seen, final = run_atomic(
        "atom.shared.add.u32 {d}, {a}, {b};", "u32", SPACES[1], cells, np.arange(LANES), [value], guard=guard
    )
    np.testing.assert_array_equal(seen[:, 0], np.where(guard, 4, 0))
    np.testing.assert_array_equal(final[:, 0], np.where(guard, 13, 4))


@pytest.mark.parametrize(
    "text",
    [
        "atom.global.add.u32 _, {a}, {b};",
        "red.release.sys.global.add.u32 {a}, {b};",
        "atom.add.global.L2::cache_hint.u32 {d}, {a}, {b}, %own;",
        "red.global.L2::cache_hint.add.u32 {a}, {b}, %own;",
    ],
)
def test_hints_and_sinks(text: str) -> None:
    cells, value = np.ones((LANES, 1), np.uint32), np.arange(LANES, dtype=np.uint32)[:, None]
    _, final = run_atomic(text, "u32", SPACES[0], cells, np.arange(LANES), [value])
    np.testing.assert_array_equal(final, value + 1)


def test_immediate_operands() -> None:
    cells = np.full((LANES, 1), 0x3F80_0000, np.uint32)
    _, final = run_atomic(
        "atom.global.add.f32 {d}, {a}, 0f40000000;", "f32", SPACES[0], cells, np.arange(LANES), [cells]
    )
    assert (final.view(np.float32) == 3).all()
    _, final = run_atomic("atom.global.min.s32 {d}, {a}, -7;", "s32", SPACES[0], cells, np.arange(LANES), [cells])
    assert (final.view(np.int32) == -7).all()


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("space", ["global", "shared"])
@pytest.mark.parametrize("op", ["exch", "cas"])
def test_128_bits(op: str, space: str, pattern: str) -> None:
    rng = np.random.default_rng(3)
    pick = PATTERNS[pattern]
    m, x, y = (rng.integers(0, 3, (LANES, 2), np.uint64) << np.uint64(60) for _ in range(3))
    x[::2] = m[pick][::2]
    body = f"""
    .reg .b64 %at, %own;
    {".shared .align 16 .b8 cells[2048];" if space == "shared" else ""}
    mov.u64 %own, cells;
    mad.wide.u32 %at, %pick, 16, %own;
    mad.wide.u32 %own, %lane_, 16, %own;
    st.{space}.b128 [%own], %m;
    bar.sync 0;
    atom.{space}.{op}.b128 %d, [%at], {"%x, %y" if op == "cas" else "%x"};
    bar.sync 0;
    ld.{space}.b128 %e, [%own];"""
    inputs = {"m": ("b128", m), "x": ("b128", x), "y": ("b128", y), "pick": ("u32", pick.astype(np.uint32))}
    variables = ".global .align 16 .b8 cells[2048];" if space == "global" else ""
    found = run_lanes(body, inputs, {"d": "b128", "e": "b128"}, variables=variables)
    cells, seen = m.copy(), np.zeros_like(m)
    for lane, place in enumerate(pick):
        seen[lane] = cells[place]
        if op == "exch" or (cells[place] == x[lane]).all():
            cells[place] = x[lane] if op == "exch" else y[lane]
    np.testing.assert_array_equal(found["d"], seen)
    np.testing.assert_array_equal(found["e"], cells)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_cluster_counts_in_one_ctas_shared_memory(schedule: str) -> None:
    source = """
    typedef unsigned int u32;
    extern "C" __global__ void k(u32* out, float* total) {
      __shared__ u32 counter; __shared__ float sum;
      u32 rank, at, to, old;
      asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
      if (threadIdx.x == 0) { counter = 0; sum = 0; }
      asm volatile("barrier.cluster.arrive;\\n barrier.cluster.wait;" ::: "memory");
      at = (u32)__cvta_generic_to_shared(&counter);
      asm volatile("mapa.shared::cluster.u32 %0, %1, 1;" : "=r"(to) : "r"(at));
      asm volatile("atom.shared::cluster.add.u32 %0, [%1], 1;" : "=r"(old) : "r"(to) : "memory");
      at = (u32)__cvta_generic_to_shared(&sum);
      asm volatile("mapa.shared::cluster.u32 %0, %1, 1;" : "=r"(to) : "r"(at));
      asm volatile("red.relaxed.cluster.shared::cluster.add.f32 [%0], %1;" :: "r"(to), "f"((float)rank) : "memory");
      asm volatile("barrier.cluster.arrive;\\n barrier.cluster.wait;" ::: "memory");
      out[blockIdx.x * blockDim.x + threadIdx.x] = old;
      if (threadIdx.x == 0) { out[4 * blockDim.x + blockIdx.x] = counter; total[blockIdx.x] = sum; }
    }"""
    out, total = np.full(4 * 64 + 4, 77, np.uint32), np.full(4, -1, np.float32)
    Emulator(schedule, 5).launch(compile_ptx(source), "k", grid=4, block=64, cluster=4, args=[out, total])
    assert sorted(out[:256].tolist()) == list(range(256))
    assert out[256:].tolist() == [0, 256, 0, 0]
    assert total.tolist() == [0, 64 * 6, 0, 0]


# -- what does not exist, and faults -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "kind", "count"),
    [
        ("atom.global.add.s64 {d}, {a}, {b};", "s64", 1),
        ("atom.global.and.u32 {d}, {a}, {b};", "u32", 1),
        ("atom.global.inc.s32 {d}, {a}, {b};", "s32", 1),
        ("atom.global.min.f32 {d}, {a}, {b};", "f32", 1),
        ("atom.global.exch.b16 {d}, {a}, {b};", "b16", 1),
        ("atom.global.cas.u32 {d}, {a}, {b}, {b};", "u32", 1),
        ("atom.global.add.f16 {d}, {a}, {b};", "f16", 1),
        ("atom.global.add.noftz.f32 {d}, {a}, {b};", "f32", 1),
        ("atom.global.max.noftz.f16x2 {d}, {a}, {b};", "f16x2", 1),
        ("atom.shared.add.v2.f32 {d}, {a}, {b};", "f32", 2),
        ("atom.global.min.v2.f32 {d}, {a}, {b};", "f32", 2),
        ("atom.global.add.noftz.v8.f16x2 {d}, {a}, {b};", "f16x2", 8),
        ("atom.global.add.v8.f32 {d}, {a}, {b};", "f32", 8),
        ("atom.global.add.v4.f32 {d}, {a}, {b};", "f32", 2),
        ("atom.local.add.u32 {d}, {a}, {b};", "u32", 1),
        ("atom.const.add.u32 {d}, {a}, {b};", "u32", 1),
        ("red.global.cas.b32 {a}, {b}, {b};", "b32", 1),
        ("red.global.exch.b32 {a}, {b};", "b32", 1),
        ("red.global.acquire.gpu.add.u32 {a}, {b};", "u32", 1),
        ("atom.global.add.sat.u32 {d}, {a}, {b};", "u32", 1),
        ("atom.global.add.u32 {d}, {a}, {b}, {b};", "u32", 1),
    ],
)
def test_refused_forms(text: str, kind: str, count: int) -> None:
    zeros = np.zeros((LANES, count), f"u{WIDTHS[kind] // 8}")
    with pytest.raises(UnsupportedInstruction):
        run_atomic(text, kind, SPACES[0], zeros, np.arange(LANES), [zeros])


def _fault(body: str) -> None:
    run_lanes(
        ".reg .b64 %at;\n.reg .f32 %f;\n.reg .b32 %old;\n"
        f".shared .align 16 .b32 cells[8];\n.local .align 16 .b32 own[8];\n{body}",
        {"x": ("u32", np.zeros(32, np.uint32))}, {"y": "u32"},
        variables=".const .align 16 .b32 fixed[8];",
    )  # fmt: skip


def test_faults() -> None:
    with pytest.raises(Misaligned, match="4 bytes"):
        _fault("mov.u64 %at, cells;\nadd.u64 %at, %at, 2;\natom.shared.add.u32 %old, [%at], %x;")
    with pytest.raises(Misaligned, match="8 bytes"):
        _fault("ld.param.u64 %at, [p_x];\nred.global.add.v2.f32 [%at + 4], {%f, %f};")
    with pytest.raises(OutOfBounds):
        _fault("ld.param.u64 %at, [p_x];\nred.global.add.u32 [%at + 4096], %x;")
    with pytest.raises(InvalidAddress, match="local memory"):
        _fault("mov.u64 %at, own;\ncvta.local.u64 %at, %at;\nred.add.u32 [%at], %x;")
    with pytest.raises(InvalidAddress, match="global memory only"):
        _fault("mov.u64 %at, cells;\ncvta.shared.u64 %at, %at;\nred.add.v2.f32 [%at], {%f, %f};")
    with pytest.raises(InvalidAddress, match="read-only"):
        _fault("mov.u64 %at, fixed;\ncvta.const.u64 %at, %at;\nred.add.u32 [%at], %x;")
