"""Frames: the arrays behind a CTA's registers, constants and special registers, reused from CTA to CTA.

Instructions that work lane by lane see a frame through a `Window`: the lanes of their path and no others.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from common.emulator.isa.binder import FrameLayout, Slot, constant_array, dtype_of
from common.emulator.machine.mask import WARP, LaneRange, Mask
from common.emulator.machine.memory import POISON, RANK_SHIFT, RESERVED_SHARED

if TYPE_CHECKING:
    from common.emulator.machine.scheduler import Machine
    from common.emulator.machine.thread_block import ThreadBlock


class Frame:
    """`arrays[slot]` is what an instruction sees. `banks` holds the registers by width in bytes, one row each."""

    def __init__(self, layout: FrameLayout, lanes: int, shared_constants: list[np.ndarray | None]) -> None:
        self._layout = layout
        self._neighbours: dict[tuple[int, ...], np.ndarray | None] = {}
        self._windows: dict[LaneRange, Window] = {}
        self.banks = {width: _bank(width, count, lanes) for width, count in layout.settle_rest().items()}
        self.arrays: list[np.ndarray] = [
            shared if shared is not None else self._array(slot, lanes)
            for slot, shared in zip(layout.slots, shared_constants)
        ]
        self.poison()

    def window(self, mask: Mask) -> Window | None:
        """The frame as the lanes of the mask see it; None where no view can show these lanes and no others."""
        lanes = mask.range
        if lanes is None:
            return None
        if lanes not in self._windows:
            self._windows[lanes] = Window(self.arrays, lanes)
        return self._windows[lanes]

    def neighbours(self, slots: tuple[int, ...]) -> np.ndarray | None:
        """The registers behind `slots` as one view (registers, L), where they lie side by side; else None."""
        if slots not in self._neighbours:
            self._neighbours[slots] = self._side_by_side(slots)
        return self._neighbours[slots]

    def _side_by_side(self, slots: tuple[int, ...]) -> np.ndarray | None:
        behind = [self._layout.slots[slot] for slot in slots]
        if any(slot.source != "register" for slot in behind):
            return None
        places = [self._layout.rows[slot.key] for slot in behind]
        width, first = places[0]
        if places != [(width, first + distance) for distance in range(len(slots))]:
            return None
        return self.banks[width][first : first + len(slots)]

    def poison(self) -> None:
        """Fresh registers hold no zeros: every float format reads them as NaN, a pointer is out of bounds."""
        for width, bank in self.banks.items():
            bank.view(np.uint8)[...] = POISON if width else 0

    def _array(self, slot: Slot, lanes: int) -> np.ndarray:
        layout = self._layout
        if slot.source == "register":
            width, row = layout.rows[slot.key]
            return _view(self.banks[width][row], width, slot.kind)
        if slot.source == "bundle":
            rows = layout.spacing([layout.registers[index] for index in slot.key])
            width, _ = layout.rows[slot.key[0]]
            return _view(self.banks[width][rows], width, slot.kind)
        if slot.source == "bank":
            return _view(self.banks[slot.key], slot.key, slot.kind)
        shape = (lanes, 2) if slot.kind == "b128" else lanes
        return np.zeros(shape, dtype_of(slot.kind))


class Window(dict):
    """The arrays of a frame by slot, cut down to some lanes: views, made when they are first asked for.

    The last axis becomes the lanes of the range, or two axes, (warps, 32). `every`: the mask of all of them.
    """

    def __init__(self, arrays: list[np.ndarray], lanes: LaneRange) -> None:
        super().__init__()
        self._arrays, self._lanes = arrays, lanes
        self.every = Mask(np.ones_like(self._cut(np.empty(arrays[0].shape[:1] if arrays else 0, bool))))

    def __missing__(self, slot: int) -> np.ndarray:
        view = self[slot] = self._cut(self._arrays[slot])
        return view

    def _cut(self, array: np.ndarray) -> np.ndarray:
        lanes = self._lanes
        if lanes.step == 1:
            return array if array.shape[-1] == 1 else array[..., lanes.start : lanes.stop]
        if array.shape[-1] == 1:
            return array[..., None]
        by_warp = array.reshape(*array.shape[:-1], -1, WARP)
        return by_warp[..., lanes.start // WARP : lanes.stop // WARP : lanes.step, :]


def _bank(width: int, count: int, lanes: int) -> np.ndarray:
    if width == 0:
        return np.zeros((count, lanes), np.bool_)
    if width == 16:
        return np.zeros((count, lanes, 2), np.uint64)
    return np.zeros((count, lanes), {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}[width])


def _view(row: np.ndarray, width: int, kind: str) -> np.ndarray:
    """Register rows as `kind`; a narrower kind sees the low part of each register."""
    if width == 0 or kind == "b128":
        return row
    dtype = dtype_of(kind)
    flat = (row.reshape(-1) if width == 16 else row).view(dtype)
    return flat if width == dtype.itemsize else flat[..., :: width // dtype.itemsize]


class FramePool:
    """Frames for the CTAs of one launch. A finished CTA's frame serves the next one."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._free: list[Frame] = []
        self._lanes = -(-machine.launch.threads // WARP) * WARP
        self._constants = [self._launch_constant(slot) for slot in machine.program.layout.slots]
        self._varying = [place for place, slot in enumerate(machine.program.layout.slots) if self._varies(slot)]

    def acquire(self, block: ThreadBlock) -> Frame:
        if self._free:
            frame = self._free.pop()
            frame.poison()
        else:
            frame = Frame(self._machine.program.layout, self._lanes, self._constants)
        for place in self._varying:
            slot = self._machine.program.layout.slots[place]
            frame.arrays[place][...] = self._value(slot, block)
        return frame

    def release(self, frame: Frame) -> None:
        self._free.append(frame)

    def _varies(self, slot: Slot) -> bool:
        return slot.source == "special" or (slot.source == "symbol" and self._is_shared(slot))

    def _is_shared(self, slot: Slot) -> bool:
        return slot.key[:2] in self._machine.shared_layout

    def _launch_constant(self, slot: Slot) -> np.ndarray | None:
        """What is the same in every CTA is made once."""
        if slot.source == "constant":
            return constant_array(slot.key, slot.kind, self._lanes)
        if slot.source == "constants":
            return np.stack([constant_array(bits, slot.kind, 1) for bits in slot.key])
        if slot.source == "symbol" and not self._is_shared(slot):
            function, name, offset = slot.key
            return np.full(self._lanes, self._machine.address_of(function, name) + offset, np.uint64).astype(
                dtype_of(slot.kind)
            )
        return None

    def _value(self, slot: Slot, block: ThreadBlock) -> np.ndarray | int:
        if slot.source == "symbol":
            function, name, offset = slot.key
            return self._machine.shared_layout[function, name] + offset + (block.rank << RANK_SHIFT)
        return special_register(slot.key, block).astype(dtype_of(slot.kind))


def special_register(name: str, block: ThreadBlock) -> np.ndarray:
    """Value of a special register for every lane of a CTA (PTX ISA chapter 10)."""
    launch = block.machine.launch
    lane = np.arange(block.lanes)
    base, _, axis = name.partition(".")
    if axis:
        position = "xyzw".index(axis)
        return _coordinate(base, position, block, lane)
    if base == "laneid":
        return lane % WARP
    if base.startswith("lanemask_"):
        return _lane_mask(base[-2:], lane % WARP)
    if base.startswith("reserved_smem_offset"):
        offsets = {"begin": 0, "end": RESERVED_SHARED, "cap": RESERVED_SHARED}
        return np.full(block.lanes, offsets.get(base.rsplit("_", 1)[1], 0))
    dynamic = launch.dynamic_shared
    values = {
        "warpid": lane // WARP,
        "nwarpid": launch.limits.warps_per_sm,
        "smid": block.sm,
        "nsmid": launch.limits.sm_count,
        "gridid": 0,
        "is_explicit_cluster": int(launch.explicit_cluster),
        "cluster_ctarank": block.rank,
        "cluster_nctarank": launch.cluster_size,
        "total_smem_size": block.shared.size - RESERVED_SHARED,
        "aggr_smem_size": block.shared.size,
        "dynamic_smem_size": dynamic,
        "current_graph_exec": 0,
    }
    if base.startswith(("pm", "envreg")):
        return np.zeros(block.lanes, np.int64)
    return np.broadcast_to(np.asarray(values[base], np.int64), (block.lanes,))


def _coordinate(base: str, axis: int, block: ThreadBlock, lane: np.ndarray) -> np.ndarray:
    launch = block.machine.launch
    if axis == 3:
        return np.zeros(block.lanes, np.int64)
    if base == "tid":
        x, y, _ = launch.block
        return (lane % x, lane // x % y, lane // (x * y))[axis]
    cluster = launch.cluster
    value = {
        "ntid": launch.block[axis],
        "ctaid": block.ctaid[axis],
        "nctaid": launch.grid[axis],
        "clusterid": block.ctaid[axis] // cluster[axis],
        "nclusterid": launch.grid[axis] // cluster[axis],
        "cluster_ctaid": block.ctaid[axis] % cluster[axis],
        "cluster_nctaid": cluster[axis],
    }[base]
    return np.full(block.lanes, value, np.int64)


def _lane_mask(relation: str, lane: np.ndarray) -> np.ndarray:
    bit = np.left_shift(np.uint64(1), lane.astype(np.uint64))
    below = bit - np.uint64(1)
    full = np.uint64(0xFFFF_FFFF)
    masks = {"eq": bit, "lt": below, "le": below | bit, "gt": full & ~(below | bit), "ge": full & ~below}
    return masks[relation].astype(np.int64)
