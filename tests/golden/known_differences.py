"""Where the emulator and an H200 are known to differ in what is compared with a tolerance, and why.

Everything else in the golden files agrees bit for bit. A test checks that nothing differs without an entry here, and
that no entry has outlived its difference.
"""

KNOWN: dict[tuple[str, str], str] = {
    ("rounded", ".f32.f16."): (
        "mma.sync with f32 accumulators: sums that are not exact differ in the last bits (below 2^-21 of the largest "
        "sum). The tensor core aligns the products of a step to the largest and cuts them off, the emulator rounds."
    ),
    ("rounded", ".f32.bf16."): "As for f16.",
    ("rounded", ".f32.tf32."): "As for f16; the low 13 bits of operands do not count on either side.",
    ("rounded", ".f16.f16.f16.f16"): (
        "mma.sync with f16 operands and accumulators: about one sum in a thousand is on the other side of a tie, since "
        "the tensor core cuts products off before it rounds to f16."
    ),
    ("rounded", ".f16.e4m3."): (
        "mma.sync of FP8 with f16 accumulators: an H200 rounds to f16 several times along K, the emulator once (up to "
        "2^-10 of the largest sum)."
    ),
    ("rounded", ".f16.e5m2."): "As for e4m3.",
    ("wgmma_rounded", "accumulators"): (
        "wgmma, sums that are not exact: as for mma.sync below 2^-22 of the largest number added up for f16, bf16 and "
        "tf32 with f32 accumulators. Those of FP8 with f32 accumulators have 14 bits on an H200 (differences up to "
        "2^-13), even where a product of zero is added to an accumulator that has more. With f16 accumulators up to "
        "2^-10, since FP8 is rounded to f16 several times along K."
    ),
    ("approximate", ""): (
        "The approximate functions (rcp, sqrt, rsqrt, sin, cos, lg2, ex2, tanh, div with .approx or .full): the "
        "emulator rounds the exact result once, an H200 makes the errors in approximations.md. Zeros, infinities and "
        "NaNs agree (for sin and cos: NaNs)."
    ),
}
"""A sentence by (family, part of the result's name)."""
