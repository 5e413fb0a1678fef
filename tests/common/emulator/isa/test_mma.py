"""mma.sync against a matrix product in float64, with fragments built lane by lane from the ISA's formulas."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from common.emulator import Emulator, UnsupportedInstruction
from common.emulator.machine.events import SCHEDULES
from common.emulator.numerics import formats
from tests.common.emulator.cuda import compile_ptx
from tests.common.emulator.isa.matrix_programs import LAYOUTS, pack, unpack
from tests.common.emulator.ptx_kernels import UNWRITTEN, run_lanes

BITS = {
    "f64": 64, "tf32": 32, "f16": 16, "bf16": 16, "e4m3": 8, "e5m2": 8, "e3m2": 8, "e2m3": 8, "e2m1": 8,
    "s8": 8, "u8": 8, "s4": 4, "u4": 4,
}  # fmt: skip
WARPS = 3


@dataclass(frozen=True)
class Case:
    shape: str
    result: str
    a: str
    b: str
    prefix: str = ""  # modifiers between the layouts and the types
    suffix: str = ""  # modifiers after the types

    def __str__(self) -> str:
        return f"{self.shape}{self.prefix}.{self.result}.{self.a}.{self.b}{self.suffix}"

    @property
    def text(self) -> str:
        types = f"{self.result}.{self.a}.{self.b}.{self.result}"
        return f"mma.sync.aligned.{self.shape}.row.col{self.prefix}.{types}{self.suffix}"

    @property
    def size(self) -> tuple[int, int]:
        """Rows and K."""
        rows, k = self.shape[1:].split("n8k")
        return int(rows), int(k)

    @property
    def layout(self):
        return LAYOUTS[self.shape, BITS[self.a]]


def _products(first: tuple[str, ...], second: tuple[str, ...]) -> list[tuple[str, str]]:
    return [(a, b) for a in first for b in second]


FLOATS = [
    *(Case(shape, result, "f16", "f16") for shape in ("m16n8k8", "m16n8k16") for result in ("f16", "f32")),
    *(Case(shape, "f32", "bf16", "bf16") for shape in ("m16n8k8", "m16n8k16")),
    *(Case(shape, "f32", "tf32", "tf32") for shape in ("m16n8k4", "m16n8k8")),
    *(
        Case(shape, result, a, b)
        for shape in ("m16n8k16", "m16n8k32")
        for result in ("f16", "f32")
        for a, b in _products(("e4m3", "e5m2"), ("e4m3", "e5m2"))
    ),
    *(
        Case("m16n8k32", result, a, b, ".kind::f8f6f4")
        for result, (a, b) in zip(
            ("f32", "f16", "f32", "f32", "f16", "f32"),
            (
                ("e3m2", "e2m3"),
                ("e2m3", "e2m1"),
                ("e2m1", "e4m3"),
                ("e5m2", "e3m2"),
                ("e2m1", "e2m1"),
                ("e4m3", "e5m2"),
            ),
        )
    ),
]
DOUBLES = [Case(shape, "f64", "f64", "f64") for shape in ("m8n8k4", "m16n8k4", "m16n8k8", "m16n8k16")]
_INTEGER_SHAPES = {("s8", "u8"): ("m8n8k16", "m16n8k16", "m16n8k32"), ("s4", "u4"): ("m8n8k32", "m16n8k32", "m16n8k64")}
INTEGERS = [
    Case(shape, "s32", a, b, saturate)
    for kinds, shapes in _INTEGER_SHAPES.items()
    for shape in shapes
    for a, b in _products(kinds, kinds)
    for saturate in ("", ".satfinite")
]  # fmt: skip
every_float = pytest.mark.parametrize("case", FLOATS, ids=str)


def values_of(kind: str, bits: np.ndarray) -> np.ndarray:
    """float64 values of element bits."""
    if kind[0] in "su" and kind[1:].isdigit():
        width = int(kind[1:])
        signed = bits.astype(np.int64)
        return np.where((kind[0] == "s") & (signed >> (width - 1) == 1), signed - (1 << width), signed).astype(float)
    if kind == "e2m1":  # the middle four bits of a byte
        return formats.decode(formats.E2M1, bits >> 2 & 0xF)
    fmt = formats.FORMATS[kind]
    return formats.decode(fmt, bits & np.array((1 << (fmt.width + fmt.shift)) - 1, bits.dtype))


def random_bits(kind: str, shape: tuple[int, ...], rng: np.random.Generator, finite: bool = True) -> np.ndarray:
    """Random bit patterns, padding bits included; without infinities, NaNs and extreme exponents when `finite`."""
    width = BITS[kind]
    bits = rng.integers(0, 1 << min(width, 63), shape, np.uint64).astype(f"u{max(8, width) // 8}")
    if width >= 16 and finite:
        magnitude = np.ldexp(rng.uniform(-1, 1, shape), rng.integers(-8, 8, shape))
        if kind == "f64":
            return magnitude.view(np.uint64)
        bits = formats.encode(formats.FORMATS[kind], magnitude) | (
            bits & np.array(0x1FFF if kind == "tf32" else 0, bits.dtype)
        )
    if finite:
        bits[~np.isfinite(values_of(kind, bits))] = 1
    return bits


def run_mma(
    case: Case, a: np.ndarray, b: np.ndarray, c: np.ndarray, *, guard: np.ndarray | None = None, schedule: str = "early"
) -> np.ndarray:
    """D (warps, rows, 8) as the numbers of its type, from element bits of A and B and values of C, one set per warp."""
    rows, k = case.size
    layout, result = (
        case.layout,
        {"f16": np.float16, "f32": np.float32, "f64": np.float64, "s32": np.int32}[case.result],
    )
    kind = "u64" if case.result == "f64" else "u32"
    size = 8 * np.dtype(result).itemsize
    fragments = {
        "a": pack(a, layout.a, rows * k // 32, BITS[case.a]),
        "b": pack(b, layout.b, k * 8 // 32, BITS[case.b]),
        "c": pack(c.astype(result).view(f"u{size // 8}"), layout.c, rows * 8 // 32, size),
    }
    inputs = {f"{name}{i}": (kind, row) for name, part in fragments.items() for i, row in enumerate(part)}
    vectors = {name: ", ".join(f"%{name}{i}" for i in range(len(part))) for name, part in fragments.items()}
    outputs = {f"d{i}": kind for i in range(len(fragments["c"]))}
    body = "".join(f"mov.b{kind[1:]} %d{i}, %c{i};\n" for i in range(len(fragments["c"])))
    if guard is not None:
        inputs["go"] = ("pred", guard)
        body += "@%go "
    accumulators = ", ".join(f"%{name}" for name in outputs)
    body += f"{case.text} {{{accumulators}}}, {{{vectors['a']}}}, {{{vectors['b']}}}, {{{vectors['c']}}};"
    found = run_lanes(body, inputs, outputs, lanes=32 * len(a), schedule=schedule)
    return unpack(np.stack(list(found.values())), layout.c, rows, 8, size).view(result)


def exact(case: Case, a: np.ndarray, b: np.ndarray, c: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """A B + C in float64, and the same sum of magnitudes."""
    x, y = values_of(case.a, a), values_of(case.b, b)
    with np.errstate(invalid="ignore"):
        return x @ y + c, np.abs(x) @ np.abs(y) + np.abs(c)


def random_operands(case: Case, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    rows, k = case.size
    a, b = random_bits(case.a, (WARPS, rows, k), rng), random_bits(case.b, (WARPS, k, 8), rng)
    return a, b, rng.uniform(-2, 2, (WARPS, rows, 8)).astype(np.float16).astype(float)


@every_float
def test_float_forms_on_random_bits(case: Case) -> None:
    a, b, c = random_operands(case, 1)
    if case.a == "e5m2" or case.b == "e5m2":
        c *= 64
    expected, magnitude = exact(case, a, b, c)
    found = run_mma(case, a, b, c).astype(float)
    if case.result == "f16":
        overflow = np.abs(expected) > 65520
        assert np.isinf(found[overflow]).all()
        expected, found, magnitude = (values[~overflow] for values in (expected, found, magnitude))
    step = 2.0**-11 * np.abs(expected) + 2.0**-25 if case.result == "f16" else 2.0**-24 * np.abs(expected)
    assert (np.abs(found - expected) <= step + case.size[1] * 2.0**-24 * magnitude).all()
    assert np.count_nonzero(found) > found.size // 2


@every_float
def test_small_integers_are_exact(case: Case) -> None:
    rng = np.random.default_rng(2)
    rows, k = case.size
    numbers = {"e2m1": [0, 1, -2, 3, 4, -6], "e2m3": [0, 1, -2, 3, 5, -7]}
    x, y = (rng.choice(numbers.get(kind, [0, 1, -2, 3, 4, -5 if kind == "e2m3" else -6]), shape)
            for kind, shape in ((case.a, (WARPS, rows, k)), (case.b, (WARPS, k, 8))))  # fmt: skip
    a, b = (formats.encode(formats.FORMATS[kind], v.astype(float)) for kind, v in ((case.a, x), (case.b, y)))
    a, b = a << (2 if case.a == "e2m1" else 0), b << (2 if case.b == "e2m1" else 0)
    c = rng.integers(-40, 40, (WARPS, rows, 8))
    np.testing.assert_array_equal(run_mma(case, a, b, c), x @ y + c)


@every_float
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_each_element_meets_its_partner_alone(case: Case, schedule: str) -> None:
    """One nonzero in A and B each: a single product, wherever the two are."""
    rng = np.random.default_rng(3)
    rows, k = case.size
    a = np.zeros((6, rows, k), f"u{BITS[case.a] // 8}")
    b = np.zeros((6, k, 8), f"u{BITS[case.b] // 8}")
    one_a, one_b = (
        formats.encode(formats.FORMATS[kind], np.ones(1))[0] << (2 if kind == "e2m1" else 0)
        for kind in (case.a, case.b)
    )
    expected = np.zeros((6, rows, 8))
    for warp in range(6):
        row, middle, column = rng.integers(rows), rng.integers(k), rng.integers(8)
        a[warp, row, middle], b[warp, middle, column] = one_a, one_b
        expected[warp, row, column] = 1
    np.testing.assert_array_equal(run_mma(case, a, b, np.zeros((6, rows, 8)), schedule=schedule), expected)


@pytest.mark.parametrize("case", [case for case in FLOATS if case.a in ("f16", "bf16", "tf32", "e5m2")], ids=str)
def test_infinities_nans_and_subnormals(case: Case) -> None:
    rows, k = case.size
    fmt_a, fmt_b = formats.FORMATS[case.a], formats.FORMATS[case.b]
    rng = np.random.default_rng(4)
    specials = np.array([np.inf, -np.inf, np.nan, 2.0 ** (fmt_a.min_exponent - 1), -0.0, 0.0, 1.0])
    x = rng.choice(specials, (WARPS, rows, k), p=[0.01, 0.01, 0.01, 0.3, 0.2, 0.2, 0.27])
    y = rng.choice(np.array([1.0, 0.0, 2.0]), (WARPS, k, 8), p=[0.6, 0.2, 0.2])
    a, b = formats.encode(fmt_a, x), formats.encode(fmt_b, y)
    c = np.zeros((WARPS, rows, 8))
    expected, _ = exact(case, a, b, c)
    kind = np.float16 if case.result == "f16" else np.float32
    np.testing.assert_allclose(run_mma(case, a, b, c).astype(float), expected.astype(kind).astype(float), rtol=2.0**-10)
    assert np.isnan(expected).any() and np.isinf(expected).any() and np.isfinite(expected).any()


@pytest.mark.parametrize("case", INTEGERS, ids=str)
def test_integer_forms(case: Case) -> None:
    rng = np.random.default_rng(5)
    rows, k = case.size
    a, b = random_bits(case.a, (WARPS, rows, k), rng), random_bits(case.b, (WARPS, k, 8), rng)
    largest, least = (1 << (BITS[case.a] - 1)) - 1, 1 << (BITS[case.a] - 1)
    a[0, 0], b[0, :, 0] = least, least
    a[0, 1], b[0, :, 1] = largest, 2 * least - 1
    c = rng.integers(-(1 << 31), 1 << 31, (WARPS, rows, 8))
    c[:, ::2, 0], c[:, ::2, 1] = (1 << 31) - 1, -(1 << 31)
    c[2] = rng.integers(-50, 50, (rows, 8))
    total = (values_of(case.a, a) @ values_of(case.b, b)).astype(np.int64) + c
    expected = np.clip(total, -(1 << 31), (1 << 31) - 1) if case.prefix else total.astype(np.int32)
    np.testing.assert_array_equal(run_mma(case, a, b, c.astype(np.int32)), expected)


@pytest.mark.parametrize("case", DOUBLES, ids=str)
def test_double_forms(case: Case) -> None:
    rng = np.random.default_rng(6)
    a, b, c = random_operands(case, 6)
    c = rng.standard_normal(c.shape)
    expected, magnitude = exact(case, a, b, c)
    assert (np.abs(run_mma(case, a, b, c) - expected) <= 2.0**-52 * case.size[1] * magnitude).all()
    x, y = rng.integers(-9, 9, a.shape).astype(float), rng.integers(-9, 9, b.shape).astype(float)
    np.testing.assert_array_equal(run_mma(case, x.view(np.uint64), y.view(np.uint64), np.rint(c)), x @ y + np.rint(c))


@pytest.mark.parametrize("rounding", ["rn", "rz", "rm", "rp"])
def test_double_rounding(rounding: str) -> None:
    """One product per element, half way between two numbers and a little more: 1 + (2**-53 + 2**-80)."""
    case = Case("m16n8k8", "f64", "f64", "f64", suffix=f".{rounding}")
    x, y = np.zeros((1, 16, 8)), np.zeros((1, 8, 8))
    x[:, :, 3], y[:, 3] = 2.0**-53, 1 + 2.0**-27
    for sign in (1, -1):
        up = {"rn": True, "rz": False, "rm": sign < 0, "rp": sign > 0}[rounding]
        found = run_mma(case, (sign * x).view(np.uint64), y.view(np.uint64), np.full((1, 16, 8), float(sign)))
        assert (found == sign * (1 + up * 2.0**-52)).all()


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("chosen", [(0, 3), (0, 1, 4), (2,), (0, 1, 2, 3, 4), ()])
@pytest.mark.parametrize("case", [FLOATS[0], FLOATS[3], INTEGERS[8], DOUBLES[2]], ids=str)
def test_guarded_warps_alone_execute(case: Case, chosen: tuple[int, ...], schedule: str) -> None:
    rng = np.random.default_rng(7)
    rows, k = case.size
    a = (
        np.concatenate([random_operands(case, seed)[0] for seed in (1, 2)])[:5]
        if case.result != "s32"
        else random_bits(case.a, (5, rows, k), rng)
    )
    b = (
        np.concatenate([random_operands(case, seed)[1] for seed in (1, 2)])[:5]
        if case.result != "s32"
        else random_bits(case.b, (5, k, 8), rng)
    )
    c = rng.integers(-5, 5, (5, rows, 8)).astype(float)
    guard = np.isin(np.arange(160) // 32, chosen)
    found = run_mma(case, a, b, c, guard=guard, schedule=schedule)
    everywhere = run_mma(case, a, b, c)
    for warp in range(5):
        np.testing.assert_array_equal(found[warp], everywhere[warp] if warp in chosen else c[warp])


def test_destination_may_be_any_source() -> None:
    """The vector d permutes c: all of c is read before any of d is written."""
    rng = np.random.default_rng(8)
    words = {name: rng.integers(0, 1 << 14, 32).astype(np.uint32) for name in ("a0", "a1", "b0")}
    c = {f"c{i}": rng.standard_normal(32).astype(np.float32) for i in range(4)}
    inputs = {name: ("u32", word) for name, word in words.items()} | {name: ("f32", word) for name, word in c.items()}
    text = "mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {{{}}}, {{%a0, %a1}}, {{%b0}}, {{%c0, %c1, %c2, %c3}};\n"
    body = text.format("%d0, %d1, %d2, %d3") + text.format("%c1, %c2, %c3, %c0")
    body += "".join(f"mov.f32 %e{i}, %c{(i + 1) % 4};\n" for i in range(4))
    found = run_lanes(body, inputs, {f"{name}{i}": "f32" for name in "de" for i in range(4)})
    for i in range(4):
        np.testing.assert_array_equal(found[f"d{i}"], found[f"e{i}"])


def test_a_form_is_counted_once_per_warp() -> None:
    source = """
    extern "C" __global__ void k(float* out) {
      float d[4]; unsigned a = threadIdx.x;
      asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%4}, {%4}, {%5,%5,%5,%5};"
                   : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3]) : "r"(a), "f"(0.0f));
      out[threadIdx.x] = d[0] + d[1] + d[2] + d[3];
    }"""
    out = np.zeros(96, np.float32)
    run = Emulator().launch(compile_ptx(source), "k", grid=2, block=96, args=[out])
    assert run.counters.events["mma m16n8k8 bf16 bf16 f32"] == 6


def _refused(text: str, registers: str = "{%d0, %d1, %d2, %d3}, {%a0, %a1}, {%b0}, {%c0, %c1, %c2, %c3}") -> None:
    inputs = {name: ("u32", np.zeros(32, np.uint32)) for name in ("a0", "a1", "b0", "c0", "c1", "c2", "c3")}
    run_lanes(f"{text} {registers};", inputs, {f"d{i}": "u32" for i in range(4)})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("mma.sync.aligned.m16n8k8.row.row.f32.f16.f16.f32", "not a form"),
        ("mma.sync.aligned.m16n8k8.row.col.f32.f16.bf16.f32", "not a form"),
        ("mma.sync.aligned.m16n8k8.row.col.f16.f16.f16.f32", "not a form"),
        ("mma.sync.aligned.m16n8k8.row.col.f16.bf16.bf16.f16", "not a form"),
        ("mma.sync.aligned.m16n8k32.row.col.f32.f16.f16.f32", "not a form"),
        ("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32", "not a form"),
        ("mma.sync.aligned.m16n8k32.row.col.f32.e3m2.e2m3.f32", "not a form"),
        ("mma.sync.aligned.m16n8k16.row.col.kind::f8f6f4.f32.e4m3.e4m3.f32", "not a form"),
        ("mma.sync.aligned.m16n8k8.row.col.satfinite.f32.f16.f16.f32", "satfinite"),
        ("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32.rz", "rounding"),
        ("mma.sync.aligned.m16n8k128.row.col.s32.b1.b1.s32.and.popc", "b1"),
        ("mma.sync.aligned.m8n8k4.row.col.f32.f16.f16.f32", "m8n8k4"),
        ("mma.sp.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32", "sp"),
        ("mma.sp::ordered_metadata.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32", "sp::ordered_metadata"),
        ("mma.sync.aligned.m16n8k32.row.col.kind::mxf8f6f4.block_scale.f32.e4m3.e4m3.f32.ue8m0", "block_scale"),
        ("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32", "vectors of"),
        ("wmma.mma.sync.aligned.row.col.m16n16k16.f32.f32", "wmma"),
    ],
)  # fmt: skip
def test_refused_forms(text: str, message: str) -> None:
    with pytest.raises(UnsupportedInstruction, match=message):
        _refused(text)


GEMM = r"""
typedef unsigned int u32;
#define BM 64
#define BN 64
#define BK 32
#define PAD 8
__device__ __forceinline__ u32 smem(const void* p) { return (u32)__cvta_generic_to_shared(p); }
__device__ __forceinline__ void copy16(u32 to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" :: "r"(to), "l"(from) : "memory");
}
extern "C" __global__ void gemm(const unsigned short* A, const unsigned short* B, float* D, int N, int K) {
  __shared__ __align__(16) unsigned short As[2][BM][BK + PAD], Bs[2][BK][BN + PAD];
  int t = threadIdx.x, warp = t / 32, lane = t % 32, wm = warp / 2 * 32, wn = warp % 2 * 32;
  float acc[2][4][4] = {};
  auto load = [&](int stage, int k0) {
    for (int i = t; i < BM * BK / 8; i += blockDim.x) {
      int r = i / (BK / 8), c = i % (BK / 8) * 8;
      copy16(smem(&As[stage][r][c]), A + (size_t)(blockIdx.y * BM + r) * K + k0 + c);
    }
    for (int i = t; i < BK * BN / 8; i += blockDim.x) {
      int r = i / (BN / 8), c = i % (BN / 8) * 8;
      copy16(smem(&Bs[stage][r][c]), B + (size_t)(k0 + r) * N + blockIdx.x * BN + c);
    }
    asm volatile("cp.async.commit_group;" ::: "memory");
  };
  load(0, 0);
  for (int k0 = 0; k0 < K; k0 += BK) {
    int stage = k0 / BK % 2;
    if (k0 + BK < K) { load(stage ^ 1, k0 + BK); asm volatile("cp.async.wait_group 1;" ::: "memory"); }
    else asm volatile("cp.async.wait_group 0;" ::: "memory");
    __syncthreads();
    for (int kk = 0; kk < BK; kk += 16) {
      u32 a[2][4], b[2][4];
      for (int i = 0; i < 2; i++)
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
          : "=r"(a[i][0]), "=r"(a[i][1]), "=r"(a[i][2]), "=r"(a[i][3])
          : "r"(smem(&As[stage][wm + i * 16 + lane % 16][kk + lane / 16 * 8])));
      for (int j = 0; j < 2; j++)
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
          : "=r"(b[j][0]), "=r"(b[j][1]), "=r"(b[j][2]), "=r"(b[j][3])
          : "r"(smem(&Bs[stage][kk + lane % 16][wn + j * 16 + lane / 16 * 8])));
      for (int i = 0; i < 2; i++)
        for (int j = 0; j < 4; j++)
          asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32"
            " {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
            : "+f"(acc[i][j][0]), "+f"(acc[i][j][1]), "+f"(acc[i][j][2]), "+f"(acc[i][j][3])
            : "r"(a[i][0]), "r"(a[i][1]), "r"(a[i][2]), "r"(a[i][3]),
              "r"(b[j / 2][j % 2 * 2]), "r"(b[j / 2][j % 2 * 2 + 1]));
    }
    __syncthreads();
  }
  for (int i = 0; i < 2; i++) for (int j = 0; j < 4; j++) for (int e = 0; e < 4; e++)
    D[(size_t)(blockIdx.y * BM + wm + i * 16 + lane / 4 + e / 2 * 8) * N
      + blockIdx.x * BN + wn + j * 8 + lane % 4 * 2 + e % 2] = acc[i][j][e];
}
"""


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_gemm_with_ldmatrix_and_cp_async(schedule: str) -> None:
    rng = np.random.default_rng(9)
    m, n, k = 128, 64, 96
    a, b = rng.integers(-4, 5, (m, k)).astype(np.float16), rng.integers(-4, 5, (k, n)).astype(np.float16)
    d = np.empty((m, n), np.float32)
    d.view(np.uint8)[...] = UNWRITTEN
    Emulator(schedule, seed=3).launch(
        compile_ptx(GEMM), "gemm", grid=(n // 64, m // 64), block=128, args=[a, b, d, n, k]
    )
    np.testing.assert_array_equal(d, a.astype(np.float32) @ b.astype(np.float32))
