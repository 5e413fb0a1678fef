"""ld, ldu and st: types and widths, vectors, state spaces, generic addresses, hints, and faults."""

from __future__ import annotations

import numpy as np
import pytest

from common.emulator import Emulator, InvalidAddress, Misaligned, OutOfBounds, PtxSyntaxError, UnsupportedInstruction
from common.emulator.machine.events import SCHEDULES
from tests.common.emulator.cuda import compile_ptx
from tests.common.emulator.ptx_kernels import UNWRITTEN, run_lanes

LANES = 64
INTEGERS = ["b8", "u8", "s8", "b16", "u16", "s16", "b32", "u32", "s32", "b64", "u64", "s64"]
SPACES = [
    "global",
    "shared",
    "shared::cta",
    "shared::cluster",
    "local",
    "generic global",
    "generic shared",
    "generic local",
]


def bytes_of(kind: str) -> int:
    return int(kind[1:]) // 8


def random_bytes(seed: int, width: int) -> np.ndarray:
    """(lanes, width) bytes."""
    return np.random.default_rng(seed).integers(0, 256, (LANES, width)).astype(np.uint8)


def words(data: np.ndarray, kind: str = "u32") -> dict[str, tuple[str, np.ndarray]]:
    """Input registers `%i0`, ... that hold the bytes of each lane."""
    columns = np.ascontiguousarray(data).view(f"u{bytes_of(kind)}")
    return {f"i{place}": (kind, columns[:, place]) for place in range(columns.shape[1])}


def joined(found: dict[str, np.ndarray], prefix: str) -> np.ndarray:
    """The bytes (lanes, ...) of the outputs `prefix0`, `prefix1`, ..."""
    columns = [found[name] for name in found if name.startswith(prefix)]
    return np.ascontiguousarray(np.stack(columns, axis=1)).view(np.uint8)


def place_of(space: str, width: int) -> tuple[str, str, str]:
    """(modifier, body that makes `%at` the lane's `width` bytes in `space`, module variables)."""
    kind = space.split()[-1].split("::")[0]
    modifier = "" if space.startswith("generic") else f".{space}"
    size = width if kind == "local" else width * LANES
    body = ".reg .b64 %at, %far;\n"
    body += "" if kind == "global" else f".{kind} .align 32 .b8 cells[{size}];\n"
    body += "mov.u64 %at, cells;\n"
    if kind != "local":
        body += f"mad.wide.u32 %at, %lane_, {width}, %at;\n"
    if not modifier:
        body += f"cvta.{kind}.u64 %at, %at;\n"
    return modifier, body, f".global .align 32 .b8 cells[{size}];" if kind == "global" else ""


def vector(name: str, count: int) -> str:
    return f"{{{', '.join(f'%{name}{i}' for i in range(count))}}}" if count > 1 else f"%{name}0"


# -- scalars -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("space", SPACES)
@pytest.mark.parametrize("kind", INTEGERS)
def test_scalars_round_trip_in_every_space(kind: str, space: str) -> None:
    """A store takes the low bytes of its source; a load extends to the width of its destination."""
    width = bytes_of(kind)
    data = random_bytes(width, 8)
    modifier, body, variables = place_of(space, width)
    targets = {f"o{size}": f"u{size}" for size in (16, 32, 64) if size >= 8 * width}
    body += f"st{modifier}.{kind} [%at], %i0;\n"
    body += "".join(f"ld{modifier}.{kind} %{name}, [%at];\n" for name in targets)
    found = run_lanes(body, words(data, "u64"), targets, variables=variables)
    value = np.ascontiguousarray(data[:, :width]).view(f"{'i' if kind[0] == 's' else 'u'}{width}").reshape(-1)
    for name in targets:
        np.testing.assert_array_equal(found[name], value.astype(np.int64).astype(f"u{int(name[1:]) // 8}"))


@pytest.mark.parametrize("space", ["global", "shared", "local"])
@pytest.mark.parametrize(
    ("kind", "holder"), [("f32", "f32"), ("f32", "u32"), ("f64", "f64"), ("f64", "u64"), ("f32", "u64")]
)
def test_floats_keep_their_bits(kind: str, holder: str, space: str) -> None:
    width = bytes_of(kind)
    data = random_bytes(9, width)
    data[:3, -1] = 0x7F
    data[:3, -2] = (0xF0, 0x80, 0xFF)
    modifier, body, variables = place_of(space, width)
    body += f"st{modifier}.{kind} [%at], %i0;\nld{modifier}.{kind} %o, [%at];\n"
    found = run_lanes(body, words(data, f"u{8 * width}"), {"o": holder}, variables=variables)["o"]
    np.testing.assert_array_equal(
        found.view(f"u{found.itemsize}"), data.view(f"u{width}").reshape(-1).astype(f"u{found.itemsize}")
    )


@pytest.mark.parametrize("space", SPACES)
def test_128_bits_in_every_space(space: str) -> None:
    data = random_bytes(4, 16).view(np.uint64)
    modifier, body, variables = place_of(space, 16)
    body += f"st{modifier}.b128 [%at], %x;\nld{modifier}.b128 %y, [%at];\nld{modifier}.v2.b64 {{%low, %high}}, [%at];\n"
    found = run_lanes(body, {"x": ("b128", data)}, {"y": "b128", "low": "u64", "high": "u64"}, variables=variables)
    np.testing.assert_array_equal(found["y"], data)
    np.testing.assert_array_equal(np.stack((found["low"], found["high"]), axis=1), data)


def test_literals_are_stored_in_the_type_of_the_instruction() -> None:
    modifier, body, variables = place_of("global", 32)
    body += """
    st.global.u8 [%at], 300;
    st.global.s16 [%at + 2], -3;
    st.global.f32 [%at + 4], 0f3FC00000;
    st.global.f64 [%at + 8], 0d3FF8000000000000;
    st.global.f32 [%at + 16], 0f40200000;
    st.global.b32 [%at + 20], 0f3F800000;
    st.global.v2.u32 [%at + 24], {7, 0xFFFFFFFF};
    """
    body += "".join(f"ld.global.v4.b32 {{%o{i}, %o{i + 1}, %o{i + 2}, %o{i + 3}}}, [%at + {4 * i}];\n" for i in (0, 4))
    body += "ld.global.u8 %first, [%at];\n"
    found = run_lanes(
        body,
        {"x": ("u32", np.zeros(LANES))},
        {**{f"o{i}": "u32" for i in range(8)}, "first": "u32"},
        variables=variables,
    )
    stored = joined({name: column for name, column in found.items() if name != "first"}, "o")[0].tobytes()
    assert found["first"][0] == 300 & 0xFF
    assert np.frombuffer(stored[2:4], np.int16)[0] == -3
    assert np.frombuffer(stored[4:8], np.float32)[0] == 1.5 and np.frombuffer(stored[8:16], np.float64)[0] == 1.5
    assert np.frombuffer(stored[16:24], np.float32).tolist() == [2.5, 1.0]
    assert np.frombuffer(stored[24:32], np.uint32).tolist() == [7, 0xFFFF_FFFF]


# -- vectors -------------------------------------------------------------------------------------------------------

_NARROW = [
    (kind, count) for kind in ("u8", "b16", "u32", "f32", "b64") for count in (2, 4) if bytes_of(kind) * count <= 16
]
_WIDE = [("b32", 8), ("u32", 8), ("s32", 8), ("f32", 8), ("b64", 4), ("u64", 4), ("s64", 4), ("f64", 4)]


@pytest.mark.parametrize(
    ("kind", "count", "space"),
    [(*form, space) for form in _NARROW for space in ("global", "shared", "local", "generic shared", "shared::cluster")]
    + [(*form, space) for form in _WIDE for space in ("global", "generic global")],
)
def test_vectors_round_trip(kind: str, count: int, space: str) -> None:
    width = bytes_of(kind)
    data = random_bytes(count, width * count)
    modifier, body, variables = place_of(space, width * count)
    holder = f"u{max(16, 8 * width)}"
    columns = data.view(f"u{width}")
    inputs = {f"i{place}": (holder, columns[:, place].astype(f"u{bytes_of(holder)}")) for place in range(count)}
    if width == 1:  # what lies above the low byte is not stored
        inputs = {name: (kept, column | np.uint16(0xAB00)) for name, (kept, column) in inputs.items()}
    body += f"st{modifier}.v{count}.{kind} [%at], {vector('i', count)};\n"
    body += f"ld{modifier}.v{count}.{kind} {vector('o', count)}, [%at];\n"
    body += "".join(f"ld{modifier}.b{8 * width} %p{place}, [%at + {width * place}];\n" for place in range(count))
    found = run_lanes(
        body, inputs, {f"{name}{place}": holder for name in "op" for place in range(count)}, variables=variables
    )
    for place in range(count):
        np.testing.assert_array_equal(found[f"o{place}"], columns[:, place])
        np.testing.assert_array_equal(found[f"p{place}"], columns[:, place])


def test_a_vector_load_sign_extends_each_element() -> None:
    data = random_bytes(6, 4)
    _, body, variables = place_of("global", 4)
    body += "st.global.b32 [%at], %i0;\nld.global.v4.s8 {%o0, %o1, %o2, %o3}, [%at];\n"
    found = run_lanes(body, words(data), {f"o{i}": "s32" for i in range(4)}, variables=variables)
    np.testing.assert_array_equal(np.stack(list(found.values()), axis=1), data.view(np.int8))


@pytest.mark.parametrize(("kind", "count"), [("b32", 8), ("b64", 4)])
def test_sinks_leave_elements_out(kind: str, count: int) -> None:
    width = bytes_of(kind)
    data = random_bytes(7, 32)
    _, body, variables = place_of("global", 32)
    stored = ", ".join(f"%i{i}" if i % 2 == 0 else "_" for i in range(count))
    loaded = ", ".join(f"%o{i}" if i % 3 != 1 else "_" for i in range(count))
    zero = ", ".join(["0"] * count)
    body += "".join(f"mov.b{8 * width} %o{i}, 5;\n" for i in range(count))
    body += f"st.global.v{count}.{kind} [%at], {{{zero}}};\n"
    body += f"st.global.v{count}.{kind} [%at], {{{stored}}};\nld.global.v{count}.{kind} {{{loaded}}}, [%at];\n"
    found = run_lanes(
        body, words(data, f"u{8 * width}"), {f"o{i}": f"u{8 * width}" for i in range(count)}, variables=variables
    )
    columns = data.view(f"u{width}")
    for i in range(count):
        expected = 5 if i % 3 == 1 else columns[:, i] if i % 2 == 0 else 0
        np.testing.assert_array_equal(found[f"o{i}"], np.broadcast_to(expected, LANES))


# -- hints, ordering, predicates -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "form",
    [
        "ld.global.nc", "ldu.global", "ldu", "ld.global.ca", "ld.global.cg", "ld.cs", "ld.lu", "ld.global.cv",
        "ld.weak.global", "ld.volatile.global", "ld.relaxed.gpu.global", "ld.acquire.sys.global", "ld.relaxed.cta",
        "ld.acquire.cluster.global", "ld.mmio.relaxed.sys.global", "ld.global.L1::no_allocate", "ld.global.nc.L2::128B",
        "ld.global.L1::evict_last.L2::256B", "ld.global.nc.L1::evict_first.L2::64B", "ld.global.L1::evict_unchanged",
        "ld.global.L1::evict_normal",
    ],
)  # fmt: skip
def test_load_hints_change_nothing(form: str) -> None:
    data = random_bytes(1, 4)
    body = f".reg .b64 %far;\nld.param.u64 %far, [p_i0];\nmad.wide.u32 %far, %lane_, 4, %far;\n{form}.u32 %o, [%far];\n"
    found = run_lanes(body, words(data), {"o": "u32"})
    np.testing.assert_array_equal(found["o"], data.view(np.uint32)[:, 0])


@pytest.mark.parametrize(
    "form",
    [
        "st.global.wb", "st.cg", "st.global.cs", "st.global.wt", "st.weak.global", "st.volatile.global",
        "st.relaxed.gpu.global", "st.release.sys.global", "st.release.cluster", "st.mmio.relaxed.sys.global",
        "st.global.L1::no_allocate", "st.global.L1::evict_first",
    ],
)  # fmt: skip
def test_store_hints_change_nothing(form: str) -> None:
    data = random_bytes(2, 4)
    _, body, variables = place_of("global", 4)
    body += f"cvta.global.u64 %far, %at;\n{form}.u32 [%far], %i0;\nld.global.u32 %o, [%at];\n"
    found = run_lanes(body, words(data), {"o": "u32"}, variables=variables)
    np.testing.assert_array_equal(found["o"], data.view(np.uint32)[:, 0])


def test_cache_policies_and_256_bit_hints() -> None:
    data = random_bytes(3, 32)
    _, body, variables = place_of("global", 32)
    eight = vector("i", 8), vector("o", 8)
    body += f"""st.global.L1::no_allocate.L2::evict_first.v8.b32 [%at], {eight[0]};
    ld.global.L1::no_allocate.L2::evict_last.v8.b32 {eight[1]}, [%at];
    st.global.L2::cache_hint.b32 [%at], %i1, %at;
    ld.global.L2::cache_hint.L2::128B.b32 %o0, [%at], %at;\n"""
    found = run_lanes(body, words(data), {f"o{i}": "u32" for i in range(8)}, variables=variables)
    expected = data.view(np.uint32).copy()
    expected[:, 0] = expected[:, 1]
    np.testing.assert_array_equal(np.stack(list(found.values()), axis=1), expected)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_guarded_lanes_move_nothing(schedule: str) -> None:
    go = np.arange(LANES) % 5 == 2
    data = random_bytes(5, 4)
    _, body, variables = place_of("shared", 4)
    body += """st.shared.u32 [%at], 11;
    mov.u32 %o, 22;
    @%go st.shared.u32 [%at], %i0;
    @!%go ld.shared.u32 %o, [%at];
    ld.shared.u32 %p, [%at];\n"""
    found = run_lanes(
        body, words(data) | {"go": ("pred", go)}, {"o": "u32", "p": "u32"}, variables=variables, schedule=schedule
    )
    np.testing.assert_array_equal(found["o"], np.where(go, 22, 11))
    np.testing.assert_array_equal(found["p"], np.where(go, data.view(np.uint32)[:, 0], 11))


def test_the_destination_may_be_the_address() -> None:
    _, body, variables = place_of("global", 16)
    body += "st.global.v2.u64 [%at], {%i0, %i1};\nld.global.v2.u64 {%far, %at}, [%at];\n"
    body += "mov.u64 %o0, %far;\nmov.u64 %o1, %at;\n"
    data = random_bytes(8, 16)
    found = run_lanes(body, words(data, "u64"), {"o0": "u64", "o1": "u64"}, variables=variables)
    np.testing.assert_array_equal(joined(found, "o"), data)


# -- addresses -----------------------------------------------------------------------------------------------------


def test_addresses_with_offsets_symbols_and_32_bits() -> None:
    variables = ".global .align 4 .b32 table[4] = {10, 20, 30, 40};\n.const .align 4 .b32 fixed[3] = {1, 2, 3};"
    body = """
    .reg .b32 %narrow, %low;
    .reg .b64 %wide;
    .shared .align 16 .b32 cells[8];
    ld.global.u32 %o0, [table + 8];
    ld.const.u32 %o1, [fixed + 4];
    mov.u64 %wide, table;
    add.u64 %wide, %wide, 16;
    ld.global.u32 %o2, [%wide + -4];
    ld.global.u32 %o3, [%wide + -8];
    st.shared.u32 [cells + 12], 99;
    mov.u32 %narrow, cells;
    ld.shared.u32 %o4, [%narrow + 12];
    add.u32 %low, %narrow, 0x80000000;
    add.u32 %low, %low, 0x7FFFF000;
    ld.shared.u32 %o5, [%low + 4108];
    cvta.const.u64 %wide, fixed;
    ld.u32 %o6, [%wide + 8];
    """
    found = run_lanes(body, {"x": ("u32", np.zeros(LANES))}, {f"o{i}": "u32" for i in range(7)}, variables=variables)
    assert [int(found[f"o{i}"][0]) for i in range(7)] == [30, 2, 40, 30, 99, 99, 3]


def test_one_instruction_may_reach_all_windows() -> None:
    """Generic addresses of one warp: global memory of two allocations, shared memory and each lane's local memory."""
    body = """
    .reg .b64 %own, %shared, %at;
    .reg .b32 %kind;
    .reg .pred %p;
    .shared .align 8 .b64 cells[64];
    .local .align 8 .b64 mine;
    mov.u64 %own, mine;
    cvta.local.u64 %own, %own;
    mov.u64 %shared, cells;
    mad.wide.u32 %shared, %lane_, 8, %shared;
    cvta.shared.u64 %shared, %shared;
    mov.u64 %at, spare;
    mad.wide.u32 %at, %lane_, 8, %at;
    cvta.global.u64 %at, %at;
    and.b32 %kind, %lane_, 3;
    setp.eq.u32 %p, %kind, 1;
    selp.b64 %at, %shared, %at, %p;
    setp.eq.u32 %p, %kind, 2;
    selp.b64 %at, %own, %at, %p;
    setp.eq.u32 %p, %kind, 3;
    ld.param.u64 %shared, [p_o1];
    mad.wide.u32 %shared, %lane_, 8, %shared;
    selp.b64 %at, %shared, %at, %p;
    st.u64 [%at], %i0;
    ld.u64 %o0, [%at];
    mov.u64 %o1, %i0;
    ld.v2.u32 {%low, %high}, [%at];
    """
    data = random_bytes(11, 8)
    found = run_lanes(body, words(data, "u64"), {"o0": "u64", "o1": "u64", "low": "u32", "high": "u32"},
                      variables=".global .align 8 .b64 spare[64];")  # fmt: skip
    np.testing.assert_array_equal(joined(found, "o0"), data)
    np.testing.assert_array_equal(np.stack((found["low"], found["high"]), axis=1), data.view(np.uint32))


def test_each_thread_has_its_own_local_memory() -> None:
    source = """
    extern "C" __global__ void k(int* out, int n) {
      int stack[16];
      for (int i = 0; i < 16; i++) stack[i] = threadIdx.x * 100 + i;
      for (int i = 0; i < n; i++) { int j = (i * 5 + threadIdx.x) % 16; stack[j] += stack[(j + 1) % 16]; }
      for (int i = 0; i < 16; i++) out[threadIdx.x * 16 + i] = stack[i];
    }"""
    out = np.zeros((64, 16), np.int32)
    Emulator().launch(compile_ptx(source), "k", grid=1, block=64, args=[out, 20])
    for thread in range(64):
        stack = [thread * 100 + i for i in range(16)]
        for i in range(20):
            j = (i * 5 + thread) % 16
            stack[j] += stack[(j + 1) % 16]
        assert out[thread].tolist() == stack


def test_kernel_and_function_parameters() -> None:
    source = """
    struct Mixed { char a; short b; double c; int d[3]; };
    __device__ __noinline__ Mixed turn(Mixed m, int by) {
      m.a += by; m.b -= by; m.c *= by; m.d[threadIdx.x % 3] = by; return m;
    }
    extern "C" __global__ void k(double* out, Mixed m, const __grid_constant__ Mixed fixed) {
      Mixed r = turn(m, threadIdx.x + 1);
      const Mixed* p = &fixed;
      double sum = r.a + 1000.0 * r.b + 1e6 * r.c + 7 * r.d[0] + 11 * r.d[1] + 13 * r.d[2];
      out[threadIdx.x] = sum + p->d[threadIdx.x % 3];
    }"""
    layout = np.dtype([("a", "i1"), ("b", "i2"), ("c", "f8"), ("d", "i4", 3)], align=True)
    mixed = np.array([(5, -300, 0.25, (1, 2, 3))], layout)
    fixed = np.array([(0, 0, 0, (100, 200, 300))], layout)
    out = np.zeros(32)
    Emulator().launch(compile_ptx(source), "k", grid=1, block=32, args=[out, mixed.tobytes(), fixed.tobytes()])
    for t in range(32):
        d = [1, 2, 3]
        d[t % 3] = t + 1
        expected = (5 + t + 1) + 1000.0 * (-300 - t - 1) + 1e6 * 0.25 * (t + 1) + 7 * d[0] + 11 * d[1] + 13 * d[2]
        assert out[t] == expected + (100, 200, 300)[t % 3]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_loads_and_stores_reach_a_cluster_peer(schedule: str) -> None:
    source = """
    typedef unsigned int u32; typedef unsigned long long u64;
    extern "C" __global__ void k(u32* out) {
      __shared__ u32 cells[64];
      u32 rank, to, back; u64 generic;
      asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
      cells[threadIdx.x] = 1000 * rank + threadIdx.x;
      asm volatile("barrier.cluster.arrive;\\n barrier.cluster.wait;" ::: "memory");
      asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(to)
                   : "r"((u32)__cvta_generic_to_shared(&cells[threadIdx.x])), "r"((rank + 1 + threadIdx.x % 2) % 3));
      asm volatile("ld.shared::cluster.u32 %0, [%1];" : "=r"(back) : "r"(to) : "memory");
      out[blockIdx.x * 64 + threadIdx.x] = back;
      asm volatile("barrier.cluster.arrive;\\n barrier.cluster.wait;" ::: "memory");
      asm("mapa.u64 %0, %1, %2;" : "=l"(generic) : "l"(&cells[threadIdx.x]), "r"((rank + 1) % 3));
      asm volatile("st.u32 [%0], %1;" :: "l"(generic), "r"(rank) : "memory");
      asm volatile("barrier.cluster.arrive;\\n barrier.cluster.wait;" ::: "memory");
      out[192 + blockIdx.x * 64 + threadIdx.x] = cells[threadIdx.x];
    }"""
    out = np.zeros((2, 3, 64), np.uint32)
    Emulator(schedule, 2).launch(compile_ptx(source), "k", grid=3, block=64, cluster=3, args=[out])
    t = np.arange(64)
    for rank in range(3):
        np.testing.assert_array_equal(out[0, rank], 1000 * ((rank + 1 + t % 2) % 3) + t)
        assert (out[1, rank] == (rank - 1) % 3).all()


# -- faults and what does not exist --------------------------------------------------------------------------------


VARIABLES = ".const .align 16 .b32 fixed[8];\n.global .align 16 .b32 table[8];\n.global .align 8 .b32 odd[3];"


def _run(body: str, **outputs: str) -> dict[str, np.ndarray]:
    declared = ".reg .b64 %at;\n.reg .b32 %r<9>;\n.shared .align 16 .b32 cells[8];\n.local .align 16 .b32 own[8];\n"
    return run_lanes(declared + body, {"x": ("u32", np.arange(LANES))}, outputs or {"y": "u32"},
                     variables=VARIABLES)  # fmt: skip


FAULTS = [
    (OutOfBounds, "past the end", "ld.param.u64 %at, [p_x];\nld.global.u32 %r0, [%at + 256];"),
    (OutOfBounds, "across the end", "ld.global.v2.u32 {%r0, %r1}, [odd + 8];"),
    (OutOfBounds, "bytes before", "ld.param.u64 %at, [p_x];\nst.global.u32 [%at + -4], %r0;"),
    (OutOfBounds, "global access", "mov.u64 %at, 0;\nld.u32 %r0, [%at];"),
    (OutOfBounds, "shared access", "mov.u64 %at, 0;\nld.shared.u32 %r0, [%at];"),
    (OutOfBounds, "shared access", "mov.u64 %at, cells;\nst.shared.u32 [%at + 32], %r0;"),
    (OutOfBounds, "global access", "ld.global.u8 %r0, [%at];"),
    (Misaligned, "aligned to 4", "ld.param.u64 %at, [p_x];\nld.global.u32 %r0, [%at + 2];"),
    (Misaligned, "aligned to 16", "mov.u64 %at, table;\nst.global.v4.u32 [%at + 8], {%r0, %r1, %r2, %r3};"),
    (Misaligned, "aligned to 8", "mov.u64 %at, cells;\nld.shared.v2.u32 {%r0, %r1}, [%at + 4];"),
    (Misaligned, "aligned to 4", "mov.u64 %at, own;\nst.local.u32 [%at + 1], %r0;"),
    (
        Misaligned,
        "aligned to 32",
        "mov.u64 %at, table;\nld.v8.b32 {%r0, %r1, %r2, %r3, %r4, %r5, %r6, %r7}, [%at + 16];",
    ),
    (InvalidAddress, "local memory", "mov.u64 %at, own;\nld.local.u32 %r0, [%at + 4096];"),
    (InvalidAddress, "local memory", "mov.u64 %at, own;\ncvta.local.u64 %at, %at;\nst.u32 [%at + 65536], %r0;"),
    (InvalidAddress, "CTA rank", "mov.u32 %r0, cells;\nadd.u32 %r0, %r0, 0x1000000;\nld.shared.u32 %r1, [%r0];"),
    (
        InvalidAddress,
        "CTA rank 1",
        "mov.u32 %r0, cells;\nadd.u32 %r0, %r0, 0x1000000;\nld.shared::cluster.u32 %r1, [%r0];",
    ),
    (InvalidAddress, "read-only", "cvta.const.u64 %at, fixed;\nst.u32 [%at], %r0;"),
]


@pytest.mark.parametrize(("fault", "message", "body"), FAULTS)
def test_faults(fault: type, message: str, body: str) -> None:
    with pytest.raises(fault, match=message) as caught:
        _run(body)
    assert caught.value.place.instruction.startswith(("ld", "st"))


def test_a_fault_names_the_lanes_that_caused_it() -> None:
    body = "ld.param.u64 %at, [p_x];\nmad.wide.u32 %at, %lane_, 8, %at;\nld.global.u32 %r0, [%at];"
    with pytest.raises(OutOfBounds) as caught:
        _run(body)
    assert caught.value.lanes == tuple(range(32, 64)) and caught.value.place.warps == (1,)


def test_fresh_memory_is_no_zero() -> None:
    found = _run("ld.shared.u32 %s, [cells];\nld.local.u32 %l, [own];", s="u32", l="u32")
    assert (found["s"] == 0xFFFF_FFFF).all() and (found["l"] == 0xFFFF_FFFF).all()


def test_an_output_nobody_stored_stays_as_it_was() -> None:
    out = np.full(32, UNWRITTEN, np.uint8)
    source = 'extern "C" __global__ void k(unsigned char* x) { if (threadIdx.x % 2) x[threadIdx.x] = threadIdx.x; }'
    Emulator().launch(compile_ptx(source), "k", grid=1, block=32, args=[out])
    assert out.tolist() == [t if t % 2 else UNWRITTEN for t in range(32)]


@pytest.mark.parametrize(
    "text",
    [
        "ld.global.v3.u32 {%r0, %r1, %r2}, [%at];",
        "ld.global.v2.u32 {%r0, %r1, %r2}, [%at];",
        "ld.global.v2.u32 %r0, [%at];",
        "ld.shared.v8.b32 {%r0, %r1, %r2, %r3, %r4, %r5, %r6, %r7}, [%at];",
        "ld.shared.v4.b64 {%at, %at, %at, %at}, [%at];",
        "ld.global.v8.b64 {%at, %at, %at, %at, %at, %at, %at, %at}, [%at];",
        "ld.global.f16 %r0, [%at];",
        "ld.global [%at], %r0;",
        "ld.global.b64 %r0, [%at];",
        "ld.global.L3::evict_last.b32 %r0, [%at];",
        "ld.global.L2::512B.b32 %r0, [%at];",
        "ld.global.fresh.b32 %r0, [%at];",
        "ld.global.L2::cache_hint.b32 %r0, [%at];",
        "ld.global.b32 %r0, [%at], %at;",
        "ld.global.release.gpu.b32 %r0, [%at];",
        "ldu.shared.b32 %r0, [%at];",
        "st.global.nc.b32 [%at], %r0;",
        "st.global.acquire.gpu.b32 [%at], %r0;",
        "st.const.b32 [%at], %r0;",
        "st.global.f64 [%at], 0f3FC00000;",
        "st.global.f32 [%at], 0d3FF8000000000000;",
        "st.global.v4.b32 [%at], {%r0, _, %r1, %r2};",
        "st.global.b64 [%at], %r0;",
        "st.shared.v8.b32 [%at], {%r0, %r1, %r2, %r3, %r4, %r5, %r6, %r7};",
    ],
)
def test_refused_forms(text: str) -> None:
    with pytest.raises((UnsupportedInstruction, PtxSyntaxError)):
        _run(text)
