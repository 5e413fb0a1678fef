"""What a kernel is launched with: its name, shape and parameters, read from TVM's lowered host function.

`LaunchSpec` is the static description; sizes that depend on the arguments stay text (`"(m + 31) // 32"`). `bind`
evaluates the host function for actual tensors and returns what `common.emulator.Emulator.launch` takes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import tvm
import tvm_ffi
from tvm import tirx

from common.host_program import (
    EncodedTensorMap,
    HostProgram,
    KernelCall,
    Pointer,
    TensorMapCall,
    TensorMapSlot,
    read_tensor_map_call,
    split_launch_tags,
)

Extent = int | str


@dataclass(frozen=True)
class PointerParameter:
    """A pointer to the first byte of the API argument at position `argument`."""

    name: str
    argument: int


@dataclass(frozen=True)
class ScalarParameter:
    """A number passed by value; `value` is the host expression that computes it."""

    name: str
    dtype: str
    value: str


@dataclass(frozen=True)
class TensorMapParameter:
    """A 128-byte tensor map passed by value, over the API argument at position `argument`."""

    name: str
    argument: int
    dtype: str
    dims: tuple[Extent, ...]
    strides: tuple[Extent, ...]
    box: tuple[Extent, ...]
    element_strides: tuple[Extent, ...]
    swizzle: Extent


Parameter = PointerParameter | ScalarParameter | TensorMapParameter


@dataclass(frozen=True)
class LaunchSpec:
    """Static launch description. `grid` counts CTAs; `parameters` follow the kernel's own order, not the API's.

    `flags` are TVM's launch tags without an extent (programmatic dependent launch, cooperative launch).
    """

    kernel: str
    grid: tuple[Extent, Extent, Extent]
    block: tuple[Extent, Extent, Extent]
    cluster: tuple[Extent, Extent, Extent]
    preferred_cluster: tuple[Extent, Extent, Extent]
    shared_bytes: Extent
    parameters: tuple[Parameter, ...]
    flags: tuple[str, ...]
    host: tirx.PrimFunc = field(repr=False, compare=False)


@dataclass(frozen=True)
class LaunchShape:
    """How many CTAs in the grid, threads in a block, CTAs in a cluster, and bytes of dynamic SMEM: all numbers."""

    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    cluster: tuple[int, int, int]
    shared_bytes: int


@dataclass(frozen=True)
class Launch:
    """A launch for actual arguments: what `Emulator.launch` takes."""

    kernel: str
    shape: LaunchShape
    args: tuple[Any, ...]


def _extent(node: Any) -> Extent:
    return int(node.value) if isinstance(node, tirx.IntImm) else str(node)


def _triple(extents: dict[str, Any], prefix: str) -> tuple:
    return tuple(extents.get(f"{prefix}.{axis}", 1) for axis in "xyz")


class _Definitions:
    """Follows variables and buffers of a host function back to the API argument that they come from."""

    def __init__(self, host: tirx.PrimFunc) -> None:
        self._packed = host.params[1]
        self._defined: dict[int, Any] = {}
        self.tensor_maps: dict[int, TensorMapCall] = {}
        self.launches: list[Any] = []
        tvm_ffi.structural_walk(
            host.body, [(tirx.Bind, self._on_bind), (tirx.DeclBuffer, self._on_buffer), (tvm.ir.Call, self._on_call)]
        )

    def _on_bind(self, node: Any) -> None:
        self._defined[hash(node.var)] = node.value

    def _on_buffer(self, node: Any) -> None:
        self._defined[hash(node.buffer)] = node.data

    def _on_call(self, node: Any) -> None:
        encoding = read_tensor_map_call(node)
        if encoding is not None:
            self.tensor_maps[hash(encoding.slot)] = encoding
        elif getattr(node.op, "name", "") == "tirx.call_ffi_kernel":
            self.launches.append(node)

    def argument_of(self, node: Any) -> int:
        """Position of the one API argument that an address expression reads. Raises NotImplementedError if none."""
        if isinstance(node, tirx.Var):
            if hash(node) not in self._defined:
                raise NotImplementedError(
                    f"{node.name} is memory that the host would have to allocate: make it a parameter of the kernel, "
                    "or, if it is shared or local, allocate it behind T.device_entry()"
                )
            return self.argument_of(self._defined[hash(node)])
        for position, inner in enumerate(getattr(node, "args", ())):
            if position == 0 and isinstance(inner, tirx.Var) and inner.same_as(self._packed):
                return int(node.args[1].value)
            if isinstance(inner, (tirx.Var, tvm.ir.Call)):
                return self.argument_of(inner)
        raise NotImplementedError(f"an address that comes from no argument: {node}")


def _tensor_map_parameter(name: str, call: TensorMapCall, definitions: _Definitions) -> TensorMapParameter:
    dims, strides, box, element_strides = (tuple(map(_extent, numbers)) for numbers in call.geometry)
    return TensorMapParameter(
        name=name,
        argument=definitions.argument_of(call.pointer),
        dtype=call.dtype,
        dims=dims,
        strides=strides,
        box=box,
        element_strides=element_strides,
        swizzle=_extent(call.modes[1]),
    )


def _parameter(value: Any, declared: Any, definitions: _Definitions) -> Parameter:
    if isinstance(value, tirx.Var) and hash(value) in definitions.tensor_maps:
        return _tensor_map_parameter(declared.name, definitions.tensor_maps[hash(value)], definitions)
    if "handle" in str(declared.ty):
        return PointerParameter(declared.name, definitions.argument_of(value))
    return ScalarParameter(declared.name, str(declared.ty), str(value))


def read_launch_spec(host_module: tvm.IRModule, device_functions: dict[str, tirx.PrimFunc]) -> LaunchSpec:
    """Read the one launch of a lowered module. Raises NotImplementedError when there is none or more than one.

    `host_module` comes from `SplitHostDevice` and `MakePackedAPI`; `device_functions` maps kernel names to their
    functions.
    """
    entries = [f for f in host_module.functions.values() if "tirx.is_entry_func" in f.attrs]
    if len(entries) != 1:
        raise NotImplementedError(f"a module with {len(entries)} entry functions: build one prim_func at a time")
    host = entries[0]
    definitions = _Definitions(host)
    if len(definitions.launches) != 1:
        raise NotImplementedError(
            f"a prim_func that launches {len(definitions.launches)} kernels: write one per kernel"
        )
    call = definitions.launches[0]
    flags, dims = split_launch_tags(call)
    boundary = len(call.args) - len(dims)
    kernel = str(call.args[0].value)
    declared = device_functions[kernel].params
    extents = dict(zip(dims, map(_extent, call.args[boundary:]), strict=True))
    return LaunchSpec(
        kernel=kernel,
        grid=_triple(extents, "blockIdx"),
        block=_triple(extents, "threadIdx"),
        cluster=_triple(extents, "clusterCtaIdx"),
        preferred_cluster=_triple(extents, "preferredClusterCtaIdx"),
        shared_bytes=extents.get("tirx.use_dyn_shared_memory", 0),
        parameters=tuple(_parameter(v, d, definitions) for v, d in zip(call.args[1:boundary], declared, strict=True)),
        flags=flags,
        host=host,
    )


def _emulator_tensor_map(encoded: EncodedTensorMap, arguments: Sequence[Any]) -> Any:
    from common.emulator import TensorMap

    return TensorMap(
        encoded.dtype if encoded.driver_dtype is None else encoded.driver_dtype,
        arguments[encoded.pointer.argument],
        encoded.dims,
        encoded.strides,
        encoded.box,
        element_strides=encoded.element_strides,
        byte_offset=encoded.pointer.byte_offset,
        interleave=encoded.interleave,
        swizzle=encoded.swizzle,
        l2_promotion=encoded.l2_promotion,
        oob_fill=encoded.oob_fill,
    )


def _emulator_argument(value: Any, arguments: Sequence[Any]) -> Any:
    if isinstance(value, TensorMapSlot):
        if value.encoded is None:
            raise NotImplementedError("a tensor map that the host function passes without encoding it")
        return _emulator_tensor_map(value.encoded, arguments)
    if isinstance(value, Pointer):
        if value.byte_offset:
            raise NotImplementedError(f"a pointer {value.byte_offset} bytes into argument {value.argument}")
        return arguments[value.argument]
    return value


def _shape(call: KernelCall) -> LaunchShape:
    extents = call.extents
    return LaunchShape(
        grid=_triple(extents, "blockIdx"),
        block=_triple(extents, "threadIdx"),
        cluster=_triple(extents, "clusterCtaIdx"),
        shared_bytes=extents.get("tirx.use_dyn_shared_memory", 0),
    )


def launch_shape(spec: LaunchSpec, arguments: Sequence[Any]) -> LaunchShape:
    """The launch shape for actual arguments, on any device: only their shapes, strides and types are read."""
    return _shape(HostProgram(spec.host).run(arguments))


def bind(spec: LaunchSpec, arguments: Sequence[Any]) -> Launch:
    """Evaluate the launch for tensors (torch CPU tensors or NumPy arrays) and numbers in the kernel's API order.

    Raises TypeError or ValueError, in TVM's words, when they do not fit the kernel's signature.
    """
    call = HostProgram(spec.host).run(arguments)
    return Launch(
        kernel=call.kernel,
        shape=_shape(call),
        args=tuple(_emulator_argument(value, arguments) for value in call.values),
    )
