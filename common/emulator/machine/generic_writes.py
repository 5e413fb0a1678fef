"""What threads have written to shared memory and no fence has made known to the asynchronous units.

Threads reach shared memory by the generic proxy, the copy engine and the tensor core by the async proxy. Between a
write by the one and a read by the other a `fence.proxy.async` must stand (PTX ISA 8.4 and 9.7.13.4), and a GPU that
happens to do without it will not do so always. The ISA asks for the fence on the way from each write to the read. Here
a fence counts for all that threads of its cluster have written before it: what is reported is missing, but of several
fences not each one is missed. What the asynchronous units write needs no fence: who waits for it sees it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from common.emulator.faults import MissingFence

if TYPE_CHECKING:
    from common.emulator.machine.thread_block import ThreadBlock

CHUNK = 16  # bytes: no asynchronous unit reads less


class GenericWrites:
    """Of one CTA's shared memory: `chunks` tells for each 16 bytes whether threads have written them since a fence."""

    def __init__(self, size: int) -> None:
        self.chunks = np.zeros(-(-size // CHUNK), bool)
        self.any = False

    def add(self, offsets: np.ndarray) -> None:
        """Threads write at `offsets`, up to 16 bytes at each that do not cross a multiple of 16."""
        self.chunks[offsets // CHUNK] = True
        self.any = True

    def fence(self) -> None:
        if self.any:
            self.chunks[...] = False
            self.any = False

    def overwritten(self, offset: int, size: int) -> None:
        """An asynchronous unit has written these bytes."""
        if self.any:
            self.chunks[chunks_of(offset, size)] = False


def chunks_of(offset: int, size: int) -> slice:
    """The chunks that `size` bytes from `offset` on touch."""
    return slice(offset // CHUNK, -(-(offset + size) // CHUNK))


def require_fence(block: ThreadBlock, chunks: slice | np.ndarray, what: str) -> None:
    """Raises MissingFence where `what`, an asynchronous operation, reads chunks that threads have written since."""
    writes = block.shared.generic_writes
    if not writes.any:
        return
    unfenced = writes.chunks[chunks]
    if not unfenced.any():
        return
    numbers = np.arange(len(writes.chunks))[chunks]
    address = int(numbers[unfenced].min()) * CHUNK
    raise MissingFence(
        f"{what} reads shared {block.machine.shared_names.describe(address)} of CTA {block.ctaid}, which threads have "
        "written with no fence.proxy.async since: the writers need one, before the barrier that comes between",
        address=address,
    )
