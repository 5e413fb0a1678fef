"""Runs TVM's lowered host function in Python, up to the kernel launch it makes.

TVM compiles the host half of a kernel to machine code that needs a CUDA driver. What it computes is small: it checks
the arguments, reads symbolic sizes from their shapes, encodes tensor maps and launches. Evaluating those statements
here gives the emulator exactly what a GPU would receive, argument checks and their messages included.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import tvm
import tvm_ffi
from tvm import tirx

# Fields of `tvm_struct_get` (tvm/tirx/builtin.h, TVMStructFieldKind) and the FFI type indices that it answers.
_DATA, _SHAPE, _STRIDES, _NDIM, _TYPE_CODE, _TYPE_BITS, _TYPE_LANES, _BYTE_OFFSET = 1, 2, 3, 4, 5, 6, 7, 8
_DEVICE_ID, _DEVICE_TYPE, _ANY_TYPE_INDEX, _ANY_VALUE, _INT64_ELEMENT = 9, 10, 13, 15, 17
_INT, _BOOL, _FLOAT, _DL_TENSOR = 1, 2, 3, 7
_CUDA = 2
_ENCODE_TILED = "runtime.cuTensorMapEncodeTiled"


@dataclass(frozen=True)
class Pointer:
    """Address of an argument's first byte plus `byte_offset`."""

    argument: int
    byte_offset: int = 0


@dataclass
class TensorMapSlot:
    """Stack space of one tensor map; `encoded` is the call that filled it, its arguments evaluated."""

    encoded: EncodedTensorMap | None = None


@dataclass(frozen=True)
class EncodedTensorMap:
    """Arguments of `cuTensorMapEncodeTiled`: innermost first, strides in bytes, one fewer than dimensions."""

    pointer: Pointer
    dtype: str
    dims: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    element_strides: tuple[int, ...]
    interleave: int
    swizzle: int
    l2_promotion: int
    oob_fill: int
    driver_dtype: int | None


@dataclass(frozen=True)
class KernelCall:
    """The launch that the host function makes: values of the kernel's parameters in order, and extents by tag."""

    kernel: str
    values: tuple[Any, ...]
    extents: dict[str, int]
    flags: tuple[str, ...]


@dataclass(frozen=True)
class _Tensor:
    argument: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: Any


@dataclass(frozen=True)
class _Arguments:
    values: tuple[Any, ...]


def dtype_name(tensor: Any) -> str:
    """TVM's name of a torch tensor's or NumPy array's element type."""
    return str(tensor.dtype).removeprefix("torch.")


def _describe(argument: int, value: Any) -> _Tensor:
    strides = value.stride() if hasattr(value, "stride") else tuple(s // value.itemsize for s in value.strides)
    return _Tensor(argument, tuple(value.shape), tuple(strides), tvm_ffi.dtype(dtype_name(value)))


def _signature(value: Any) -> str:
    """An argument as TVM's messages write a parameter: shape, type and, where it is not contiguous, strides."""
    if not hasattr(value, "shape"):
        return type(value).__name__
    tensor = _describe(0, value)
    axes = [axis for axis, extent in enumerate(tensor.shape) if extent != 1]
    contiguous = all(tensor.strides[axis] == prod(tensor.shape[axis + 1 :]) for axis in axes)
    strides = "" if contiguous else f", not contiguous: strides {list(tensor.strides)}"
    return f"Tensor({list(tensor.shape)}, {tensor.dtype}{strides})"


_BINARY: dict[type, Callable[[Any, Any], Any]] = {
    tirx.Add: lambda a, b: a + b,
    tirx.Sub: lambda a, b: a - b,
    tirx.Mul: lambda a, b: a * b,
    tirx.FloorDiv: lambda a, b: a // b,
    tirx.FloorMod: lambda a, b: a % b,
    tirx.Div: lambda a, b: a / b if isinstance(a, float) else _truncated(a, b),
    tirx.Mod: lambda a, b: a - b * _truncated(a, b),
    tirx.Min: min,
    tirx.Max: max,
    tirx.EQ: lambda a, b: a == b,
    tirx.NE: lambda a, b: a != b,
    tirx.LT: lambda a, b: a < b,
    tirx.LE: lambda a, b: a <= b,
    tirx.GT: lambda a, b: a > b,
    tirx.GE: lambda a, b: a >= b,
    tirx.LShift: lambda a, b: a << b,
    tirx.RShift: lambda a, b: a >> b,
    tirx.BitwiseAnd: lambda a, b: a & b,
    tirx.BitwiseOr: lambda a, b: a | b,
    tirx.BitwiseXor: lambda a, b: a ^ b,
}


def _truncated(a: int, b: int) -> int:
    """Integer division of C, which rounds towards zero."""
    return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


class HostProgram:
    """One evaluation of a host function for the arguments of one call.

    `run(arguments)` returns the `KernelCall`; it raises TypeError or ValueError with TVM's own message, and what the
    arguments are, when they do not fit the kernel's signature, NotImplementedError for a host statement that it does
    not know.
    """

    def __init__(self, function: tirx.PrimFunc) -> None:
        self._function = function
        self._values: dict[int, Any] = {}
        self._buffers: dict[int, Any] = {}
        self._arguments: tuple[Any, ...] = ()
        self._call: KernelCall | None = None

    def run(self, arguments: Sequence[Any]) -> KernelCall:
        """Evaluate the whole function for torch tensors, NumPy arrays, ints and floats, in the kernel's API order."""
        _, packed, count, _ = self._function.params
        values = tuple(value.item() if isinstance(value, np.generic) else value for value in arguments)
        self._arguments = values
        self._bind(packed, _Arguments(values))
        self._bind(count, len(arguments))
        self._execute(self._function.body)
        if self._call is None:
            raise NotImplementedError("the host function launches no kernel")
        return self._call

    def _bind(self, var: Any, value: Any) -> None:
        self._values[hash(var)] = value

    # Statements

    def _execute(self, statement: Any) -> None:
        if isinstance(statement, tirx.SeqStmt):
            for part in statement.seq:
                self._execute(part)
        elif isinstance(statement, tirx.Bind):
            self._bind(statement.var, self._value(statement.value))
        elif isinstance(statement, tirx.AttrStmt):
            self._execute(statement.body)
        elif isinstance(statement, tirx.DeclBuffer):
            self._buffers[hash(statement.buffer)] = self._value(statement.data)
        elif isinstance(statement, tirx.AssertStmt):
            if not self._value(statement.condition):
                self._refuse(statement)
        elif isinstance(statement, tirx.IfThenElse):
            self._branch(statement)
        elif isinstance(statement, tirx.Evaluate):
            self._value(statement.value)
        elif not isinstance(statement, tirx.Return):
            raise NotImplementedError(f"host statement {type(statement).__name__}: {statement}")

    def _branch(self, statement: Any) -> None:
        if self._value(statement.condition):
            self._execute(statement.then_case)
        elif statement.else_case is not None:
            self._execute(statement.else_case)

    def _refuse(self, statement: Any) -> None:
        kind = {"TypeError": TypeError, "ValueError": ValueError}.get(statement.error_kind.value, RuntimeError)
        message = "".join(str(self._value(part)) for part in statement.message_parts)
        raise kind(f"{message}\n  called with ({', '.join(map(_signature, self._arguments))})")

    # Expressions

    def _value(self, node: Any) -> Any:
        if isinstance(node, (tirx.IntImm, tirx.FloatImm, tvm.ir.StringImm)):
            return node.value
        if isinstance(node, tirx.Var):
            return self._variable(node)
        if type(node) in _BINARY:
            return _BINARY[type(node)](self._value(node.a), self._value(node.b))
        if isinstance(node, tirx.And):
            return self._value(node.a) and self._value(node.b)
        if isinstance(node, tirx.Or):
            return self._value(node.a) or self._value(node.b)
        if isinstance(node, tirx.Not):
            return not self._value(node.a)
        if isinstance(node, tirx.Cast):
            return self._cast(node)
        if isinstance(node, tirx.Select):
            return self._value(node.true_value if self._value(node.condition) else node.false_value)
        if isinstance(node, tvm.ir.Call):
            return self._call_value(node)
        raise NotImplementedError(f"host expression {type(node).__name__}: {node}")

    def _variable(self, var: Any) -> Any:
        try:
            return self._values[hash(var)]
        except KeyError:
            raise NotImplementedError(f"host variable {var} has no value before it is used") from None

    def _cast(self, node: Any) -> Any:
        value = self._value(node.value)
        name = str(node.ty)
        if name.startswith(("int", "uint")):
            return int(value)
        if name.startswith(("float", "bfloat")):
            return float(value)
        if name == "bool":
            return bool(value)
        raise NotImplementedError(f"host cast to {name}: {node}")

    def _call_value(self, node: Any) -> Any:
        name = getattr(node.op, "name", str(node.op))
        handler = _CALLS.get(name)
        if handler is None:
            raise NotImplementedError(f"host call {name}: {node}")
        return handler(self, node)

    def _if_then_else(self, node: Any) -> Any:
        condition, when_true, when_false = node.args
        return self._value(when_true if self._value(condition) else when_false)

    def _struct_get(self, node: Any) -> Any:
        owner, index, field = self._value(node.args[0]), self._value(node.args[1]), self._value(node.args[2])
        if isinstance(owner, _Arguments):
            return _argument_field(owner, index, field, node)
        if isinstance(owner, _Tensor):
            return _tensor_field(owner, field, node)
        if isinstance(owner, tuple) and field == _INT64_ELEMENT:
            return owner[index]
        raise NotImplementedError(f"host read {node}")

    def _byte_offset(self, node: Any) -> Any:
        pointer, offset = self._value(node.args[0]), self._value(node.args[1])
        return Pointer(pointer.argument, pointer.byte_offset + offset)

    def _buffer_data(self, node: Any) -> Any:
        return self._buffers[hash(node.args[0])]

    def _stack_alloca(self, node: Any) -> Any:
        if self._value(node.args[0]) != "tensormap":
            raise NotImplementedError(f"host stack space: {node}")
        return TensorMapSlot()

    def _encode_tensor_map(self, node: Any) -> int:
        call = read_tensor_map_call(node)
        dims, strides, box, element_strides = (tuple(map(self._value, numbers)) for numbers in call.geometry)
        interleave, swizzle, l2_promotion, oob_fill, driver_dtype = (self._value(mode) for mode in call.modes)
        self._value(call.slot).encoded = EncodedTensorMap(
            pointer=self._value(call.pointer),
            dtype=call.dtype,
            dims=dims,
            strides=strides,
            box=box,
            element_strides=element_strides,
            interleave=interleave,
            swizzle=swizzle,
            l2_promotion=l2_promotion,
            oob_fill=oob_fill,
            driver_dtype=None if driver_dtype < 0 else driver_dtype,
        )
        return 0

    def _call_packed(self, node: Any) -> int:
        name = self._value(node.args[0])
        if name == _ENCODE_TILED:
            return self._encode_tensor_map(node)
        if name != "__tvm_set_device":
            raise NotImplementedError(f"host call of {name}, which the emulator does not run: {node}")
        return 0

    def _launch(self, node: Any) -> int:
        if self._call is not None:
            raise NotImplementedError("a prim_func that launches more than one kernel: build one per kernel")
        flags, dims = split_launch_tags(node)
        values = [self._value(argument) for argument in node.args]
        boundary = len(values) - len(dims)
        extents = dict(zip(dims, values[boundary:], strict=True))
        self._call = KernelCall(values[0], tuple(values[1:boundary]), extents, flags)
        return 0


@dataclass(frozen=True)
class TensorMapCall:
    """A call that encodes a tensor map, all but `dtype` as expressions.

    `geometry` are the dimensions, the strides, the box and the element strides; `modes` the interleave, the swizzle,
    the L2 promotion, the fill and the driver's data type (-1: the one that `dtype` names).
    """

    slot: Any
    pointer: Any
    dtype: str
    geometry: tuple[list[Any], list[Any], list[Any], list[Any]]
    modes: tuple[Any, ...]


def read_tensor_map_call(node: Any) -> TensorMapCall | None:
    """What a call encodes: TIRx's own operator, or a script's `T.call_packed("runtime.cuTensorMapEncodeTiled", ...)`.

    None for any other call. Raises NotImplementedError when there are not as many numbers as the rank asks for.
    """
    name, attrs = getattr(node.op, "name", ""), node.attrs
    if name == "tirx.tensormap_encode_tiled":
        slot, pointer, *rest = node.args
        dtype, rank = str(attrs.descriptor_dtype), int(attrs.rank)
        modes = [attrs.interleave, attrs.swizzle, attrs.l2_promotion, attrs.oob_fill, attrs.force_cu_dtype]
        rest += [tirx.IntImm("int32", int(mode)) for mode in modes]
    elif name == "tirx.tvm_call_packed" and node.args[0].value == _ENCODE_TILED:
        _, slot, dtype, rank, pointer, *rest = node.args
        dtype, rank = str(dtype.value), int(rank.value)
        if len(rest) == 4 * rank + 3:
            rest.append(tirx.IntImm("int32", -1))
    else:
        return None
    if len(rest) != 4 * rank + 4:
        raise NotImplementedError(f"a tensor map of rank {rank} with {len(rest)} numbers: {node}")
    dims, rest = rest[:rank], rest[rank:]
    strides, rest = rest[: rank - 1], rest[rank - 1 :]
    box, element_strides, modes = rest[:rank], rest[rank : 2 * rank], rest[2 * rank :]
    return TensorMapCall(slot, pointer, dtype, (dims, strides, box, element_strides), tuple(modes))


def split_launch_tags(node: Any) -> tuple[tuple[str, ...], list[str]]:
    """Launch flags (which carry no extent) and the tags of the trailing extents of a `call_ffi_kernel`."""
    tags = [str(tag) for tag in node.attrs.launch_params]
    dims = [tag for tag in tags if tag.endswith((".x", ".y", ".z")) or tag == "tirx.use_dyn_shared_memory"]
    return tuple(tag for tag in tags if tag not in dims), dims


def _argument_field(owner: _Arguments, index: int, field: int, node: Any) -> Any:
    value = owner.values[index]
    scalar = {bool: _BOOL, int: _INT, float: _FLOAT}.get(type(value))
    if scalar is None and not hasattr(value, "shape"):
        raise TypeError(
            f"argument #{index} is a {type(value).__name__}: pass a torch tensor, a NumPy array or a number"
        )
    if field == _ANY_TYPE_INDEX:
        return _DL_TENSOR if scalar is None else scalar
    if field == _ANY_VALUE:
        return _describe(index, value) if scalar is None else value
    raise NotImplementedError(f"host read of argument {index}: {node}")


def _tensor_field(tensor: _Tensor, field: int, node: Any) -> Any:
    fields = {
        _DATA: lambda: Pointer(tensor.argument),
        _SHAPE: lambda: tensor.shape,
        _STRIDES: lambda: tensor.strides,
        _NDIM: lambda: len(tensor.shape),
        _TYPE_CODE: lambda: tensor.dtype.type_code,
        _TYPE_BITS: lambda: tensor.dtype.bits,
        _TYPE_LANES: lambda: tensor.dtype.lanes,
        _BYTE_OFFSET: lambda: 0,
        _DEVICE_ID: lambda: 0,
        _DEVICE_TYPE: lambda: _CUDA,
    }
    if field not in fields:
        raise NotImplementedError(f"host read of tensor field {field}: {node}")
    return fields[field]()


_CALLS: dict[str, Callable[[HostProgram, Any], Any]] = {
    "prim.if_then_else": HostProgram._if_then_else,
    "tirx.if_then_else": HostProgram._if_then_else,
    "tirx.tvm_struct_get": HostProgram._struct_get,
    "tirx.isnullptr": lambda program, node: program._value(node.args[0]) is None,
    "tirx.reinterpret": lambda program, node: program._value(node.args[0]),
    "tirx.handle_add_byte_offset": HostProgram._byte_offset,
    "tirx.buffer_data": HostProgram._buffer_data,
    "tirx.tvm_stack_alloca": HostProgram._stack_alloca,
    "tirx.tensormap_encode_tiled": HostProgram._encode_tensor_map,
    "tirx.tvm_call_packed": HostProgram._call_packed,
    "tirx.call_ffi_kernel": HostProgram._launch,
}
