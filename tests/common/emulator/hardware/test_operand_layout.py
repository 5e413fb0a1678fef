"""Operand layouts against brute-force canonical layouts, and against what TIRx lays out."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tvm.backend.cuda.tile_primitive.tma_utils import mma_shared_layout

from common.emulator.faults import DescriptorFault
from common.emulator.hardware.operand_layout import OperandShape, chunk_map, element_addresses, step_map
from common.emulator.hardware.smem_descriptor import CODES, SmemDescriptor
from common.emulator.hardware.smem_descriptor import MODES as SMEM_MODES
from common.emulator.hardware.swizzle import Swizzle
from tests.common.emulator.isa.mma_programs import SWIZZLE_CODES
from tests.common.emulator.isa.mma_reference import canonical, swizzle
from tests.golden.operand_layouts import FILE, IMAGE, KINDS, descriptors

MODES = {name: mode for mode, code in CODES.items() for name, number in SWIZZLE_CODES.items() if number == code}
multiples = st.integers(1, 200).map(lambda chunks: 16 * chunks)


@settings(max_examples=150, deadline=None)
@given(
    st.sampled_from(sorted(MODES)), st.booleans(), st.sampled_from([1, 2, 4]), st.sampled_from([8, 24, 64]),
    st.integers(0, 300).map(lambda chunks: 16 * chunks), multiples, multiples,
)  # fmt: skip
def test_every_element_against_the_canonical_layout(name, mn_major, element, rows, start, lbo, sbo):
    shape = OperandShape(rows if element > 1 else 2 * rows, 32, element, mn_major)
    descriptor = SmemDescriptor(start, lbo, sbo, 0, MODES[name])
    if mn_major and (name == "128B-32B") != (element == 4):
        with pytest.raises(DescriptorFault, match="swizzle mode"):
            chunk_map(descriptor, shape)
        return
    offset = canonical(name, mn_major, 16 // element, lbo, sbo)
    expected = [[swizzle(name, start + offset(row, k)) for k in range(32 // element)] for row in range(shape.rows)]
    found = element_addresses(descriptor, shape)
    np.testing.assert_array_equal(found, expected)
    places = chunk_map(descriptor, shape)
    assert places.first * 16 == found.min() // 16 * 16 - start // 1024 * 1024
    assert places.last * 16 == found.max() // 16 * 16 - start // 1024 * 1024


@pytest.mark.parametrize("mode,name", [(0, "none"), (1, "32B"), (2, "64B"), (3, "128B")])
@pytest.mark.parametrize("dtype,element", [("float16", 2), ("float8_e4m3fn", 1), ("float32", 4)])
def test_k_steps_of_a_tile_that_tirx_lays_out(mode, name, dtype, element):
    """The elements of `mma_shared_layout(...)` where K-step descriptors find them."""
    rows, k = 64, 128 // element
    layout = mma_shared_layout(dtype, mode, (rows, k))
    addresses = np.array(
        [[int(layout.apply(row, column, shape=(rows, k))["m"]) * element for column in range(k)] for row in range(rows)]
    )
    shape = OperandShape(rows, 32, element, False)
    per_step = 32 // element
    span = {"none": 16, "32B": 32, "64B": 64, "128B": 128}[name]
    for step in range(4):
        start = int(addresses[0, step * per_step])
        lbo, sbo = (rows * 16, 128) if name == "none" else (16, 8 * span)
        found = element_addresses(SmemDescriptor(start, lbo, sbo, 0, MODES[name]), shape)
        np.testing.assert_array_equal(found, addresses[:, step * per_step : (step + 1) * per_step])


@pytest.mark.parametrize("mode,name", [(1, "32B"), (2, "64B"), (3, "128B")])
def test_mn_major_tile_that_tirx_lays_out(mode, name):
    """V of attention: (K, N) row-major in atoms whose columns are outermost."""
    k, n = 32, 256
    layout = mma_shared_layout("float16", mode, (k, n))
    addresses = np.array([[int(layout.apply(r, c, shape=(k, n))["m"]) * 2 for r in range(k)] for c in range(n)])
    span = {"32B": 32, "64B": 64, "128B": 128}[name]
    for step in range(2):
        start = step * 16 * span
        descriptor = SmemDescriptor(start, k * span, 8 * span, 0, MODES[name])
        found = element_addresses(descriptor, OperandShape(n, 32, 2, True))
        np.testing.assert_array_equal(found, addresses[:, 16 * step : 16 * step + 16])


def test_base_offset_is_an_unaligned_pattern():
    shape = OperandShape(64, 32, 2, False)
    aligned = element_addresses(SmemDescriptor(1024, 16, 1024, 0, Swizzle.B128), shape)
    shifted = element_addresses(SmemDescriptor(1024 + 3 * 128, 16, 1024, 3, Swizzle.B128), shape)
    np.testing.assert_array_equal(shifted, aligned + 3 * 128)


@pytest.mark.parametrize("mn_major", [False, True])
def test_steps_join_along_k(mn_major):
    shape = OperandShape(64, 32, 2, mn_major)
    addresses = (32, 64, 2048 + 96)
    joined = step_map(SmemDescriptor(0, 4096, 1024, 0, Swizzle.B128), addresses, shape).places
    axis = 0 if mn_major else 1
    parts = [
        chunk_map(SmemDescriptor(address, 4096, 1024, 0, Swizzle.B128), shape).places + address // 1024 * 64
        for address in addresses
    ]
    np.testing.assert_array_equal(joined, np.concatenate(parts, axis=axis))


@pytest.mark.parametrize("kind", KINDS)
def test_places_that_a_hopper_gpu_found(kind):
    """Starts, strides and base offsets of every sort, and the 64-byte rows of B that sparse products have."""
    places = np.load(FILE)[kind]
    mn_major = kind.endswith("mn")
    shape = OperandShape(64, 32, 2, mn_major) if kind.startswith("dense") else OperandShape(16, 64, 2, mn_major)
    for (start, lbo, sbo, base_offset, code), measured in zip(descriptors(kind), places, strict=True):
        found = element_addresses(SmemDescriptor(start, lbo, sbo, base_offset, SMEM_MODES[code]), shape)
        inside = (found >= 0) & (found < IMAGE)
        assert inside.mean() > 0.5
        np.testing.assert_array_equal(measured[inside], found[inside], f"{start} {lbo} {sbo} {base_offset} {code}")
