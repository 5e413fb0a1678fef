"""A launch: clusters on SMs, which CTA and which path runs next, and what to do when nothing can."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from common.emulator.faults import Deadlock, LaunchError, ranges
from common.emulator.machine.blas import one_blas_thread
from common.emulator.machine.cluster_queue import ClusterQueue
from common.emulator.machine.counters import Counters
from common.emulator.machine.events import Events
from common.emulator.machine.frames import FramePool
from common.emulator.machine.mask import WARP, Mask
from common.emulator.machine.memory import FUNCTION_BASE, RESERVED_SHARED, GlobalMemory, Region
from common.emulator.machine.names import SharedNames
from common.emulator.machine.program import Program
from common.emulator.machine.thread_block import Path, ThreadBlock
from common.emulator.ptx.module import Variable

DYNAMIC_ALIGNMENT = 1024
GRID_EXTENT = (2**31 - 1, 65535, 65535)  # CUDA Programming Guide, compute capabilities
BLOCK_EXTENT = (1024, 1024, 64)
FRUITLESS = 32  # times that polling loops are let go on although nothing has happened
NAPS = 20_000  # the same while a loop that sleeps changes its registers: it may be counting, and end by itself
REPORTED = 8  # CTAs that a deadlock report describes, and that it lists as being in the same state


@dataclass(frozen=True)
class Limits:
    """What one GPU offers. Defaults: B200 (Blackwell tuning guide)."""

    sm_count: int = 148
    warps_per_sm: int = 64
    ctas_per_sm: int = 32
    registers_per_sm: int = 65536
    shared_per_sm: int = 228 * 1024
    shared_per_cta: int = 227 * 1024
    threads_per_cta: int = 1024
    cluster_size: int = 16


@dataclass(frozen=True)
class Launch:
    """The shape of a launch.

    `shared_size` counts the reserved first KB, static and dynamic SMEM of a CTA, in bytes. `registers` is how many a
    thread starts with where the kernel's directives fix it, else 0.
    """

    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    cluster: tuple[int, int, int]
    explicit_cluster: bool
    dynamic_shared: int
    limits: Limits
    shared_size: int = 0
    registers: int = 0

    @property
    def threads(self) -> int:
        return self.block[0] * self.block[1] * self.block[2]

    @property
    def cluster_size(self) -> int:
        return self.cluster[0] * self.cluster[1] * self.cluster[2]

    @property
    def clusters(self) -> tuple[int, int, int]:
        return tuple(g // c for g, c in zip(self.grid, self.cluster))

    def first_cta(self, cluster: int) -> tuple[int, int, int]:
        """%ctaid of the CTA of rank 0 of a cluster."""
        nx, ny, _ = self.clusters
        place = (cluster % nx, cluster // nx % ny, cluster // (nx * ny))
        return tuple(p * extent for p, extent in zip(place, self.cluster))

    def resident_clusters(self) -> int:
        """How many clusters the SMs hold at once, by warps, CTAs, SMEM and registers where the kernel fixes them.

        A cluster of n CTAs takes n neighbouring SMs, so that the CTAs of a pair have an SM each.
        """
        warps = -(-self.threads // WARP)
        per_sm = min(
            self.limits.ctas_per_sm,
            self.limits.warps_per_sm // warps,
            self.limits.shared_per_sm // max(self.shared_size, 1),
            self.limits.registers_per_sm // max(self.registers * warps * WARP, 1),
        )
        return max(per_sm, 1) * self.sm_groups

    @property
    def sm_groups(self) -> int:
        """How many clusters stand side by side."""
        return max(self.limits.sm_count // self.cluster_size, 1)


class Cluster:
    """CTAs that run at the same time and see one another's shared memory."""

    def __init__(self, machine: Machine, number: int, first_sm: int) -> None:
        launch = machine.launch
        self.number = number
        self.first_sm = first_sm
        self.blocks: list[ThreadBlock] = []
        cx, cy, _ = launch.cluster
        self.origin = launch.first_cta(number)
        for rank in range(launch.cluster_size):
            place = (rank % cx, rank // cx % cy, rank // (cx * cy))
            self.blocks.append(ThreadBlock(machine, self, rank, tuple(o + p for o, p in zip(self.origin, place))))
        self.units: dict[object, object] = {}

    def unit(self, kind):
        """The cluster's own instance of a piece of hardware (the cluster barrier), made on first use."""
        if kind not in self.units:
            self.units[kind] = kind(self)
        return self.units[kind]

    @property
    def finished(self) -> bool:
        return all(block.finished for block in self.blocks)


class Policy:
    """The schedule's choices: how the warps of a CTA are grouped, and which path runs.

    Warps of one group run in lockstep, as one vector. `late` makes two groups, odd warps before even ones, so that a
    missing barrier between warps is seen; `random` draws groups and turns; `early` keeps all warps together.
    """

    def __init__(self, schedule: str, generator: random.Random) -> None:
        self.schedule = schedule
        self._random = generator

    def groups(self, everyone: Mask) -> Iterator[tuple[int, Mask]]:
        warps = everyone.lanes.size // WARP
        if self.schedule == "early" or warps == 1:
            yield 0, everyone
            return
        if self.schedule == "late":
            first = np.arange(warps) % 2 == 1
        else:
            first = np.array([self._random.random() < 0.5 for _ in range(warps)])
        lanes = np.repeat(first, WARP)
        for group, mask in enumerate(everyone.split_by(lanes)):
            if mask is not None:
                yield group, mask

    def pick(self, runnable: list[Path]) -> Path:
        if self.schedule == "random":
            group = self._random.choice(runnable).group
            runnable = [path for path in runnable if path.group == group]
        return min(runnable, key=_priority)

    def block(self, blocks: list[ThreadBlock]) -> ThreadBlock:
        return self._random.choice(blocks) if self.schedule == "random" else blocks[0]


def _priority(path: Path) -> tuple[int, int, int]:
    return (path.turns, path.group, path.segment.order)


class Machine:
    """One launch from start to end. `run()` returns when the grid has finished and nothing is in flight.

    With a `prerequisite`, a launch before this one, it is a programmatic dependent launch: it may start once every CTA
    of that one has said so or exited. `late` starts it then, and lets it run before the other; `early` when the other
    is complete.
    """

    def __init__(self, program: Program, memory: GlobalMemory, launch: Launch, schedule: str, seed: int) -> None:
        generator = random.Random(seed)
        self.program = program
        self.memory = memory
        self.launch = launch
        self.schedule = schedule
        self.random = generator
        self.policy = Policy(schedule, generator)
        self.events = Events(schedule, generator)
        self.counters = Counters(program)
        self.activity = 0
        self.polls = 0
        self.ticks = 0
        self.napping = False  # since nothing else can run, a loop that sleeps has come round with other registers
        self.turn_over = False  # a path has used up its turn: it may be spinning on what a woken path would do
        self.printed: list[str] = []
        self.units: dict[object, object] = {}
        self.symbols: dict[str, Region] = {}
        self.parameters: dict[str, int] = {}
        self.shared_layout: dict[tuple[str, str], int] = {}
        self.shared_names = SharedNames()
        self.clusters: list[Cluster] = []
        self.queue = ClusterQueue(launch)
        self.finished_blocks = 0
        self.progress: Callable[[int, int], None] | None = None
        self.prerequisite: Machine | None = None
        self.has_dependent = False
        self.complete = False
        self._releasing = 0  # CTAs that do not keep dependent launches from starting
        self.frames: FramePool
        self._expired_at = -1
        self._fruitless = 0

    def tick(self) -> int:
        self.ticks += 1
        return self.ticks

    def unit(self, kind):
        """The GPU's own instance of a piece of hardware, made on first use."""
        if kind not in self.units:
            self.units[kind] = kind(self)
        return self.units[kind]

    def address_of(self, function: str, name: str) -> int:
        """Address of a symbol that is the same in every CTA: global and const variables, parameters, local offsets,
        code."""
        if (function, name) in self.program.local_offsets:
            return self.program.local_offsets[function, name]
        if name in self.parameters and function == self.program.kernel.name:
            return self.parameters[name]
        if name in self.symbols:
            return self.symbols[name].base
        name = self.program.module.aliases.get(name, name)
        return FUNCTION_BASE + self.program.function_entries[name]

    def run(self) -> None:
        """Runs this launch and those before it."""
        launches = [self]
        while launches[-1].prerequisite is not None:
            launches.append(launches[-1].prerequisite)
        for launch in launches:
            launch.frames = FramePool(launch)
        with np.errstate(all="ignore"), one_blas_thread():
            while not self.complete:
                self.step()
        for launch in launches:
            launch.counters.settle()

    # -- the loop --------------------------------------------------------------------------------------------------

    def step(self) -> None:
        """One decision; sets `complete` when there is nothing left to decide."""
        if self._prerequisite_first() and self._advance_prerequisite():
            return
        if self.schedule == "random" and self._random_choice():
            return
        ready = [block for cluster in self.clusters for block in cluster.blocks if block.runnable]
        if ready:
            self._run(self.policy.block(ready))
            return
        if self._wake() or self._complete_one() or self._start_cluster() or self._advance_prerequisite():
            return
        if self.clusters:
            self._expire_waits()
        elif self.events.pending:
            raise Deadlock(
                "\n".join(["the grid has finished, but operations in flight cannot complete:", *self._in_flight()])
            )
        else:
            self.complete = True

    def _prerequisite_first(self) -> bool:
        """Whether the schedule lets the launch before this one take a step now."""
        if self.prerequisite is None or self.prerequisite.complete:
            return False
        if self.schedule == "early" or not self.prerequisite.dependents_may_start:
            return True
        return self.schedule == "random" and self.random.random() < 0.5

    def _advance_prerequisite(self) -> bool:
        if self.prerequisite is None or self.prerequisite.complete:
            return False
        self.prerequisite.step()
        self.activity += 1
        return True

    @property
    def dependents_may_start(self) -> bool:
        clusters = self.queue.total - self.queue.cancelled
        return self._releasing == clusters * self.launch.cluster_size

    def release_dependents(self, block: ThreadBlock) -> None:
        """The CTA does not keep dependent launches from starting any more."""
        if not block.releases_dependents:
            block.releases_dependents = True
            self._releasing += 1
        self.activity += 1

    def _run(self, block: ThreadBlock) -> None:
        before, polls = len(self.clusters), self.polls
        block.run()
        if len(self.clusters) == before and block.runnable:
            self._rotate(block)
        if self.turn_over:
            self.turn_over = False
            # What a polling loop waits for may be the work of a CTA that has not started.
            polled = self.polls != polls
            self._wake() or self._complete_one() or (polled and self._start_cluster()) or self._advance_prerequisite()

    def _rotate(self, block: ThreadBlock) -> None:
        """After a full turn the next CTA is first in line."""
        if block.runnable[0].turns and block.cluster in self.clusters and len(self.clusters) > 1:
            self.clusters.remove(block.cluster)
            self.clusters.append(block.cluster)

    def _wake(self) -> bool:
        return any([block.wake() for cluster in self.clusters for block in cluster.blocks])

    def _complete_one(self) -> bool:
        if not self.events.advance():
            return False
        self.activity += 1
        return True

    def _random_choice(self) -> bool:
        """Under `random`: now and then an operation completes or a cluster starts although warps could run."""
        draw = self.random.random()
        if draw < 0.2 and self.events.pending:
            done = self._complete_one()
            self._wake()
            return done
        if draw > 0.9 and len(self.clusters) < 4:
            return self._start_cluster()
        return False

    def _start_cluster(self) -> bool:
        place = self.queue.start()
        if place is None:
            return False
        self.clusters.append(Cluster(self, *place))
        self.activity += 1
        return True

    def block_finished(self, block: ThreadBlock) -> None:
        """Called by a CTA whose last lane has exited."""
        self.release_dependents(block)
        self.counters.add_block(block)
        self.frames.release(block.slot)
        self.finished_blocks += 1
        if self.progress is not None:
            running = self.queue.total - self.queue.cancelled
            self.progress(self.finished_blocks, running * self.launch.cluster_size)
        if block.cluster.finished:
            self.clusters.remove(block.cluster)
            self.queue.finish(block.cluster.first_sm)

    def _expire_waits(self) -> None:
        """Nothing can run: waits that end by themselves do. If that changes nothing repeatedly, it is a deadlock."""
        if self._expired_at != self.activity:
            self._expired_at, self._fruitless, self.napping = self.activity, 0, False
        self._fruitless += 1
        if self._fruitless > (NAPS if self.napping else FRUITLESS):
            raise Deadlock(self._report())
        woken = [block.wake(expired=True) for cluster in self.clusters for block in cluster.blocks]
        if not any(woken):
            raise Deadlock(self._report())

    # -- reports ---------------------------------------------------------------------------------------------------

    def _report(self) -> str:
        lines = ["no warp can run and nothing that is in flight can complete"]
        alike: dict[str, list[ThreadBlock]] = {}
        for block in self.stuck_blocks():
            text = "\n".join(_describe(block))
            alike.setdefault(text.replace(f"CTA {block.ctaid}", "CTA"), []).append(block)
        for first, *others in list(alike.values())[:REPORTED]:
            lines.extend(_describe(first))
            if others:
                names = ", ".join(str(block.ctaid) for block in others[:REPORTED])
                more = ", ..." if len(others) > REPORTED else ""
                lines.append(f"  and {len(others)} more CTA{'s' * (len(others) > 1)} in the same way: {names}{more}")
        if len(alike) > REPORTED:
            lines.append(f"  ... and CTAs that are stuck in {len(alike) - REPORTED} other ways")
        lines.extend(self._in_flight())
        for unit in self.units.values():
            lines.extend(getattr(unit, "describe", list)())
        return "\n".join(lines)

    def stuck_blocks(self) -> list[ThreadBlock]:
        """The CTAs that have a blocked path, oldest cluster first."""
        return [block for cluster in self.clusters for block in cluster.blocks if block.blocked]

    def _in_flight(self) -> list[str]:
        return [f"  in flight: {operation.kind} {operation.detail}" for operation in self.events.pending]


def _describe(block: ThreadBlock) -> list[str]:
    """Who waits for what and where; paths that say the same make one entry."""
    entries: dict[tuple[str, str], Mask] = {}
    awaited: dict[tuple[str, str], np.ndarray] = {}
    for path in block.blocked:
        key = (path.wait.reason(), _where(block, path))
        entries[key] = entries[key].union(path.mask) if key in entries else path.mask
        if path.wait.awaited is not None:
            awaited[key] = awaited.get(key, False) | path.wait.awaited
    lines = []
    for (reason, where), mask in entries.items():
        lines.append(f"  CTA {block.ctaid} {_who(block, mask)} {reason}")
        lines.append(f"    at {where}")
        missing = awaited.get((reason, where))
        for (_, elsewhere), other in entries.items():
            lanes = np.flatnonzero(missing & other.lanes & ~mask.lanes) if missing is not None else ()
            if len(lanes):
                noun, verb = ("threads", "wait") if len(lanes) > 1 else ("thread", "waits")
                lines.append(f"    {noun} {ranges(lanes)} {verb} at {elsewhere}")
    return lines


def _who(block: ThreadBlock, mask: Mask) -> str:
    """`warps 0-3 wait`, or `warp 0, threads 0-15 wait` where only part of a warp is meant."""
    many = len(mask.warps) > 1
    warps = f"warp{'s' * many} {ranges(mask.warps)}"
    if block.converged(mask, None):
        return f"{warps} wait{'s' * (not many)}"
    several = mask.count > 1
    return f"{warps}, thread{'s' * several} {ranges(mask.numbers)} wait{'s' * (not several)}"


def _where(block: ThreadBlock, path: Path) -> str:
    place = block.program.place(*(path.wait.at or (path.segment, path.index)))
    return f"{place.instruction}  (PTX line {place.ptx_line}" + (f", {place.source})" if place.source else ")")


def place_shared(program: Program, dynamic: int) -> tuple[dict[tuple[str, str], int], int, int]:
    """Offsets of the shared variables a program uses, where the dynamic window starts, and the size of a CTA's shared
    memory with the reserved first KB.

    Static variables come first, in the order of their declarations, as ptxas 13.0 places them; the dynamic window
    (`extern .shared`) starts on a 1024-byte boundary after them.
    Raises LaunchError for nothing here: the size is checked by the launch.
    """
    offsets: dict[tuple[str, str], int] = {}
    place = RESERVED_SHARED
    dynamic_names = []
    for variable, keys in _shared_variables(program):
        if variable.size is None or variable.extern:
            dynamic_names += keys
            continue
        place = -(-place // variable.align) * variable.align
        offsets.update(dict.fromkeys(keys, place))
        place += variable.size
    if dynamic_names or dynamic:
        place = -(-place // DYNAMIC_ALIGNMENT) * DYNAMIC_ALIGNMENT
    for key in dynamic_names:
        offsets[key] = place
    return offsets, place, -(-(place + dynamic) // 16) * 16


def _shared_variables(program: Program) -> list[tuple[Variable, list[tuple[str, str]]]]:
    """The shared variables that a program names, in declaration order; each with its (function, name) symbols."""
    module, named = program.module, {}
    for key in dict.fromkeys(slot.key[:2] for slot in program.layout.slots if slot.source == "symbol"):
        function, name = key
        variable = module.functions[function].variables.get(name) or module.variables.get(name)
        if variable is not None and variable.space == "shared":
            named.setdefault(id(variable), (variable, []))[1].append(key)
    owners = (module, *module.functions.values())
    declared = {id(variable): place for place, variable in enumerate(v for o in owners for v in o.variables.values())}
    return sorted(named.values(), key=lambda entry: declared[id(entry[0])])


def check_launch(program: Program, launch: Launch) -> None:
    """Refuses what the driver would refuse. Raises LaunchError naming the rule."""
    limits, directives = launch.limits, program.kernel.directives
    if any(extent < 1 for extent in (*launch.grid, *launch.block, *launch.cluster)):
        raise LaunchError(f"grid {launch.grid}, block {launch.block} and cluster {launch.cluster} must be positive")
    if launch.threads > limits.threads_per_cta:
        raise LaunchError(f"a CTA has at most {limits.threads_per_cta} threads, not {launch.threads}")
    bound = int(np.prod(directives.get("maxntid", (limits.threads_per_cta,))))
    if launch.threads > bound:
        raise LaunchError(f"the kernel declares .maxntid {bound}, the launch has {launch.threads} threads per CTA")
    for name, extent in (("reqntid", launch.block), ("reqnctapercluster", launch.cluster)):
        required = (*directives.get(name, extent), 1, 1)[:3]
        if required != extent:
            raise LaunchError(f"the kernel declares .{name} {required}, the launch has {extent}")
    if launch.cluster_size > directives.get("maxclusterrank", (limits.cluster_size,))[0]:
        raise LaunchError(f"the kernel declares .maxclusterrank, the launch has clusters of {launch.cluster_size} CTAs")
    for what, extent, most in (("grid", launch.grid, GRID_EXTENT), ("block", launch.block, BLOCK_EXTENT)):
        if any(e > m for e, m in zip(extent, most)):
            raise LaunchError(f"{what} {extent} exceeds {most}")
    if launch.dynamic_shared < 0:
        raise LaunchError(f"{launch.dynamic_shared} bytes of dynamic shared memory")
    if any(g % c for g, c in zip(launch.grid, launch.cluster)):
        raise LaunchError(f"grid {launch.grid} is not a multiple of cluster {launch.cluster}")
    if launch.cluster_size > limits.cluster_size:
        raise LaunchError(f"a cluster has at most {limits.cluster_size} CTAs, not {launch.cluster_size}")
    if launch.shared_size - RESERVED_SHARED > limits.shared_per_cta:
        raise LaunchError(
            f"{launch.shared_size - RESERVED_SHARED} bytes of shared memory per CTA exceed the "
            f"{limits.shared_per_cta} a CTA can have"
        )
