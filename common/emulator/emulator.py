"""The emulator's front door: PTX text and host arguments in, a finished launch out."""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from operator import index as whole_number
from typing import Any

import numpy as np

from common.emulator.faults import LaunchError
from common.emulator.hardware.tensor_map import TensorMap
from common.emulator.isa.register_pool import entry_count
from common.emulator.machine.counters import Counters
from common.emulator.machine.events import SCHEDULES
from common.emulator.machine.memory import FUNCTION_BASE, GlobalMemory, Region, host_bytes
from common.emulator.machine.names import Names, SharedNames
from common.emulator.machine.program import Program, compile_kernel
from common.emulator.machine.scheduler import Launch, Limits, Machine, check_launch, place_shared
from common.emulator.ptx.module import TYPE_BYTES, Module, Relocation, Variable
from common.emulator.ptx.parser import parse

_PARSED: OrderedDict[str, Module] = OrderedDict()
_PROGRAMS: OrderedDict[tuple[str, str], Program] = OrderedDict()
_KEPT = 32  # parsed modules and programs kept for the next launch of the same text


@dataclass
class Run:
    """What a launch left behind besides its outputs.

    `counters`: see `machine.counters`. `printed`: what the kernel's printf wrote. `schedule` and `seed` repeat it.
    """

    counters: Counters
    printed: str
    schedule: str
    seed: int


@dataclass(frozen=True)
class Grid:
    """A launch: its kernel, shape and arguments, as `Emulator.launch` takes them."""

    ptx: str
    kernel: str
    grid: int | Sequence[int]
    block: int | Sequence[int]
    cluster: int | Sequence[int] | None = None
    shared_bytes: int = 0
    args: Sequence[Any] = ()
    names: Names = Names()


@dataclass(frozen=True)
class Pointers:
    """An argument: a pointer to a read-only array of the addresses of `arrays` (NumPy or torch CPU), 8 bytes each.

    Grouped products take one for all their matrices. The arrays are read and written in place; the addresses are the
    emulator's, so an array of `data_ptr()` cannot stand for it.
    """

    arrays: Sequence[Any]


class _Device:
    """The memory that launches share: the arrays in it by address and size, and variables by module."""

    def __init__(self) -> None:
        self.memory = GlobalMemory()
        self.arrays: dict[tuple[int, int], Region] = {}
        self.variables: dict[int, dict[str, Region]] = {}

    def variables_of(self, program: Program) -> dict[str, Region]:
        key = id(program.module)
        if key not in self.variables:
            self.variables[key] = _load_variables(program, self.memory)
        return self.variables[key]


@dataclass(frozen=True)
class Emulator:
    """A GPU in software. `schedule` decides when asynchronous operations complete and how warps interleave:

    - "late" (default): an asynchronous operation completes only when no warp can run: a missing wait shows;
    - "early": it completes at once, warps run in lockstep: the fastest;
    - "random": any legal order, repeatable by `seed`.
    """

    schedule: str = "late"
    seed: int = 0
    limits: Limits = field(default_factory=Limits)
    progress: Callable[[int, int], None] | None = None  # called with (CTAs finished, CTAs of the grid)

    def __post_init__(self) -> None:
        if self.schedule not in SCHEDULES:
            raise ValueError(f"schedule must be one of {', '.join(SCHEDULES)}, not {self.schedule!r}")

    def launch(
        self,
        ptx: str,
        kernel: str,
        *,
        grid: int | Sequence[int],
        block: int | Sequence[int],
        cluster: int | Sequence[int] | None = None,
        shared_bytes: int = 0,
        args: Sequence[Any] = (),
        names: Names = Names(),  # noqa: B008
    ) -> Run:
        """Runs a kernel to its end; array arguments are read and written in place.

        `grid` and `block` count CTAs and threads (x, y, z); `cluster` counts CTAs and defaults to what the PTX
        requires; `shared_bytes` is the dynamic SMEM. `args` follow the PTX parameters: arrays (NumPy or torch CPU),
        numbers, `TensorMap`s, `Pointers`, `bytes`. `names` are for messages.

        Raises PtxSyntaxError and UnsupportedInstruction for the text, LaunchError for the launch, and Fault or
        Deadlock for what the program does.
        """
        launched = Grid(ptx, kernel, grid, block, cluster, shared_bytes, args, names)
        machine = self._machine(launched, _Device())
        machine.run()
        return self._finish(machine)

    def launch_chain(self, *grids: Grid) -> list[Run]:
        """Runs grids one after the other, each a programmatic dependent launch of the one before it.

        So it is on a GPU with the launch attribute of programmatic stream serialization: a grid may start when every
        CTA of the one before has executed `griddepcontrol.launch_dependents` or exited, and its own
        `griddepcontrol.wait` waits until that one is complete. The schedule "late" starts it as soon as it may, and
        lets it run first, so that a missing wait shows; "early" starts it when the one before is complete. Each grid
        has all SMs for itself.

        The same array is the same memory in all of them, and so are the variables of a module. Raises what `launch`
        does.
        """
        device, machines = _Device(), []
        for grid in grids:
            machine = self._machine(grid, device)
            if machines:
                machine.prerequisite = machines[-1]
                machines[-1].has_dependent = True
            machines.append(machine)
        if machines:
            machines[-1].run()
        return [self._finish(machine) for machine in machines]

    def _machine(self, grid: Grid, device: _Device) -> Machine:
        program = _program(grid.ptx, grid.kernel)
        required = program.kernel.directives.get("reqnctapercluster", (1, 1, 1))
        shape = _extent(required if grid.cluster is None else grid.cluster)
        explicit = grid.cluster is not None or "reqnctapercluster" in program.kernel.directives
        shared_bytes = _whole(grid.shared_bytes)
        layout, dynamic_start, shared_size = place_shared(program, shared_bytes)
        registers = entry_count(program.kernel.directives, self.limits.registers_per_sm) or 0
        extents = _extent(grid.grid), _extent(grid.block)
        launch = Launch(*extents, shape, explicit, shared_bytes, self.limits, shared_size, registers)
        check_launch(program, launch)
        machine = Machine(program, device.memory, launch, self.schedule, self.seed)
        machine.shared_layout = layout
        machine.shared_names = SharedNames(grid.names.shared, dynamic_start)
        machine.symbols = device.variables_of(program)
        machine.parameters = _encode_parameters(program.kernel.parameters, grid.args, device, grid.names)
        machine.progress = self.progress
        return machine

    def _finish(self, machine: Machine) -> Run:
        printed = "".join(machine.printed)
        sys.stdout.write(printed)
        return Run(machine.counters, printed, self.schedule, self.seed)


def _program(ptx: str, kernel: str) -> Program:
    """Parses and decodes once; later launches of the same text reuse the result."""
    if not isinstance(ptx, str):
        raise LaunchError(f"the PTX must be text (str), not {type(ptx).__name__}")
    key = (ptx, kernel)
    if key not in _PROGRAMS:
        if ptx not in _PARSED:
            _keep(_PARSED, ptx, parse(ptx))
        _keep(_PROGRAMS, key, compile_kernel(_PARSED[ptx], kernel))
    _PROGRAMS.move_to_end(key)
    return _PROGRAMS[key]


def _keep(cache: OrderedDict, key: Any, value: Any) -> None:
    cache[key] = value
    while len(cache) > _KEPT:
        cache.popitem(last=False)


def _extent(value: int | Sequence[int]) -> tuple[int, int, int]:
    values = tuple(value) if hasattr(value, "__len__") and not isinstance(value, str) else (value,)
    if not 1 <= len(values) <= 3:
        raise LaunchError(f"an extent has one to three dimensions, not {values}")
    x, y, z = (*map(_whole, values), 1, 1)[:3]
    return x, y, z


def _whole(value: Any) -> int:
    try:
        return whole_number(value)
    except TypeError:
        raise LaunchError(f"an extent or a size is a whole number, not {value!r}") from None


def _load_variables(program: Program, memory: GlobalMemory) -> dict[str, Region]:
    """Gives the module's .global and .const variables an address and their initial values."""
    symbols: dict[str, Region] = {}
    owners = [program.module.variables] + [function.variables for function in program.module.functions.values()]
    variables = [v for owner in owners for v in owner.values() if v.space in ("global", "const")]
    for variable in variables:
        if variable.size is None:
            raise LaunchError(f"variable {variable.name} is declared extern: its size is unknown")
        initial = variable.data if variable.data is not None else bytes(variable.size)
        data = np.frombuffer(bytearray(initial), np.uint8)
        symbols[variable.name] = memory.map(
            f".{variable.space} {variable.name}", data, read_only=variable.space == "const"
        )
    for variable in variables:
        for relocation in variable.relocations:
            address = _address(program, symbols, variable, relocation)
            data = symbols[variable.name].data
            encoded = address.to_bytes(8, "little")[: relocation.size]
            data[relocation.offset : relocation.offset + relocation.size] = np.frombuffer(encoded, np.uint8)
    return symbols


def _address(program: Program, symbols: dict[str, Region], variable: Variable, relocation: Relocation) -> int:
    if relocation.symbol in symbols:
        return symbols[relocation.symbol].base + relocation.addend
    if relocation.symbol in program.function_entries:
        return FUNCTION_BASE + program.function_entries[relocation.symbol]
    raise LaunchError(f"initialiser of {variable.name} names {relocation.symbol}, which has no address")


def _encode_parameters(
    parameters: list[Variable], args: Sequence[Any], device: _Device, names: Names
) -> dict[str, int]:
    """Lays the kernel's parameters out in one read-only allocation; returns the address of each."""
    if len(args) != len(parameters):
        wanted = ", ".join(parameter.name for parameter in parameters)
        raise LaunchError(f"the kernel takes {len(parameters)} arguments ({wanted}), got {len(args)}")
    offsets, size = [], 0
    for parameter in parameters:
        size = -(-size // parameter.align) * parameter.align
        offsets.append(size)
        size += parameter.size or 0
    data = np.zeros(max(size, 16), np.uint8)
    for index, (parameter, value, offset) in enumerate(zip(parameters, args, offsets)):
        try:
            encoded = _encode(parameter, value, device, names.argument(index))
        except LaunchError as error:
            raise LaunchError(f"argument {index} ({parameter.name}): {error.message}") from None
        data[offset : offset + len(encoded)] = np.frombuffer(encoded, np.uint8)
    base = device.memory.map_parameters(data).base
    return {parameter.name: base + offset for parameter, offset in zip(parameters, offsets)}


def _encode(parameter: Variable, value: Any, device: _Device, name: str) -> bytes:
    size = parameter.size or 0
    if isinstance(value, TensorMap):
        return _encode_tensor_map(value, size, device, name)
    if isinstance(value, (bytes, bytearray)):
        if len(value) != size:
            raise LaunchError(f"needs {size} bytes, got {len(value)}")
        return bytes(value)
    if _is_array(value) or isinstance(value, Pointers):
        if size != 8:
            raise LaunchError(f"is .{parameter.type} ({size} bytes): an array is passed as an 8-byte pointer")
        place = _addresses if isinstance(value, Pointers) else _allocation
        return place(value, device, name).base.to_bytes(8, "little")
    return _encode_number(parameter, value, size)


def _is_array(value: Any) -> bool:
    return (isinstance(value, np.ndarray) and value.ndim > 0) or hasattr(value, "data_ptr")


def _allocation(value: Any, device: _Device, name: str) -> Region:
    """The allocation of an array; the same memory passed twice is one allocation."""
    data = host_bytes(value)
    key = (data.ctypes.data if data.size else id(value), data.size)
    if key not in device.arrays:
        device.arrays[key] = device.memory.map(
            f"{name} {_shape(value)}", data, read_only=not data.flags.writeable, owner=value
        )
    return device.arrays[key]


def _addresses(value: Pointers, device: _Device, name: str) -> Region:
    """A new array that holds the addresses of others."""
    bases = [_allocation(array, device, f"array {i} of {name}").base for i, array in enumerate(value.arrays)]
    return device.memory.map(f"pointers of {name}", np.array(bases, np.uint64).view(np.uint8), read_only=True)


def _shape(value: Any) -> str:
    return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"


def _encode_tensor_map(value: TensorMap, size: int, device: _Device, name: str) -> bytes:
    base = value.tensor if isinstance(value.tensor, int) else _allocation(value.tensor, device, name).base
    encoded = value.descriptor(base).to_bytes()
    if size == len(encoded):
        return encoded
    if size == 8:  # a pointer to a tensor map in global memory
        data = np.frombuffer(bytearray(encoded), np.uint8)
        region = device.memory.map(f"tensor map of {name}", data, read_only=True)
        return region.base.to_bytes(8, "little")
    raise LaunchError(f"is {size} bytes: a tensor map is {len(encoded)}")


def _encode_number(parameter: Variable, value: Any, size: int) -> bytes:
    if isinstance(value, np.generic) and value.dtype.itemsize == size and parameter.type.startswith("b"):
        return value.tobytes()
    if isinstance(value, (float, np.floating)):
        kind = {"b32": "f32", "b64": "f64"}.get(parameter.type, parameter.type)
        if kind not in ("f16", "f32", "f64") or size != TYPE_BYTES[kind]:
            shown = f".{parameter.type}" if size == TYPE_BYTES[parameter.type] else f".{parameter.type}[{size}]"
            raise LaunchError(f"is {shown}: it cannot take the float {value}; pass a number of its type, or its bytes")
        return np.array(value, {"f16": np.float16, "f32": np.float32, "f64": np.float64}[kind]).tobytes()
    if isinstance(value, (bool, int, np.integer, np.bool_)):
        if parameter.type in ("f32", "f64", "f16"):
            return _encode_number(parameter, float(value), size)
        if size not in (1, 2, 4, 8) or not -(1 << (8 * size - 1)) <= int(value) < 1 << (8 * size):
            raise LaunchError(f"is .{parameter.type} ({size} bytes): {int(value)} does not fit")
        return (int(value) & ((1 << (8 * size)) - 1)).to_bytes(size, "little")
    raise LaunchError(f"cannot encode a {type(value).__name__} as .{parameter.type}")
