"""Walks a scheduled HLO program in order and adds up its time: see program.py.

Which links an axis has, and how long a collective takes on them, is in links.py, as for
the closed form.
"""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import numpy as np

from ....sharding import hlo
from ....sharding.hlo.collectives import UNKNOWN_AXES, CollectiveOp, mesh_axes
from ....sharding.hlo.overlap import Scheduled, pairs, schedule
from ....sharding.hlo.text import Instruction, Module
from ....sharding.hlo.work import Reader, Work
from ...program.hardware import Target
from ..links import PERMUTE, bytes_sent, collective_seconds, links

COMPUTE, MEMORY = "compute", "memory"
_BRANCHES = ("branch_computations", "true_computation", "false_computation")
Key = tuple[str, str]  # a computation and an instruction of it


class Taken(NamedTuple):
    """Seconds of one run, and the links of some axes, each in one direction."""

    seconds: float
    links: tuple[str, ...]
    axes: tuple[str, ...]

    @property
    def part(self) -> str:
        return f"network, {','.join(self.axes)}"


class Cost(NamedTuple):
    """What an instruction is bound by, how long it takes, and what it does."""

    part: str
    seconds: float
    work: Work


@dataclasses.dataclass
class Run:
    """One run of a computation.

    `busy` is how long each link and the memory work, `queued` is the asynchronous work
    that they were given, and `drained` how much of that is done.
    """

    seconds: float = 0.0
    parts: dict[str, float] = dataclasses.field(default_factory=dict)
    busy: dict[str, float] = dataclasses.field(default_factory=dict)
    queued: dict[str, float] = dataclasses.field(default_factory=dict)
    drained: dict[str, float] = dataclasses.field(default_factory=dict)

    def elapse(self, parts: Mapping[str, float], busy: Mapping[str, float]) -> None:
        seconds = sum(parts.values())
        self.seconds += seconds
        _add(self.parts, parts)
        _add(self.busy, busy)
        for name, queued in self.queued.items():
            idle = seconds - busy.get(name, 0.0)
            self.drained[name] = min(queued, self.drained.get(name, 0.0) + idle)

    def start(self, channels: Iterable[str], seconds: float) -> dict[str, float]:
        """Queues work on the channels; returns how far each must drain to finish it."""
        for totals in (self.queued, self.busy):
            _add(totals, dict.fromkeys(channels, seconds))
        return {name: self.queued[name] for name in channels}

    def wait(self, marks: Mapping[str, float], part: str) -> float:
        left = (mark - self.drained.get(name, 0.0) for name, mark in marks.items())
        seconds = max(0.0, *left, 0.0)
        self.elapse({part: seconds}, {})
        return seconds


def _add(totals: dict[str, float], more: Mapping[str, float]) -> None:
    for name, count in more.items():
        totals[name] = totals.get(name, 0.0) + count


class Walk:
    """Walks the schedule of a module on a target.

    Args:
      sizes: of the axes of the mesh, the slowest network first.
      dcn: the part of each axis that crosses slices.

    Attributes:
      times: how often each computation runs.
      placed: the collectives of each instruction that runs or starts some.
      costs: of one run of each instruction, what it takes.
    """

    def __init__(
        self,
        module: Module,
        target: Target,
        sizes: dict[str, int],
        dcn: Mapping[str, int] | None,
    ):
        self._module, self._device, self._sizes = module, target.device, sizes
        self._links = links(target, sizes, dcn)
        self.reader = Reader(module)
        self.times, self._unknown = hlo.executions(module)
        self.placed: dict[Key, list[Scheduled]] = {}
        for one in schedule(module):
            self.placed.setdefault((one.computation, one.start), []).append(one)
        self.costs: dict[Key, Cost] = {}
        self._runs: dict[str, Run] = {}

    def run(self, name: str) -> Run:
        """Walks a computation, once."""
        if name in self._unknown:
            raise hlo.unknown_loop(name, self._unknown[name])
        if name in self._runs:
            return self._runs[name]
        run = self._runs[name] = Run()
        computation = self._module.computations[name]
        ends = pairs(computation)
        ends |= {
            some[0].done: start
            for (owner, start), some in self.placed.items()
            if owner == name and some[0].done
        }
        starts = {start: done for done, start in ends.items()}
        marks: dict[str, dict[str, float]] = {}
        for instruction in computation.instructions.values():
            if instruction.name in ends:
                start = ends[instruction.name]
                self.finish(run, (name, start), marks[start])
            elif instruction.name in starts:
                key = name, instruction.name
                marks[instruction.name] = self.start(run, key, starts[instruction.name])
            else:
                self.step(run, name, instruction)
        return run

    def step(self, run: Run, owner: str, instruction: Instruction) -> None:
        opcode = instruction.opcode
        if opcode == "while":
            (body,) = instruction.called("body")
            self.inner(run, self.run(body), self.times.get(body, 0), owner)
        elif opcode == "conditional":
            branches = [
                self.run(branch)
                for attribute in _BRANCHES
                for branch in instruction.called(attribute)
            ]
            slowest = max(branches, key=lambda branch: branch.seconds)
            self.inner(run, slowest, self.times[owner], owner)
        elif opcode == "call":
            (callee,) = instruction.called("to_apply")
            self.inner(run, self.run(callee), self.times[owner], owner)
        else:
            self.operate(run, (owner, instruction.name))

    def inner(self, run: Run, inner: Run, runs: int, owner: str) -> None:
        trips = runs / self.times[owner] if self.times[owner] else 0
        run.elapse(
            {part: trips * s for part, s in inner.parts.items()},
            {name: trips * s for name, s in inner.busy.items()},
        )

    def operate(self, run: Run, key: Key) -> None:
        """One operation, or a synchronous collective with what is fused to it."""
        work = self.reader.work(*key)
        compute = work.flops / self._device.flops
        memory = work.bytes / self._device.hbm_bandwidth
        part = COMPUTE if compute >= memory else MEMORY
        longest, busy, waited = max(compute, memory), {MEMORY: memory}, 0.0
        if key in self.placed:
            taken = self.taken(key)
            if taken.seconds > longest:
                part, longest = taken.part, taken.seconds
            before = {name: run.queued.get(name, 0.0) for name in taken.links}
            waited = run.wait(before, taken.part)
            busy |= dict.fromkeys(taken.links, taken.seconds)
        if longest:
            run.elapse({part: longest}, busy)
            self.costs[key] = Cost(part, waited + longest, work)

    def start(self, run: Run, key: Key, done: str) -> dict[str, float]:
        """Begins asynchronous work; returns how far its channels must drain."""
        some = self.placed.get(key)
        if some is None:
            moved = self.reader.moved(*key, done)
            return run.start([MEMORY], moved / self._device.hbm_bandwidth)
        if not some[0].done:  # a pair that runs as one operation
            self.operate(run, key)
            return {}
        taken = self.taken(key)
        return run.start(taken.links, taken.seconds)

    def finish(self, run: Run, key: Key, marks: Mapping[str, float]) -> None:
        part = self.taken(key).part if key in self.placed else MEMORY
        seconds = run.wait(marks, part)
        if seconds:
            self.costs[key] = Cost(part, seconds, Work(0.0, 0))

    def check(self) -> None:
        """Raises an error if a collective runs that the walk has not reached."""
        for (owner, name), some in self.placed.items():
            if self.times.get(owner) and owner not in self._runs:
                raise ValueError(
                    f"HLO computation {owner} runs {some[0].op.kind} {name}, but no "
                    "loop, branch, fusion or asynchronous call leads there, so its "
                    "time is not known. Who calls it must be read in hlo/overlap.py"
                )

    def taken(self, key: Key) -> Taken:
        """The links that the collectives of one instruction take."""
        found = [self.take(one.op) for one in self.placed[key]]
        links = tuple(dict.fromkeys(link for one in found for link in one.links))
        return Taken(sum(one.seconds for one in found), links, found[0].axes)

    def take(self, found: CollectiveOp) -> Taken:
        """The links that one collective takes."""
        sizes = self._sizes
        axes = mesh_axes(found, tuple(sizes), tuple(sizes.values()))
        if not axes:
            return Taken(0.0, (), axes)
        num_bytes = sum(array.num_bytes for array in found.payload)
        if axes == UNKNOWN_AXES:
            # Groups that are not rows of the mesh: over the slowest links, taking all.
            slowest = min(self._links.values(), key=lambda link: link.bandwidth)
            sent = bytes_sent(found.kind, num_bytes, max(map(len, found.groups)))
            seconds, over, ways = slowest.seconds(sent), tuple(self._links), "<>"
        else:
            kind, over = found.kind, axes
            seconds = collective_seconds(self._links, sizes, kind, axes, num_bytes)
            ways = self._directions(found, axes) if kind == PERMUTE else "<>"
        return Taken(
            seconds, tuple(f"{axis}{way}" for axis in over for way in ways), axes
        )

    def _directions(self, found: CollectiveOp, axes: tuple[str, ...]) -> str:
        """Returns which way a permute goes round: >, <, or both if not a ring."""
        size = self._sizes[axes[0]]
        if len(axes) != 1 or size == 2:
            return "<>"
        axis = list(self._sizes).index(axes[0])
        shape = tuple(self._sizes.values())
        places = np.unravel_index(np.array(found.groups), shape)[axis]
        steps = frozenset(((places[:, 1] - places[:, 0]) % size).tolist())
        return {frozenset([1]): ">", frozenset([size - 1]): "<"}.get(steps, "<>")
