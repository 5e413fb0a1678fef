"""Tensor maps as kernels see them: reading one for a copy, changing one, and the proxy in between.

`tensormap.replace` (PTX ISA 9.7.9.28), `tensormap.cp_fenceproxy` (9.7.13.16), and what `fence.proxy.tensormap::generic`
(9.7.13.4) does. The copy engine reads tensor maps through a proxy of its own, which keeps those that it has read:
except under `early`, a CTA goes on with the map that its first copy found at an address until an acquire fence names
that address. An H200 does the same. A missing release, and a missing acquire before the first use, change nothing here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from common.emulator.faults import DescriptorFault, InvalidAddress, OutOfBounds, UnsupportedInstruction
from common.emulator.hardware.tensor_map import (
    BLANK,
    DESCRIPTOR_BYTES,
    ENCODED_BYTES,
    TensorMapAccessError,
    TensorMapDescriptor,
    TensorMapError,
    replace_field,
)
from common.emulator.isa.async_issue import constant_operand, global_span, poisons
from common.emulator.isa.binder import Binder
from common.emulator.isa.load_store import addresses_of, bind_address
from common.emulator.isa.registry import Decoded, collective, instruction
from common.emulator.machine.mask import WARP
from common.emulator.machine.memory import Piece, refuse_write
from common.emulator.ptx.module import Instruction

if TYPE_CHECKING:
    from common.emulator.machine.mask import Mask
    from common.emulator.machine.thread_block import ThreadBlock

MAP_ALIGNMENT = 64
FIELD_BYTES = 8  # alignment that changing a map needs; only a copy through it needs more
WORD = DESCRIPTOR_BYTES // WARP
SCOPES = ("cta", "cluster", "gpu", "sys")
_WIDE_FIELDS = ("global_address", "global_stride")
_SCALAR_FIELDS = ("global_address", "rank")
_VECTOR_FIELDS = ("box_dim", "global_dim", "global_stride", "element_stride")
_CODED_FIELDS = ("elemtype", "interleave_layout", "swizzle_mode", "swizzle_atomicity", "fill_mode")


class _Faults:
    """A context in which what the tensor map modules refuse becomes a fault of the program."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, TensorMapAccessError):
            raise OutOfBounds(str(error), address=error.address) from None
        if isinstance(error, TensorMapError):
            raise DescriptorFault(str(error)) from None


FAULTS = _Faults()


# -- reading -------------------------------------------------------------------------------------------------------


class TensorMapCache:
    """The tensor maps that the copies of a CTA have used, by address."""

    def __init__(self, cta: ThreadBlock) -> None:
        self.kept: dict[int, TensorMapDescriptor] = {}


def read_map(cta: ThreadBlock, address: int, lane: int) -> TensorMapDescriptor:
    """The tensor map at a generic address, as a copy of this CTA finds it. Raises DescriptorFault if there is none."""
    if not poisons(cta):
        return _decode(cta, address, lane)
    kept = cta.unit(TensorMapCache).kept
    if address not in kept:
        kept[address] = _decode(cta, address, lane)
    return kept[address]


def _decode(cta: ThreadBlock, address: int, lane: int) -> TensorMapDescriptor:
    if address % MAP_ALIGNMENT:
        raise DescriptorFault(f"a tensor map must be {MAP_ALIGNMENT}-byte aligned, not at {address:#x}", lanes=[lane])
    if cta.machine.memory.region_at(address) is None:
        raise DescriptorFault(
            f"no tensor map at {address:#x}: it must be in .param, .const or .global memory",
            lanes=[lane],
            address=address,
        )
    span = global_span(cta, address, DESCRIPTOR_BYTES, MAP_ALIGNMENT, lane, writes=False)
    with FAULTS:
        return TensorMapDescriptor.from_bytes(span.bytes(DESCRIPTOR_BYTES).tobytes())


def acquire_map(cta: ThreadBlock, address: int, scope: str) -> None:
    """`fence.proxy.tensormap::generic.acquire`: the CTAs of the scope read the map at `address` anew."""
    if scope == "cta":
        blocks = [cta]
    elif scope == "cluster":
        blocks = cta.cluster.blocks
    else:
        blocks = [block for cluster in cta.machine.clusters for block in cluster.blocks]
    for block in blocks:
        block.unit(TensorMapCache).kept.pop(address, None)


# -- changing ------------------------------------------------------------------------------------------------------


@instruction("tensormap")
def decode_tensormap(inst: Instruction, b: Binder) -> Decoded:
    return _decode_copy(inst, b) if "cp_fenceproxy" in inst.modifiers else _decode_replace(inst, b)


def _decode_replace(inst: Instruction, b: Binder) -> Decoded:
    mods = b.modifiers(inst)
    mods.one_of("replace")
    mods.one_of("tile")
    field = mods.one_of(*_SCALAR_FIELDS, *_VECTOR_FIELDS, *_CODED_FIELDS)
    space = mods.optional("global", "shared::cta") or "generic"
    mods.one_of("b1024")
    kind = mods.one_of("b64" if field in _WIDE_FIELDS else "b32")
    mods.done()
    target, *ordinals, value = inst.operands
    if len(ordinals) != (field in _VECTOR_FIELDS):
        raise UnsupportedInstruction(f"tensormap.replace.{field} does not take {len(inst.operands)} operands")
    if field in _CODED_FIELDS:
        constant_operand(value)
    ordinal = constant_operand(ordinals[0]) if ordinals else None
    _, base, offset = bind_address(b, target, space)
    new = b.read(value, kind.replace("b", "u"))

    def replace(f, m, cta) -> None:
        addresses = addresses_of(f, m, base, offset)
        values = np.asarray(f[new])[m.index]
        for piece in _pieces(cta, space, addresses, m):
            _check_writable(cta, piece, m)
            for start, number in zip(piece.offsets.tolist(), values[piece.chosen].tolist()):
                memory = piece.region.data[start : start + DESCRIPTOR_BYTES]
                with FAULTS:
                    changed = replace_field(_found(memory), field, number, ordinal).to_bytes()
                memory[:ENCODED_BYTES] = np.frombuffer(changed, np.uint8)[:ENCODED_BYTES]
        cta.activity()

    return replace


def _found(memory: np.ndarray) -> TensorMapDescriptor:
    """What is to be changed: a tensor map, or zeros, on which kernels build one."""
    return TensorMapDescriptor.from_bytes(memory.tobytes()) if memory[:ENCODED_BYTES].any() else BLANK


def _pieces(cta: ThreadBlock, space: str, addresses: np.ndarray, m: Mask) -> list[Piece]:
    """Where the maps at `addresses` are, checked over their whole length."""
    cta.locate(space, addresses + (DESCRIPTOR_BYTES - FIELD_BYTES), FIELD_BYTES, m)
    return cta.locate(space, addresses, FIELD_BYTES, m)


def _check_writable(cta: ThreadBlock, piece: Piece, m: Mask) -> None:
    if piece.region is cta.local:
        raise InvalidAddress("a tensor map can be changed in global and shared memory, not in local", lanes=m.numbers)
    refuse_write(piece.region, m.numbers, piece.region.base + int(piece.offsets[0]))


def _decode_copy(inst: Instruction, b: Binder) -> Decoded:
    """`tensormap.cp_fenceproxy`: 128 bytes from shared to global memory; its release changes nothing here.

    Each lane of the warp copies a word, at its number from its own addresses, as an H200 does.
    """
    mods = b.modifiers(inst)
    for name in ("cp_fenceproxy", "global", "shared::cta", "tensormap::generic", "release", "sync", "aligned"):
        mods.one_of(name)
    mods.one_of(*SCOPES)
    mods.done()
    target, source, size = inst.operands
    if constant_operand(size) != DESCRIPTOR_BYTES:
        raise UnsupportedInstruction(f"tensormap.cp_fenceproxy copies {DESCRIPTOR_BYTES} bytes, not {size}")
    _, to, to_offset = bind_address(b, target, "global")
    _, where, where_offset = bind_address(b, source, "shared")

    def copy(f, m, cta) -> None:
        words = WORD * (m.numbers % WARP)
        (sources,) = cta.locate("shared", addresses_of(f, m, where, where_offset) + words, WORD, m)
        read = sources.region.view(WORD)[sources.offsets // WORD]
        for piece in cta.locate("global", addresses_of(f, m, to, to_offset) + words, WORD, m):
            _check_writable(cta, piece, m)
            piece.region.view(WORD)[piece.offsets // WORD] = read[piece.chosen]
        cta.activity()

    return collective(copy)
