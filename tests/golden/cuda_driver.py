"""Runs a case on a GPU through the CUDA driver API (libcuda, by ctypes). The driver compiles the PTX."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, byref, c_char_p, c_int, c_uint, c_uint64, c_void_p

import numpy as np

from tests.golden.case import Buffer, Case, ColumnMap, Map

_CLUSTER_DIMENSION = 4  # CUlaunchAttributeID
_MAX_DYNAMIC_SHARED = 8  # CUfunction_attribute
_ERROR_LOG, _ERROR_LOG_BYTES = 5, 6  # CUjit_option
_MAP_BYTES, _MAP_ALIGNMENT = 128, 64


class _LaunchAttribute(ctypes.Structure):
    _fields_ = [("id", c_uint), ("pad", c_uint), ("value", c_uint * 16)]


class _LaunchConfig(ctypes.Structure):
    _fields_ = [
        ("grid", c_uint * 3),
        ("block", c_uint * 3),
        ("shared_bytes", c_uint),
        ("stream", c_void_p),
        ("attributes", POINTER(_LaunchAttribute)),
        ("attribute_count", c_uint),
    ]


class DriverError(RuntimeError):
    """A call of the CUDA driver failed."""


class Gpu:
    """Device 0. Modules stay loaded; the memory of a case is freed after it."""

    def __init__(self) -> None:
        self._cuda = ctypes.CDLL("libcuda.so.1")
        self._modules: dict[str, c_void_p] = {}
        self._call("cuInit", 0)
        self._device, context = c_int(), c_void_p()
        self._call("cuDeviceGet", byref(self._device), 0)
        self._call("cuDevicePrimaryCtxRetain", byref(context), self._device)
        self._call("cuCtxSetCurrent", context)

    def _call(self, name: str, *args: object) -> None:
        code = getattr(self._cuda, name)(*args)
        if code:
            text = c_char_p()
            self._cuda.cuGetErrorString(code, byref(text))
            raise DriverError(f"{name}: {(text.value or b'').decode()} ({code})")

    def describe(self) -> dict[str, str]:
        """The device's name and compute capability, and the CUDA version of the driver."""
        name, version, major, minor = ctypes.create_string_buffer(128), c_int(), c_int(), c_int()
        self._call("cuDeviceGetName", name, 128, self._device)
        self._call("cuDriverGetVersion", byref(version))
        self._call("cuDeviceGetAttribute", byref(major), 75, self._device)
        self._call("cuDeviceGetAttribute", byref(minor), 76, self._device)
        return {
            "device": name.value.decode(),
            "compute_capability": f"{major.value}.{minor.value}",
            "cuda": f"{version.value // 1000}.{version.value % 1000 // 10}",
        }

    def load(self, ptx: str) -> c_void_p:
        """Compiles and loads a module; DriverError with the compiler's messages when that fails."""
        if ptx not in self._modules:
            module, log = c_void_p(), ctypes.create_string_buffer(1 << 14)
            options = (c_int * 2)(_ERROR_LOG, _ERROR_LOG_BYTES)
            values = (c_void_p * 2)(ctypes.addressof(log), len(log))
            try:
                self._call("cuModuleLoadDataEx", byref(module), ptx.encode() + b"\0", 2, options, values)
            except DriverError as error:
                raise DriverError(f"{error}\n{log.value.decode()}") from None
            self._modules[ptx] = module
        return self._modules[ptx]

    def run(self, case: Case) -> list[np.ndarray | None]:
        """The buffers, by argument number, after the launch."""
        memory = case.initial_memory()
        addresses = [None if held is None else self._upload(held) for held in memory]
        try:
            self._launch(case, addresses)
            for held, address in zip(memory, addresses):
                if held is not None:
                    self._call("cuMemcpyDtoH_v2", c_void_p(held.ctypes.data), address, ctypes.c_size_t(held.nbytes))
        finally:
            for address in addresses:
                if address is not None:
                    self._cuda.cuMemFree_v2(address)
        return memory

    def _upload(self, data: np.ndarray) -> c_uint64:
        address = c_uint64()
        self._call("cuMemAlloc_v2", byref(address), ctypes.c_size_t(data.nbytes))
        self._call("cuMemcpyHtoD_v2", address, c_void_p(data.ctypes.data), ctypes.c_size_t(data.nbytes))
        return address

    def _launch(self, case: Case, addresses: list[c_uint64 | None]) -> None:
        function = c_void_p()
        self._call("cuModuleGetFunction", byref(function), self.load(case.ptx), case.kernel.encode())
        if case.shared_bytes:
            self._call("cuFuncSetAttribute", function, _MAX_DYNAMIC_SHARED, case.shared_bytes)
        held = [self._argument(argument, addresses, place) for place, argument in enumerate(case.args)]
        pointers = (c_void_p * len(held))(*(ctypes.addressof(value) for value in held))
        attribute = _LaunchAttribute(id=_CLUSTER_DIMENSION)
        attribute.value[:3] = (case.cluster, 1, 1)
        config = _LaunchConfig(
            (c_uint * 3)(case.grid, 1, 1), (c_uint * 3)(case.block, 1, 1), case.shared_bytes, None, None, 0
        )
        if case.cluster > 1:
            config.attributes, config.attribute_count = ctypes.pointer(attribute), 1
        self._call("cuLaunchKernelEx", byref(config), function, pointers, None)
        self._call("cuCtxSynchronize")

    def _argument(self, argument: Buffer | Map | ColumnMap | int, addresses: list[c_uint64 | None], place: int):
        if isinstance(argument, Buffer):
            return addresses[place]
        if isinstance(argument, (Map, ColumnMap)):
            return self._encode(argument, addresses[argument.buffer].value)
        return c_uint(argument & 0xFFFF_FFFF)

    def _encode(self, m: Map | ColumnMap, base: int):
        storage = ctypes.create_string_buffer(_MAP_BYTES + _MAP_ALIGNMENT)
        skip = -ctypes.addressof(storage) % _MAP_ALIGNMENT
        encoded = (ctypes.c_char * _MAP_BYTES).from_buffer(storage, skip)
        rank = len(m.dims)
        if isinstance(m, Map):
            encoder, box = "cuTensorMapEncodeTiled", ((c_uint * rank)(*m.box),)
        else:
            corners = ((c_int * (rank - 2))(*m.lower), (c_int * (rank - 2))(*m.upper))
            encoder, box = "cuTensorMapEncodeIm2col", (*corners, m.channels, m.pixels)
        self._call(
            encoder,
            byref(encoded),
            m.dtype,
            rank,
            c_void_p(base + m.offset),
            (c_uint64 * rank)(*m.dims),
            (c_uint64 * max(rank - 1, 1))(*m.strides),
            *box,
            (c_uint * rank)(*m.element_strides),
            m.interleave,
            m.swizzle,
            0,
            m.oob_fill,
        )
        return encoded
