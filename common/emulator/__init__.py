"""An emulator that executes compiled PTX on a CPU. See `Emulator.launch` and `Emulator.launch_chain`."""

from common.emulator.emulator import Emulator, Grid, Pointers, Run
from common.emulator.faults import (
    BarrierFault,
    Deadlock,
    DescriptorFault,
    DivergenceFault,
    EmulatorError,
    Fault,
    InvalidAddress,
    LaunchError,
    Misaligned,
    MissingFence,
    OutOfBounds,
    ProgramTrap,
    PtxSyntaxError,
    TensorMemoryFault,
    UnsupportedInstruction,
)
from common.emulator.hardware.tensor_map import TensorMap

__all__ = [
    "BarrierFault",
    "Deadlock",
    "DescriptorFault",
    "DivergenceFault",
    "Emulator",
    "EmulatorError",
    "Fault",
    "Grid",
    "InvalidAddress",
    "LaunchError",
    "Misaligned",
    "MissingFence",
    "OutOfBounds",
    "Pointers",
    "ProgramTrap",
    "PtxSyntaxError",
    "Run",
    "TensorMap",
    "TensorMemoryFault",
    "UnsupportedInstruction",
]
