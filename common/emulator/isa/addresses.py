"""Address arithmetic: cvta, isspacep, mapa, getctarank (PTX ISA 9.7.9.19, .20, .23, .24).

The windows are those of `machine.memory`: global, const and param addresses are generic addresses already, shared and
local ones are offsets into a window.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from common.emulator.faults import UnsupportedInstruction
from common.emulator.isa.binder import Binder, dtype_of
from common.emulator.isa.registry import Decoded, instruction
from common.emulator.machine.memory import LOCAL_WINDOW, RANK_SHIFT, SHARED_WINDOW
from common.emulator.ptx.module import Instruction, Symbol

_WINDOW_BITS = 40
_SHARED = np.uint64(SHARED_WINDOW >> _WINDOW_BITS)
_LOCAL = np.uint64(LOCAL_WINDOW >> _WINDOW_BITS)
_SPACES = {
    "const": 0, "global": 0, "param": 0, "param::entry": 0, "local": LOCAL_WINDOW,
    "shared": SHARED_WINDOW, "shared::cta": SHARED_WINDOW, "shared::cluster": SHARED_WINDOW,
}  # fmt: skip
_RANKS = 0xFF << RANK_SHIFT


@instruction("cvta", lanewise=True)
def decode_convert_address(inst: Instruction, b: Binder) -> Decoded:
    mods = b.modifiers(inst)
    to_space = mods.take("to")
    space = mods.one_of(*_SPACES)
    mods.one_of("u64")
    mods.done()
    target, source = inst.operands
    if isinstance(source, Symbol):
        _check_space(b, source, space)
    x, d = b.read(source, "u64"), b.write(target, "u64")
    operation, base = np.subtract if to_space else np.add, np.uint64(_SPACES[space])

    def run(f, m, cta) -> None:
        m.compute(operation, f[d], f[x], base)

    def run_identity(f, m, cta) -> None:
        np.copyto(f[d], f[x], where=m.where)

    return run if base else run_identity


def _check_space(b: Binder, symbol: Symbol, space: str) -> None:
    declared = {"local_param": "local"}.get(b.space_of(symbol), b.space_of(symbol))
    if declared != space.split("::")[0]:
        raise UnsupportedInstruction(f"cvta.{space} of {symbol.name}, which is in .{declared}")


@instruction("isspacep")
def decode_is_space(inst: Instruction, b: Binder) -> Decoded:
    mods = b.modifiers(inst)
    space = mods.one_of(*_SPACES)
    mods.done()
    target, source = inst.operands
    x, p = b.read(source, "u64"), b.write(target, "pred")
    test = _TESTS[space]

    def run(f, m, cta) -> None:
        np.copyto(f[p], test(f[x], cta, m), where=m.where)

    return run


def _in_shared_cta(addresses: np.ndarray, cta, m) -> np.ndarray:
    return (addresses - np.uint64(SHARED_WINDOW)) >> np.uint64(RANK_SHIFT) == np.uint64(cta.rank)


def _in_shared_cluster(addresses: np.ndarray, cta, m) -> np.ndarray:
    return (addresses - np.uint64(SHARED_WINDOW)) >> np.uint64(RANK_SHIFT) < np.uint64(len(cta.cluster.blocks))


def _in_local(addresses: np.ndarray, cta, m) -> np.ndarray:
    return addresses >> np.uint64(_WINDOW_BITS) == _LOCAL


def _in_global(addresses: np.ndarray, cta, m) -> np.ndarray:
    """Whatever no other window claims, kernel parameters included."""
    window = addresses >> np.uint64(_WINDOW_BITS)
    return (window != _SHARED) & (window != _LOCAL) & ~_in_const(addresses, cta, m)


def _in_region(wanted: Callable[[str], bool]) -> Callable[..., np.ndarray]:
    """Constants and parameters have no window of their own here: the allocation's name tells."""

    def test(addresses: np.ndarray, cta, m) -> np.ndarray:
        result = np.zeros(addresses.shape, bool)
        active = addresses[m.index]
        for address in np.unique(active):
            region = cta.machine.memory.region_at(int(address))
            result |= (addresses == address) & (region is not None and wanted(region.name))
        return result

    return test


_in_const = _in_region(lambda name: name.startswith(".const "))
_in_parameters = _in_region(lambda name: name == "kernel parameters")
_TESTS: dict[str, Callable[..., np.ndarray]] = {
    "const": _in_const, "global": _in_global, "local": _in_local, "param": _in_parameters,
    "param::entry": _in_parameters, "shared": _in_shared_cta, "shared::cta": _in_shared_cta,
    "shared::cluster": _in_shared_cluster,
}  # fmt: skip


@instruction("mapa", lanewise=True)
def decode_map_address(inst: Instruction, b: Binder) -> Decoded:
    """The rank replaces that of the address; a rank that the cluster does not have faults when it is accessed."""
    mods = b.modifiers(inst)
    kind = _shared_address_type(mods)
    target, source, rank = inst.operands
    x, r, d = b.read(source, kind), b.read(rank, "u32"), b.write(target, kind)
    dtype = dtype_of(kind)
    offset_bits, shift = ~dtype.type(_RANKS), dtype.type(RANK_SHIFT)

    def run(f, m, cta) -> None:
        np.copyto(f[d], f[x] & offset_bits | f[r].astype(dtype) << shift, where=m.where)

    return run


@instruction("getctarank", lanewise=True)
def decode_cta_rank(inst: Instruction, b: Binder) -> Decoded:
    mods = b.modifiers(inst)
    kind = _shared_address_type(mods)
    target, source = inst.operands
    x, d = b.read(source, kind), b.write(target, "u32")
    dtype = dtype_of(kind)
    ranks, shift = dtype.type(_RANKS), dtype.type(RANK_SHIFT)

    def run(f, m, cta) -> None:
        np.copyto(f[d], (f[x] & ranks) >> shift, where=m.where, casting="same_kind")

    return run


def _shared_address_type(mods) -> str:
    """u64, or u32 for shared::cluster addresses: generic addresses are 64 bits wide. Consumes all modifiers."""
    kind = mods.one_of("u32", "u64") if mods.take("shared::cluster") else mods.one_of("u64")
    mods.done()
    return kind
