"""cvta, isspacep, mapa and getctarank (PTX ISA 9.7.9.19, .20, .23, .24)."""

from __future__ import annotations

import numpy as np
import pytest

from common.emulator import Emulator, InvalidAddress, UnsupportedInstruction
from tests.common.emulator.ptx_kernels import run_lanes

CLUSTER = """
.version 9.0
.target sm_100a
.address_size 64
.visible .entry cluster(.param .u64 p_out) .reqnctapercluster 4
{{
  .reg .b64 %rd<20>; .reg .b32 %r<20>; .reg .pred %p<9>;
  .shared .align 16 .b32 own[64];
  mov.u32 %r0, %cluster_ctarank;
  mov.u32 %r1, %tid.x;
  ld.param.u64 %rd0, [p_out];
  mad.lo.u32 %r2, %r0, 32, %r1;
  mul.wide.u32 %rd1, %r2, 4;
  add.u64 %rd1, %rd0, %rd1;
{body}
  st.global.u32 [%rd1], %r3;
  ret;
}}
"""


def run_cluster(body: str) -> np.ndarray:
    """%r3 of every thread of a cluster of four one-warp CTAs, (4, 32)."""
    out = np.zeros((4, 32), np.uint32)
    Emulator("early").launch(CLUSTER.format(body=body), "cluster", grid=4, block=32, args=[out])
    return out


@pytest.mark.parametrize("space", ["shared", "shared::cta", "shared::cluster"])
@pytest.mark.parametrize("source", ["own+8", "%at"])
def test_generic_address_of_shared_memory(space: str, source: str) -> None:
    body = f"""
    .shared .b32 own[4]; .reg .b64 %g, %back, %at;
    mov.u64 %at, own+8;
    st.shared.u32 [own+8], %a;
    cvta.{space}.u64 %g, {source};
    ld.u32 %d, [%g];
    cvta.to.{space}.u64 %back, %g;
    ld.shared.u32 %e, [%back];"""
    result = run_lanes(body, {"a": ("u32", 77)}, {"d": "u32", "e": "u32"})
    assert (result["d"] == 77).all() and (result["e"] == 77).all()


@pytest.mark.parametrize("source", ["mine+4", "%at"])
def test_generic_address_of_local_memory(source: str) -> None:
    body = f"""
    .local .b32 mine[4]; .reg .b64 %g, %back, %at;
    mov.u64 %at, mine+4;
    st.local.u32 [mine+4], %a;
    cvta.local.u64 %g, {source};
    ld.u32 %d, [%g];
    cvta.to.local.u64 %back, %g;
    ld.local.u32 %e, [%back];"""
    values = np.arange(64, dtype=np.uint32)
    result = run_lanes(body, {"a": ("u32", values)}, {"d": "u32", "e": "u32"})
    np.testing.assert_array_equal(result["d"], values)
    np.testing.assert_array_equal(result["e"], values)


@pytest.mark.parametrize("space", ["global", "const"])
def test_generic_address_of_global_and_const(space: str) -> None:
    body = f"""
    .reg .b64 %g, %back;
    cvta.{space}.u64 %g, table+4;
    ld.u32 %d, [%g];
    cvta.to.{space}.u64 %back, %g;
    ld.{space}.u32 %e, [%back];"""
    variables = f".{space} .u32 table[2] = {{11, 12}};"
    result = run_lanes(body, {}, {"d": "u32", "e": "u32"}, variables=variables)
    assert (result["d"] == 12).all() and (result["e"] == 12).all()


@pytest.mark.parametrize("space", ["param", "param::entry"])
def test_generic_address_of_a_kernel_parameter(space: str) -> None:
    body = f"""
    .reg .b64 %at, %g, %back;
    mov.b64 %at, p_d;
    cvta.{space}.u64 %g, %at;
    ld.u64 %d, [%g];
    cvta.to.{space}.u64 %back, %g;
    ld.param.u64 %e, [p_d];
    setp.eq.u64 %p, %at, %back;"""
    result = run_lanes(body, {}, {"d": "u64", "e": "u64", "p": "pred"})
    np.testing.assert_array_equal(result["d"], result["e"])
    assert result["p"].all()


def test_the_address_of_a_kernel_parameter_fits_32_bits() -> None:
    body = """
    .reg .b32 %at; .reg .b64 %wide, %g;
    mov.b32 %at, p_d;
    cvt.u64.u32 %wide, %at;
    cvta.param.u64 %g, %wide;
    ld.u64 %d, [%g];
    ld.param.u64 %e, [p_d];"""
    result = run_lanes(body, {"a": ("u32", 0)}, {"d": "u64", "e": "u64"})
    assert (result["d"] == result["e"]).all()


def test_conversion_under_a_predicate() -> None:
    go = np.arange(32) % 2 == 0
    body = "mov.b64 %d, 5; @%go cvta.shared.u64 %d, %d; mov.b64 %e, 5; @%go cvta.global.u64 %e, %a;"
    result = run_lanes(body, {"go": ("pred", go), "a": ("u64", 9)}, {"d": "u64", "e": "u64"})
    assert (result["d"][~go] == 5).all() and (result["d"][go] != 5).all()
    np.testing.assert_array_equal(result["e"], np.where(go, 9, 5))


SPACES = {
    "global": ("global",),
    "const": ("const",),
    "local": ("local",),
    "shared": ("shared", "shared::cta", "shared::cluster"),
    "param": ("param", "param::entry", "global"),
}


@pytest.mark.parametrize("where", SPACES)
def test_isspacep(where: str) -> None:
    tests = ("const", "global", "local", "param", "param::entry", "shared", "shared::cta", "shared::cluster")
    names = {space: space.replace("::", "_") for space in tests}
    symbol = {"param": "%at", "shared": "own", "local": "mine", "global": "table", "const": "fixed"}[where]
    body = f"""
    .shared .b32 own[4]; .local .b32 mine[4]; .reg .b64 %g, %at;
    mov.b64 %at, p_global;
    cvta.{where}.u64 %g, {symbol};
    """ + "\n".join(f"isspacep.{space} %{name}, %g;" for space, name in names.items())
    variables = ".global .u32 table[2];\n.const .u32 fixed[2] = {1, 2};"
    result = run_lanes(body, {}, dict.fromkeys(names.values(), "pred"), variables=variables)
    for space, name in names.items():
        assert result[name].all() == (space in SPACES[where]), space
        assert result[name].any() == (space in SPACES[where]), space


def test_isspacep_of_arbitrary_bits() -> None:
    """Addresses that belong to no allocation are global, whatever their bits."""
    values = np.array([0, 1, (1 << 64) - 1, 1 << 63, 0x0300_0000_0000], object)
    body = "isspacep.global %g, %a; isspacep.shared %s, %a; isspacep.local %l, %a; isspacep.const %c, %a;"
    result = run_lanes(body, {"a": ("u64", values)}, dict.fromkeys("gslc", "pred"))
    assert result["g"].all() and not (result["s"] | result["l"] | result["c"]).any()


def test_isspacep_tells_own_from_foreign_shared_memory() -> None:
    flags = run_cluster("""
  mov.u64 %rd2, own;
  mapa.shared::cluster.u64 %rd3, %rd2, 2;
  cvta.shared::cluster.u64 %rd4, %rd3;
  isspacep.shared::cta %p1, %rd4;
  isspacep.shared::cluster %p2, %rd4;
  mapa.shared::cluster.u64 %rd3, %rd2, 5;
  cvta.shared::cluster.u64 %rd4, %rd3;
  isspacep.shared::cluster %p3, %rd4;
  selp.u32 %r3, 1, 0, %p1;
  @%p2 add.u32 %r3, %r3, 2;
  @%p3 add.u32 %r3, %r3, 4;""")
    np.testing.assert_array_equal(flags, np.array([[2], [2], [3], [2]]) * np.ones((1, 32), int))


MAPPINGS = {
    "u32 variable": "mapa.shared::cluster.u32 %r4, own+4, %r5; ld.shared::cluster.u32 %r3, [%r4];",
    "u32 register": "mov.u32 %r6, own+4; mapa.shared::cluster.u32 %r4, %r6, %r5; ld.shared::cluster.u32 %r3, [%r4];",
    "u64 variable": "mapa.shared::cluster.u64 %rd2, own+4, %r5; ld.shared::cluster.u32 %r3, [%rd2];",
    "generic": "cvta.shared.u64 %rd2, own+4; mapa.u64 %rd3, %rd2, %r5; ld.u32 %r3, [%rd3];",
}
EXCHANGE = """
  mul.lo.u32 %r7, %r0, 100;
  st.shared.u32 [own+4], %r7;
  barrier.cluster.arrive;
  barrier.cluster.wait;
  add.u32 %r5, %r0, 1;
  and.b32 %r5, %r5, 3;
  {mapping}
  barrier.cluster.arrive;
  barrier.cluster.wait;"""


@pytest.mark.parametrize("form", MAPPINGS)
def test_mapa_reaches_the_memory_of_another_cta(form: str) -> None:
    values = run_cluster(EXCHANGE.format(mapping=MAPPINGS[form]))
    np.testing.assert_array_equal(values[:, 0], [100, 200, 300, 0])


def test_mapping_back_to_the_own_rank_is_the_own_address() -> None:
    same = run_cluster("""
  mov.u32 %r5, own+4;
  mapa.shared::cluster.u32 %r4, %r5, 3;
  mapa.shared::cluster.u32 %r4, %r4, %r0;
  sub.u32 %r3, %r4, %r5;""")
    assert (same == 0).all()


@pytest.mark.parametrize(
    "text",
    [
        "mapa.shared::cluster.u32 %r4, own+4, %r5; getctarank.shared::cluster.u32 %r3, %r4;",
        "mapa.shared::cluster.u64 %rd2, own+4, %r5; getctarank.shared::cluster.u64 %r3, %rd2;",
        "cvta.shared.u64 %rd2, own; mapa.u64 %rd3, %rd2, %r5; getctarank.u64 %r3, %rd3;",
    ],
)
def test_getctarank_of_a_mapped_address(text: str) -> None:
    ranks = run_cluster(f"add.u32 %r5, %r0, 2; and.b32 %r5, %r5, 3; {text}")
    np.testing.assert_array_equal(ranks[:, 0], [2, 3, 0, 1])


def test_getctarank_of_a_variable() -> None:
    np.testing.assert_array_equal(run_cluster("getctarank.shared::cluster.u32 %r3, own;")[:, 5], [0, 1, 2, 3])


def test_a_rank_outside_the_cluster_faults_at_the_access() -> None:
    with pytest.raises(InvalidAddress, match="rank 9"):
        run_cluster("mapa.shared::cluster.u32 %r4, own, 9; ld.shared::cluster.u32 %r3, [%r4];")


@pytest.mark.parametrize(
    "text",
    [
        "cvta.global.u32 %a, %a",
        "cvta.texture.u64 %w, %w",
        "cvta.shared.u64 %w, table",
        "cvta.to.u64 %w, %w",
        "isspacep.texture %p, %w",
        "isspacep.param::func %p, %w",
        "mapa.u32 %a, %a, 0",
        "mapa.shared::cta.u32 %a, %a, 0",
        "getctarank.u32 %a, %a",
        "getctarank.shared::cluster.b32 %a, %a",
        "istypep.texref %p, %w",
    ],
)
def test_forms_that_do_not_exist_are_refused(text: str) -> None:
    inputs = {"a": ("u32", 1), "w": ("u64", 1), "p": ("pred", True)}
    with pytest.raises(UnsupportedInstruction):
        run_lanes(f"{text};", inputs, {"d": "u32"}, variables=".global .u32 table[2];")
