"""What `meshloom scale` measured, and the answers that follow from it."""

import dataclasses
import math
import os
import statistics
from collections.abc import Sequence
from typing import Any

from ...sharding.text import align, counted, percent, seconds_text

# More devices pay if they add at least this part of what they could.
PAYS = 0.5

Range = tuple[float, float, float]  # median, lowest, highest


@dataclasses.dataclass
class Measured:
    """A mesh and what was measured of it.

    Attributes:
      sharded: the share of the parameters that a device holds.
      foretold: the seconds of a step by the plan's closed form; None if it has none.
      not_foretold: why.
      losses: of all steps, the same steps on every mesh.
      rounds: the seconds of a step in each round.
      even_rounds, slowed_rounds: the same, waiting for each step, and with a straggler.
      communication: the share of the time that devices spend in collectives.
      state: see Trials.state.
    """

    text: str
    devices: int
    processes: int
    batch_size: int
    plan: str = ""
    sharded: float = 1.0
    foretold: float | None = None
    not_foretold: str = ""
    losses: list[float] = dataclasses.field(default_factory=list)
    rounds: list[float] = dataclasses.field(default_factory=list)
    even_rounds: list[float] = dataclasses.field(default_factory=list)
    slowed_rounds: list[float] = dataclasses.field(default_factory=list)
    communication: float = 0.0
    state: dict[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def straggler_cost(self) -> float | None:
        """How many times as long a step takes with the straggler."""
        if not self.slowed_rounds:
            return None
        pairs = zip(self.slowed_rounds, self.even_rounds, strict=True)
        return statistics.median(slow / even for slow, even in pairs)


@dataclasses.dataclass(frozen=True)
class Result:
    """The meshes of a comparison; all are compared with the first.

    Attributes:
      platform: of the devices; those of a CPU share its cores.
    """

    kind: str
    steps: int
    drift: float
    straggler: float
    platform: str
    meshes: tuple[Measured, ...]

    @property
    def base(self) -> Measured:
        return self.meshes[0]

    def speedup(self, mesh: Measured, other: Measured | None = None) -> Range:
        """Returns how much faster examples are processed, by the pairs of a round."""
        base = other or self.base
        work = mesh.batch_size / base.batch_size
        found = [
            work * theirs / own
            for theirs, own in zip(base.rounds, mesh.rounds, strict=True)
        ]
        return statistics.median(found), min(found), max(found)

    def foretold_speedup(self, mesh: Measured) -> float | None:
        if mesh.foretold is None or self.base.foretold is None:
            return None
        work = mesh.batch_size / self.base.batch_size
        return work * self.base.foretold / mesh.foretold

    def efficiency(self, mesh: Measured) -> float:
        return self.speedup(mesh)[0] * self.base.devices / mesh.devices

    def drift_of(self, mesh: Measured) -> float:
        """Returns the largest relative difference of a loss from the first mesh's."""
        found = []
        for own, theirs in zip(mesh.losses, self.base.losses, strict=True):
            if own != theirs:
                found.append(abs(own - theirs) / max(abs(theirs), 1e-30))
        # A NaN on one mesh only is as different as can be.
        return max((math.inf if math.isnan(x) else x for x in found), default=0.0)

    def distance_of(self, mesh: Measured) -> float:
        """Estimates the distance of the parameters, relative to their norm."""
        pairs = zip(mesh.state["probes"], self.base.state["probes"], strict=True)
        square = statistics.fmean((a - b) ** 2 for a, b in pairs)
        return math.sqrt(square) / max(self.base.state["norm"], 1e-30)

    def has_same_bits(self, mesh: Measured) -> bool:
        return mesh.state["digest"] == self.base.state["digest"]

    @property
    def is_same(self) -> bool | None:
        """Whether all meshes train the same; None where they have other batches."""
        if self.kind == "weak":
            return None
        return all(self.drift_of(mesh) <= self.drift for mesh in self.meshes)

    def answers(self) -> list[str]:
        """Returns lines: the same state, how much faster, where it stops paying."""
        return [self._same(), self._fastest(), self._pays(), *self._notes()]

    def _same(self) -> str:
        others = self.meshes[1:]
        if self.is_same is None:
            return "Same state: not compared, each mesh has batches of another size"
        drift = max(map(self.drift_of, others))
        distance = max(map(self.distance_of, others))
        bits = sum(map(self.has_same_bits, others))
        return (
            f"Same state: {'yes' if self.is_same else 'NO'}; over "
            f"{counted(len(self.base.losses), 'step')} losses differ by at most "
            f"{drift:.1e} (limit {self.drift:.0e}), parameters by about {distance:.1e} "
            f"of their norm; {bits} of {len(others)} have the bits of {self.base.text}"
        )

    def _fastest(self) -> str:
        best = max(self.meshes, key=lambda mesh: self.speedup(mesh)[0])
        if best is self.base:
            return f"Fastest: {best.text}; nothing is faster than what it began with"
        speed, low, high = self.speedup(best)
        return (
            f"Fastest: {best.text}, {speed:.2f} times {self.base.text} ({low:.2f} to "
            f"{high:.2f} in {counted(len(best.rounds), 'round')}), "
            f"{self.efficiency(best):.0%} of what its devices could add up to"
        )

    def stops_paying(self) -> tuple[Measured, Measured] | None:
        """Returns the first mesh whose devices do not pay, and the one before it.

        For each number of devices it is the fastest mesh that counts.
        """
        best: dict[int, Measured] = {}
        for mesh in self.meshes:
            before = best.setdefault(mesh.devices, mesh)
            if self.speedup(mesh)[0] > self.speedup(before)[0]:
                best[mesh.devices] = mesh
        steps = [best[number] for number in sorted(best)]
        for before, after in zip(steps, steps[1:], strict=False):
            gain = self.speedup(after, before)[0] - 1
            if gain < PAYS * (after.devices / before.devices - 1):
                return after, before
        return None

    def _pays(self) -> str:
        most = max(mesh.devices for mesh in self.meshes)
        found = self.stops_paying()
        if found is None:
            return f"Pays up to {counted(most, 'device')}, the most that were measured"
        after, before = found
        speed = self.speedup(after, before)[0]
        needed = 1 + PAYS * (after.devices / before.devices - 1)
        return (
            f"Stops paying at {counted(after.devices, 'device')}: {after.text} is "
            f"{speed:.2f} times {before.text}; {needed:.2f} times would be half of "
            "what its further devices could add"
        )

    def _notes(self) -> list[str]:
        notes = []
        if self.platform == "cpu":
            notes.append(
                f"All devices share the {os.cpu_count()} cores of this machine: what "
                "is lost is real, what is gained is not that of more machines"
            )
        if reason := next((m.not_foretold for m in self.meshes if m.not_foretold), ""):
            notes.append(f"Not foretold where the plan knows no time: {reason}")
        return notes

    def table(self) -> str:
        """Returns all meshes as aligned text."""
        head = ["mesh", "batch", "step", "speed-up", "in rounds", "efficiency"]
        rows = [[*head, "foretold", "communication", "straggler", "drift"]]
        for mesh in self.meshes:
            speed, low, high = self.speedup(mesh)
            foretold, cost = self.foretold_speedup(mesh), mesh.straggler_cost
            rows.append(
                [
                    mesh.text,
                    str(mesh.batch_size),
                    seconds_text(statistics.median(mesh.rounds)),
                    f"{speed:.2f}",
                    f"{low:.2f}-{high:.2f}",
                    f"{self.efficiency(mesh):.0%}",
                    "-" if foretold is None else f"{foretold:.2f}",
                    percent(mesh.communication),
                    "-" if cost is None else f"{cost:.2f}",
                    "-" if self.is_same is None else f"{self.drift_of(mesh):.1e}",
                ]
            )
        return align(rows, right=range(1, len(rows[0])))

    def to_json(self) -> dict[str, Any]:
        stop = self.stops_paying()
        return {
            "format": 1,
            "kind": self.kind,
            "steps_per_round": self.steps,
            "platform": self.platform,
            "cores": os.cpu_count(),
            "straggler": self.straggler,
            "drift_limit": self.drift,
            "same_state": self.is_same,
            "stops_paying_at": None if stop is None else stop[0].text,
            "answers": self.answers(),
            "meshes": [self._mesh_json(mesh) for mesh in self.meshes],
        }

    def _mesh_json(self, mesh: Measured) -> dict[str, Any]:
        speed: Sequence[float] = self.speedup(mesh)
        names = ("median", "lowest", "highest")
        is_strong = self.is_same is not None
        drift = self.drift_of(mesh) if is_strong else None
        return {
            "mesh": mesh.text,
            "devices": mesh.devices,
            "processes": mesh.processes,
            "batch_size": mesh.batch_size,
            "plan": mesh.plan,
            "share_of_parameters_per_device": mesh.sharded,
            "step_seconds": mesh.rounds,
            "speedup": dict(zip(names, speed, strict=True)),
            "efficiency": self.efficiency(mesh),
            "communication_share": mesh.communication,
            "foretold": {
                "step_seconds": mesh.foretold,
                "speedup": self.foretold_speedup(mesh),
                "missing": mesh.not_foretold or None,
            },
            "straggler_cost": mesh.straggler_cost,
            "losses": [x if math.isfinite(x) else None for x in mesh.losses],
            "drift": drift if drift is None or math.isfinite(drift) else None,
            "distance": self.distance_of(mesh) if is_strong else None,
            "same_bits": self.has_same_bits(mesh) if is_strong else None,
        }
