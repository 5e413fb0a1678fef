"""Which cluster starts next and on which SMs, and which ones `clusterlaunchcontrol.try_cancel` has taken away."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from common.emulator.machine.scheduler import Launch


class ClusterQueue:
    """The clusters of a grid that have not started.

    The first wave, as many as the SMs hold at once, starts for certain, although a machine may start it one by one. Of
    the clusters after it each one either starts or is cancelled, in the order of their numbers.
    """

    def __init__(self, launch: Launch) -> None:
        self.total = launch.clusters[0] * launch.clusters[1] * launch.clusters[2]
        self.cancelled = 0
        self._size = launch.cluster_size
        self._capacity = launch.resident_clusters()
        self._next = 0
        self._next_later = min(self._capacity, self.total)
        self._first_wave = self._next_later
        self._loads = [0] * launch.sm_groups

    def start(self) -> tuple[int, int] | None:
        """(number, first SM) of the cluster that starts now, on the SMs with the fewest clusters; None when there is
        none or no room."""
        if sum(self._loads) >= self._capacity:
            return None
        if self._next < self._first_wave:
            number = self._next
            self._next += 1
        elif self._next_later < self.total:
            number = self._next_later
            self._next_later += 1
        else:
            return None
        group = self._loads.index(min(self._loads))
        self._loads[group] += 1
        return number, group * self._size

    def finish(self, first_sm: int) -> None:
        """A cluster has left its SMs."""
        self._loads[first_sm // self._size] -= 1

    def cancel(self) -> int | None:
        """Takes a cluster that has not started out of the queue; its number, or None when all have started."""
        if self._next_later >= self.total:
            return None
        number = self._next_later
        self._next_later += 1
        self.cancelled += 1
        return number
