import pytest
from tvm.backend.cuda.cpp.descriptors import encode_instr_descriptor_dense_uint32

from common.emulator.faults import DescriptorFault, UnsupportedInstruction
from common.emulator.hardware.instruction_descriptor import InstructionDescriptor, MmaForm
from tests.common.emulator.isa.mma_programs import instruction_bits, scaled_bits

TYPES = {
    "float16": "f16", "bfloat16": "bf16", "float8_e4m3fn": "e4m3", "float8_e5m2": "e5m2", "float32": "f32",
    "tensor_float32": "tf32", "int8": "s8", "uint8": "u8", "int32": "s32",
}  # fmt: skip


@pytest.mark.parametrize(
    "kind,d,a,b,k",
    [("f16", "float32", "float16", "float16", 16), ("f16", "float32", "bfloat16", "bfloat16", 16)]
    + [("f16", "float16", "float16", "float16", 16), ("f8f6f4", "float32", "float8_e4m3fn", "float8_e5m2", 32)]
    + [("i8", "int32", "int8", "uint8", 32)],
)
@pytest.mark.parametrize("group,m,n", [(1, 64, 32), (1, 128, 256), (2, 256, 64), (2, 128, 224)])
@pytest.mark.parametrize("transpose", [(False, False), (True, False), (False, True)])
def test_descriptors_that_tirx_encodes(kind, d, a, b, k, group, m, n, transpose):
    bits = encode_instr_descriptor_dense_uint32(
        M=m, N=n, K=k, d_dtype=d, a_dtype=a, b_dtype=b, trans_a=transpose[0], trans_b=transpose[1],
        cta_group=group, neg_a=False, neg_b=False, sat_d=False, is_sparse=False,
    )  # fmt: skip
    found = InstructionDescriptor.from_bits(int(bits), MmaForm(kind, group))
    assert (found.m, found.n, found.k) == (m, n, k)
    assert (found.a, found.b, found.d) == (TYPES[a], TYPES[b], TYPES[d])
    assert (found.transpose_a, found.transpose_b) == transpose


@pytest.mark.parametrize(
    "form,legal",
    [
        (MmaForm("f16"), [(m, n) for m in (64, 128) for n in range(8, 257, 8)]),
        (MmaForm("tf32", 2), [(m, n) for m in (128, 256) for n in range(16, 257, 16)]),
        (MmaForm("f16", 1, True), [(m, n) for m in (32, 64, 128) for n in (64, 128, 256)]),
        (MmaForm("f8f6f4", 1, True, True), [(m, n) for m in (32, 64, 128) for n in (64, 128)]),
        (MmaForm("i8"), [(m, n) for m in (64, 128) for n in (8, 16, 24, *range(32, 257, 16))]),
        (MmaForm("i8", 2), [(m, n) for m in (128, 256) for n in range(32, 257, 32)]),
        (MmaForm("mxf8f6f4", 1, scale_vector=1), [(128, n) for n in range(8, 257, 8)]),
        (MmaForm("mxf4", 2, scale_vector=2), [(m, n) for m in (128, 256) for n in range(16, 257, 16)]),
        (MmaForm("mxf8f6f4", 2, False, True, 1), [(256, n) for n in range(16, 257, 16)]),
    ],
    ids=str,
)
def test_every_shape_of_table_39(form, legal):
    accepted = []
    kinds = {"f16": "f16", "tf32": "tf32", "f8f6f4": "e5m2", "i8": "s8", "mxf8f6f4": "e5m2", "mxf4": "e2m1"}
    kind = kinds[form.kind]
    for m in range(0, 497, 16):
        for n in range(0, 257, 8):
            if form.scale_vector:
                if m % 128:
                    continue
                bits = scaled_bits(m, n, kind, kind, "ue8m0", packed=form.kind == "mxf4", sparse=form.sparse)
            else:
                d = "s32" if form.kind == "i8" else "f32"
                bits = instruction_bits(m, n, kind, kind, d, sparse=form.sparse)
            try:
                InstructionDescriptor.from_bits(bits, form)
                accepted.append((m, n))
            except DescriptorFault:
                pass
    assert accepted == legal


@pytest.mark.parametrize(
    "form,bits,message",
    [
        (MmaForm("mxf4", 1, scale_vector=2), scaled_bits(128, 64, "", "", "ue8m0", packed=True) | 1 << 31, "K = 96"),
        (
            MmaForm("f16", 1, False, True),
            instruction_bits(128, 64, "f16", "f16", "f32", sparse=True, selector=2),
            "selector",
        ),
    ],
)
def test_what_is_not_supported_says_so(form, bits, message):
    with pytest.raises(UnsupportedInstruction, match=message):
        InstructionDescriptor.from_bits(bits, form)


@pytest.mark.parametrize("bit", [0, 1, 3, 6, 24, 25, 26])
def test_reserved_bits_of_block_scaled_kinds(bit):
    bits = scaled_bits(128, 64, "e4m3", "e4m3", "ue8m0") | 1 << bit
    with pytest.raises(DescriptorFault, match=f"bits? .*{bit}|bits 0-1|bits 24-26"):
        InstructionDescriptor.from_bits(bits, MmaForm("mxf8f6f4", 1, scale_vector=1))
