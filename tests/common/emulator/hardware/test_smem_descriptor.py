import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.emulator.faults import DescriptorFault, UnsupportedInstruction
from common.emulator.hardware.smem_descriptor import MODES, SmemDescriptor
from common.emulator.hardware.swizzle import Swizzle

offsets = st.integers(0, (1 << 14) - 1).map(lambda field: field << 4)


@given(offsets, offsets, offsets, st.integers(0, 7), st.sampled_from(sorted(MODES)))
def test_fields(address, lbo, sbo, base_offset, code):
    base_offset = base_offset if code else 0
    bits = address >> 4 | lbo >> 4 << 16 | sbo >> 4 << 32 | 1 << 46 | base_offset << 49 | code << 61
    descriptor = SmemDescriptor.from_bits(bits)
    assert descriptor == SmemDescriptor(address, lbo, sbo, base_offset, MODES[code])
    assert descriptor.to_bits() == bits


def test_the_base_offset_means_nothing_without_a_swizzle():
    """Triton's scale-factor copies fill it from the address."""
    assert SmemDescriptor.from_bits(1 << 46 | 5 << 49) == SmemDescriptor.from_bits(1 << 46)


def test_swizzle_codes():
    assert MODES == {
        0: Swizzle.NONE, 1: Swizzle.B128_ATOM_32B, 2: Swizzle.B128, 4: Swizzle.B64, 6: Swizzle.B32
    }  # fmt: skip


GOOD = 1 << 46 | 2 << 61


@pytest.mark.parametrize(
    "bits,field",
    [(GOOD ^ 1 << 46, "bits 46-48"), (GOOD | 1 << 47, "bits 46-48")]
    + [(GOOD | 1 << bit, "bits 53-60") for bit in range(53, 61)]
    + [(1 << 46 | code << 61, "swizzle mode") for code in (3, 5, 7)],
)
def test_illegal_fields_are_named(bits, field):
    with pytest.raises(DescriptorFault, match=field):
        SmemDescriptor.from_bits(bits)


def test_the_absolute_address_mode_is_that_of_another_chip():
    with pytest.raises(UnsupportedInstruction, match="sm_103a"):
        SmemDescriptor.from_bits(GOOD | 1 << 52)


@given(offsets, offsets, offsets, st.integers(0, 7), st.integers(0, 3))
def test_fields_of_wgmma(address, lbo, sbo, base_offset, code):
    base_offset = base_offset if code else 0
    bits = address >> 4 | lbo >> 4 << 16 | sbo >> 4 << 32 | base_offset << 49 | code << 62
    swizzle = (Swizzle.NONE, Swizzle.B128, Swizzle.B64, Swizzle.B32)[code]
    assert SmemDescriptor.from_wgmma_bits(bits) == SmemDescriptor(address, lbo, sbo, base_offset, swizzle)


@pytest.mark.parametrize(("bits", "field"), [(1 << 46, "bits 46-48"), (1 << 52, "bits 52-61"), (1 << 61, "bits 52-61")])
def test_illegal_fields_of_wgmma_are_named(bits, field):
    with pytest.raises(DescriptorFault, match=field):
        SmemDescriptor.from_wgmma_bits(bits)
