import re

import numpy as np
import pytest
import torch
from tvm.script import tirx as T

from common.build import build
from common.launch_spec import PointerParameter, ScalarParameter, TensorMapParameter, bind, launch_shape
from tests.common.kernels import COLS, clustered, own_tensor_map, scale, tma_copy


@pytest.fixture(scope="module")
def scale_spec():
    return build(scale()).launch_spec


@pytest.fixture(scope="module")
def tma_spec():
    return build(tma_copy()).launch_spec


def scale_arguments(rows: int):
    return [torch.zeros(rows, COLS), torch.zeros(COLS), 1.5, 3, torch.zeros(rows, COLS)]


def test_static_description_keeps_symbols(scale_spec):
    assert scale_spec.kernel == "scale_kernel"
    assert scale_spec.grid == ("(m + 1) // 2", 1, 1)
    assert (scale_spec.block, scale_spec.cluster, scale_spec.shared_bytes) == ((256, 1, 1), (1, 1, 1), 0)


def test_parameters_are_in_the_kernels_order_and_point_at_api_arguments(scale_spec):
    assert scale_spec.parameters == (
        PointerParameter("X_ptr", 0),
        PointerParameter("Y_ptr", 4),
        PointerParameter("w_ptr", 1),
        ScalarParameter("m", "int32", "m"),
        ScalarParameter("n", "int32", "n"),
        ScalarParameter("s", "float32", "s"),
    )


@pytest.mark.parametrize(("rows", "ctas"), [(1, 1), (2, 1), (5, 3), (1000, 500)])
def test_bind_evaluates_symbolic_sizes(scale_spec, rows, ctas):
    arguments = scale_arguments(rows)
    launch = bind(scale_spec, arguments)
    assert launch.shape.grid == (ctas, 1, 1)
    x, y, w, m, n, s = launch.args
    assert x is arguments[0] and w is arguments[1] and y is arguments[4]
    assert (m, n, s) == (rows, 3, 1.5)


def test_bind_takes_numpy_arrays_and_scalars(scale_spec):
    arguments = [a.numpy() if isinstance(a, torch.Tensor) else a for a in scale_arguments(3)]
    arguments[2:4] = [np.float32(0.5), np.int64(7)]
    launch = bind(scale_spec, arguments)
    assert launch.args[0] is arguments[0]
    assert launch.args[3:] == (3, 7, 0.5)


@pytest.mark.parametrize(
    ("position", "value", "error", "words"),
    [
        (0, torch.zeros(5, COLS, dtype=torch.float16), TypeError, "X.dtype"),
        (0, torch.zeros(5, COLS + 1)[:, :COLS], ValueError, "X.strides"),
        (1, torch.zeros(COLS + 1), ValueError, "w.shape"),
        (4, torch.zeros(6, COLS), ValueError, "Y.shape"),
        (2, torch.zeros(1), TypeError, "argument #2"),
        (0, 1, TypeError, "argument #0"),
        (1, [0.0] * COLS, TypeError, "argument #1 is a list: pass a torch tensor"),
    ],
)
def test_bind_refuses_what_tvm_refuses(scale_spec, position, value, error, words):
    arguments = scale_arguments(5)
    arguments[position] = value
    with pytest.raises(error, match=words):
        bind(scale_spec, arguments)


@pytest.mark.parametrize(
    ("x", "shown"),
    [
        (torch.zeros(COLS, 5), f"Tensor([{COLS}, 5], float32), "),
        (torch.zeros(COLS, 5).t(), f"Tensor([5, {COLS}], float32, not contiguous: strides [1, 5]), "),
    ],
)
def test_a_refusal_shows_what_was_passed(scale_spec, x, shown):
    """TVM checks strides before shapes: of a tensor turned round it says only that it is no compact array."""
    arguments = scale_arguments(5)
    arguments[0] = x
    with pytest.raises(ValueError, match=re.escape(f"called with ({shown}Tensor([{COLS}], float32), float, int, ")):
        bind(scale_spec, arguments)


def test_bind_counts_arguments(scale_spec):
    with pytest.raises(TypeError, match="Expected 5 arguments"):
        bind(scale_spec, scale_arguments(5)[:-1])


def test_tensor_map_is_described(tma_spec):
    tensor_map = tma_spec.parameters[0]
    assert isinstance(tensor_map, TensorMapParameter)
    assert (tensor_map.argument, tensor_map.dtype) == (0, "float16")
    assert (tensor_map.dims, tensor_map.strides, tensor_map.box) == ((64, "m"), (128,), (64, 32))
    assert tma_spec.shared_bytes >= 32 * 64 * 2


def test_tensor_map_is_encoded_for_the_actual_rows(tma_spec, fake_emulator):
    a, b = torch.zeros(96, 64, dtype=torch.float16), torch.zeros(96, 64, dtype=torch.float16)
    launch = bind(tma_spec, [a, b])
    tensor_map, pointer, rows = launch.args
    dtype, tensor, dims, strides, box = tensor_map.args
    assert (dtype, dims, strides, box) == ("float16", (64, 96), (128,), (64, 32))
    assert tensor is a and pointer is b and rows == 96
    assert (tensor_map.element_strides, tensor_map.byte_offset, tensor_map.swizzle) == ((1, 1), 0, 0)
    assert launch.shape.grid == (3, 1, 1)


def test_a_tensor_map_that_the_script_encodes_itself():
    kernel = build(own_tensor_map())
    (tensor_map,) = (p for p in kernel.launch_spec.parameters if isinstance(p, TensorMapParameter))
    assert (tensor_map.argument, tensor_map.dtype, tensor_map.swizzle) == (0, "float32", 0)
    assert (tensor_map.dims, tensor_map.strides, tensor_map.box) == ((64, "m"), (256,), (64, 8))
    a, b = torch.randn(13, 64), torch.zeros(8, 64)
    kernel(a, b)
    assert torch.equal(b[:5], a[8:]) and not b[5:].any()


@pytest.mark.parametrize("scope", ["local", "global"])
def test_memory_that_no_argument_brings_is_refused(scope):
    @T.prim_func
    def kernel(out: T.Buffer((32,), "float32")):
        scratch = T.alloc_buffer((32,), "float32", scope=scope)
        T.device_entry()
        T.cta_id([1])
        lane = T.thread_id([32])
        scratch[lane] = T.float32(1)
        out[lane] = scratch[lane]

    with pytest.raises(NotImplementedError, match="scratch is memory that the host would have to allocate"):
        build(kernel)


def test_cluster_shape():
    spec = build(clustered()).launch_spec
    assert (spec.grid, spec.cluster) == ((8, 1, 1), (2, 1, 1))
    launch = bind(spec, [torch.zeros(8, 32, dtype=torch.int32)])
    assert (launch.shape.grid, launch.shape.cluster) == ((8, 1, 1), (2, 1, 1))


def test_shape_reads_sizes_and_types_alone(scale_spec):
    arguments = [a.to("meta") if isinstance(a, torch.Tensor) else a for a in scale_arguments(9)]
    shape = launch_shape(scale_spec, arguments)
    assert (shape.grid, shape.block, shape.cluster, shape.shared_bytes) == ((5, 1, 1), (256, 1, 1), (1, 1, 1), 0)
