"""Multiplicands of the matrix units in shared memory: checked at issue, loaded when the operation runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from common.emulator.faults import OutOfBounds
from common.emulator.hardware.multiplicands import Decoder
from common.emulator.hardware.operand_layout import CHUNK, PERIOD, OperandShape, step_map
from common.emulator.hardware.smem_descriptor import SmemDescriptor
from common.emulator.machine.generic_writes import require_fence
from common.emulator.machine.memory import RESERVED_SHARED

if TYPE_CHECKING:
    from common.emulator.machine.thread_block import ThreadBlock


def load_operand(
    block: ThreadBlock, descriptor: SmemDescriptor, addresses: Sequence[int], shape: OperandShape, decode: Decoder
) -> np.ndarray:
    """Float32 (rows, K of all addresses) from shared memory; an MN-major operand comes as a transposed view."""
    base = min(addresses) // PERIOD * PERIOD
    places = step_map(descriptor, tuple([address - base for address in addresses]), shape).places
    chunks = block.shared.data.view(np.complex128)[base // CHUNK :]  # a type of 16 bytes, only moved
    values = decode(chunks.take(places))
    return values.T if shape.mn_major else values


def require_operand_fence(
    block: ThreadBlock, descriptor: SmemDescriptor, address: int, shape: OperandShape, what: str
) -> None:
    """Raises MissingFence where threads have written an operand and no `fence.proxy.async` came after."""
    if block.shared.generic_writes.any:
        base = address // PERIOD * PERIOD
        require_fence(block, step_map(descriptor, (address - base,), shape).places + base // CHUNK, what)


def check_operand(block: ThreadBlock, descriptor: SmemDescriptor, address: int, shape: OperandShape, what: str) -> None:
    """Raises OutOfBounds where an operand leaves the CTA's shared memory, DescriptorFault for an impossible layout."""
    base = address // PERIOD * PERIOD
    places = step_map(descriptor, (address - base,), shape)
    first, end = base + places.first * CHUNK, base + (places.last + 1) * CHUNK
    if first < RESERVED_SHARED or end > block.shared.size:
        raise OutOfBounds(
            f"{what} at shared {address:#x} ({descriptor}) takes [{first:#x}, {end:#x}): "
            f"CTA {block.ctaid} has [{RESERVED_SHARED:#x}, {block.shared.size:#x})",
            address=address,
        )
