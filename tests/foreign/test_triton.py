"""Programs that Triton compiled for sm_100a and, `_hopper`, for sm_90a, on every schedule, against torch."""

from __future__ import annotations

import pytest
import torch

from tests.foreign.triton_programs import Descriptor, launch

SCHEDULES = [("early", 0), ("late", 0), ("random", 1)]
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])

every_schedule = pytest.mark.parametrize(("schedule", "seed"), SCHEDULES, ids=[schedule for schedule, _ in SCHEDULES])


def poisoned(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.full(shape, float("nan")).to(dtype)


def check(found: torch.Tensor, expected: torch.Tensor, tolerance: float) -> None:
    """Compares norms, after a look for what was never written."""
    found, expected = found.double(), expected.double()
    assert torch.isfinite(found).all()
    assert (found - expected).norm() <= tolerance * expected.norm()


def random(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


# -- rows and elements -----------------------------------------------------------------------------------------------


@every_schedule
def test_softmax(schedule, seed):
    x, out = random(5, 781, dtype=torch.float16), poisoned(5, 781)
    launch("softmax", (5,), [x, out, 781], schedule, seed=seed)
    check(out, x.double().softmax(1), 1e-6)


@every_schedule
def test_functions_of_libdevice(schedule, seed):
    x, out = 3 * random(1300), poisoned(1300)
    launch("functions", (3,), [x, out, 1300], schedule, seed=seed)
    v = x.double()
    expected = v.sin() + v.cos() * torch.exp2(v * 0.1) + torch.log(v.abs() + 1) + v.abs().sqrt() + torch.erf(v)
    expected += v.tanh() + (v.abs() + 0.1) ** 1.7 + torch.lgamma(v.abs() + 1) + v.floor()
    check(out, expected, 1e-6)


@every_schedule
def test_scan_sort_and_histogram(schedule, seed):
    x = torch.randint(0, 1000, (256,), dtype=torch.int32)
    summed, ordered, tops, bins = (torch.zeros(count, dtype=torch.int32) for count in (256, 256, 256, 32))
    launch("primitives", (1,), [x, summed, ordered, tops, bins], schedule, seed=seed)
    assert torch.equal(summed, x.cumsum(0, dtype=torch.int32))
    assert torch.equal(ordered, x.sort().values)
    assert torch.equal(tops, x.cummax(0).values)
    assert torch.equal(bins, torch.bincount(x % 32, minlength=32).int())


@every_schedule
def test_softmax_across_a_cluster(schedule, seed):
    x, out = random(3, 2048), poisoned(3, 2048)
    launch("cluster_softmax", (3,), [x, out], schedule, seed=seed)
    check(out, x.double().softmax(1), 1e-6)


# -- matrix products -------------------------------------------------------------------------------------------------


@every_schedule
@pytest.mark.parametrize("name", ["gemm_fp8", "gemm_fp8_hopper"])
def test_fp8_product_at_any_size(name, schedule, seed):
    m, n, k = 200, 136, 300
    a, b = (random(*shape, dtype=torch.float8_e4m3fn) for shape in ((m, k), (k, n)))
    c = poisoned(m, n)
    launch(name, (2, 3), [a, b, c, m, n, k], schedule, seed=seed)
    check(c, a.double() @ b.double(), 1e-5)


@every_schedule
@pytest.mark.parametrize(
    ("name", "dtype", "tolerance"),
    [
        (f"{name}{chip}", dtype, tolerance)
        for name, dtype, tolerance in (
            ("gemm_persistent", torch.float16, 1e-3),
            ("gemm_persistent_8_warps", torch.bfloat16, 5e-3),
        )
        for chip in ("", "_hopper")
    ],
)
def test_persistent_warp_specialised_product(name, dtype, tolerance, schedule, seed):
    """Ten or six tiles, four programs, ragged on all sides."""
    m, n, k = 300, 392, 200
    a, b, c = random(m, k, dtype=dtype), random(n, k, dtype=dtype), poisoned(m, n, dtype=dtype)
    arguments = [Descriptor(a), Descriptor(b), Descriptor(c), m, n, k, 4]
    launch(name, (4,), arguments, schedule, seed=seed)
    check(c, a.double() @ b.double().T, tolerance)


@every_schedule
def test_product_by_two_ctas(schedule, seed):
    m, n, k = 300, 248, 192
    a, b, c = (random(*shape, dtype=torch.float16) for shape in ((m, k), (n, k), (m, n)))
    launch("gemm_pair", (2, 2), [Descriptor(a), Descriptor(b), Descriptor(c), k], schedule, seed=seed)
    check(c, a.double() @ b.double().T, 1e-3)


def test_a_race_that_the_compiler_made():
    """Triton 3.9.0 gives the transposed tiles of b one buffer, and refills it while the product before may still read
    it: the wait for that product's commit comes one iteration later. Completed at once it is right, else by luck."""
    m, n, k = 128, 64, 256
    a, b = random(m, k), random(k, n)
    expected = a.double() @ b.double()

    def error(schedule: str, seed: int = 0) -> float:
        c = poisoned(m, n)
        launch("gemm_tf32", (1, 1), [Descriptor(a), Descriptor(b), Descriptor(c), k], schedule, seed=seed)
        return float((c.double() - expected).norm() / expected.norm())

    assert error("early") < 1e-3
    assert not max(error("random", seed) for seed in range(6)) < 0.1


@every_schedule
def test_tf32_product_on_hopper(schedule, seed):
    m, n, k = 128, 64, 256
    a, b, c = random(m, k), random(k, n), poisoned(m, n)
    launch("gemm_tf32_hopper", (1, 1), [Descriptor(a), Descriptor(b), Descriptor(c), k], schedule, seed=seed)
    check(c, a.double() @ b.double(), 1e-3)


@every_schedule
def test_tensor_maps_that_the_kernel_makes(schedule, seed):
    m, n, k = 200, 136, 320
    a, b, c = (random(*shape, dtype=torch.bfloat16) for shape in ((m, k), (n, k), (m, n)))
    launch("gemm_own_maps", (2, 2), [a, b, c, m, n, k], schedule, seed=seed)
    check(c, a.double() @ b.double().T, 5e-3)


@every_schedule
def test_gather_and_scatter_of_rows(schedule, seed):
    x, out = random(100, 64, dtype=torch.float16), torch.zeros(90, 64, dtype=torch.float16)
    sources, targets = torch.randint(0, 100, (32,), dtype=torch.int32), torch.randperm(90)[:32].int()
    launch("move_rows", (1,), [Descriptor(x), sources, Descriptor(out), targets], schedule, seed=seed)
    expected = torch.zeros_like(out)
    expected[targets.long()] = x[sources.long()]
    assert torch.equal(out, expected)


@every_schedule
def test_split_k_adds_with_atomics(schedule, seed):
    m, n, k = 128, 256, 448
    a, b, c = random(m, k, dtype=torch.float16), random(n, k, dtype=torch.float16), torch.zeros(m, n)
    launch("gemm_split_k", (1, 2, 3), [Descriptor(a), Descriptor(b), c, n, k], schedule, seed=seed)
    check(c, a.double() @ b.double().T, 1e-5)


@every_schedule
@pytest.mark.parametrize("name", ["gemm_roles", "gemm_roles_2_pairs"])
@pytest.mark.parametrize("sm_count", [148, 4], ids=["all_resident", "four_sms"])
def test_roles_with_launch_control(name, sm_count, schedule, seed):
    """On four SMs the later tiles come from launches that running clusters cancel."""
    m, n, k = 500, 520, 200
    a, b, c = random(m, k, dtype=torch.float16), random(k, n, dtype=torch.float16), poisoned(m, n, dtype=torch.float16)
    tiles = (4 if name == "gemm_roles" else 1) * 5
    arguments = [Descriptor(a), Descriptor(b), Descriptor(c)]
    launch(name, (tiles,), arguments, schedule, seed=seed, sm_count=sm_count)
    check(c, a.double() @ b.double(), 1e-3)


# -- block scales ----------------------------------------------------------------------------------------------------


def in_copy_order(factors: torch.Tensor) -> torch.Tensor:
    """(rows, K / vector) in the order of 512-byte blocks that tcgen05.cp.32x128b takes, each of 128 rows by 4."""
    rows, columns = factors.shape
    blocks = factors.view(torch.uint8).reshape(rows // 128, 4, 32, columns // 4, 4).permute(0, 3, 2, 1, 4).contiguous()
    return blocks.reshape(1, rows // 128, columns // 4, 2, 256)


@every_schedule
def test_mxfp8(schedule, seed):
    m, n, k = 256, 128, 384
    a, b = random(m, k, dtype=torch.float8_e4m3fn), random(n, k, dtype=torch.float8_e4m3fn)
    scale_a, scale_b = (torch.randint(124, 131, (rows, k // 32), dtype=torch.uint8) for rows in (m, n))
    c = poisoned(m, n)
    arguments = [a, b, in_copy_order(scale_a), in_copy_order(scale_b), c]
    launch("mxfp8", (2, 1), [*map(Descriptor, arguments), k], schedule, seed=seed)
    left, right = (
        values.double() * torch.exp2(scales.double() - 127).repeat_interleave(32, 1)
        for values, scales in ((a, scale_a), (b, scale_b))
    )
    check(c, left @ right.T, 1e-5)


@every_schedule
def test_nvfp4(schedule, seed):
    m, n, k = 128, 256, 512
    a, b = (torch.randint(0, 256, (rows, k // 2), dtype=torch.uint8) for rows in (m, n))
    scale_a, scale_b = ((torch.rand(rows, k // 16) * 2 + 0.1).to(torch.float8_e4m3fn) for rows in (m, n))
    c = poisoned(m, n)
    arguments = [a, b, in_copy_order(scale_a), in_copy_order(scale_b), c]
    launch("nvfp4", (1, 2), [*map(Descriptor, arguments), k], schedule, seed=seed)
    left, right = (
        E2M1[torch.stack([packed & 15, packed >> 4], -1).long()].reshape(len(packed), k).double()
        * scales.double().repeat_interleave(16, 1)
        for packed, scales in ((a, scale_a), (b, scale_b))
    )
    check(c, left @ right.T, 1e-5)


# -- attention -------------------------------------------------------------------------------------------------------


@every_schedule
@pytest.mark.parametrize("name", ["attention", "attention_hopper"])
def test_causal_attention(name, schedule, seed):
    """On Hopper the probabilities are an A operand in registers."""
    heads, length, size = 2, 384, 64
    q, k, v = (random(heads * length, size + i, dtype=torch.float16)[:, :size].contiguous() for i in range(3))
    out, sums = poisoned(heads * length, size, dtype=torch.float16), poisoned(heads * length)
    arguments = [*map(Descriptor, (q, k, v, out)), sums, size**-0.5, length]
    launch(name, (length // 128, heads), arguments, schedule, seed=seed)
    q, k, v = (x.double().view(heads, length, size) for x in (q, k, v))
    scores = (q @ k.mT * size**-0.5).masked_fill(~torch.ones(length, length).tril().bool(), -torch.inf)
    check(out.view(heads, length, size), scores.softmax(2) @ v, 2e-3)
    check(sums.view(heads, length), scores.logsumexp(2) / torch.log(torch.tensor(2.0)), 1e-5)
