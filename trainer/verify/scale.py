"""`meshloom scale`: the same training on more devices and processes, measured together.

All meshes are alive at once and take turns: in each round every mesh trains a few
steps, in another order than in the round before, so that what else the machine does
slows all of them alike. Speed is compared within a round.
"""

import contextlib
import dataclasses
import json
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

from ...launch.atomic_file import replace_text
from ...launch.target import free_port
from . import scale_jobs
from .certify_meshes import Machine, ProcessMesh, find_machine
from .scale_result import Measured, Result

FILE, PICTURE = "scale.json", "scale.svg"

Kind = Literal["strong", "weak"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scale:
    """What is measured.

    Attributes:
      configs, sets: the values of --config and --set, as for `meshloom train`.
      batch_size: of the config; with "weak" that of the first mesh, and larger on more
        devices.
      meshes: the first is what others are compared with.
      workdir: a new folder for the result and the logs of the processes.
      rounds, steps: each mesh trains so many steps in so many rounds.
      straggler: how much longer than the others one process takes for a step, to
        measure what that costs.
      drift: the largest relative difference of losses that counts as the same.
      seconds: how long a request to a process may take.
      log: receives one line of progress at a time.
    """

    configs: tuple[str, ...]
    sets: tuple[str, ...]
    batch_size: int
    meshes: tuple[ProcessMesh, ...]
    workdir: Path
    kind: Kind = "strong"
    rounds: int = 5
    steps: int = 4
    straggler: float = 1.5
    drift: float = 1e-5
    seconds: float = 1800.0
    platforms: str = ""
    log: Callable[[str], None] = print

    def __post_init__(self):
        for name in ("rounds", "steps"):
            if getattr(self, name) < 1:
                raise ValueError(f"--{name} must be >= 1, got {getattr(self, name)}")
        if not self.straggler > 1:
            raise ValueError(f"--straggler must be > 1, got {self.straggler:g}")
        if not self.drift >= 0:
            raise ValueError(f"--drift must be >= 0, got {self.drift}")
        if len(self.meshes) < 2:
            raise ValueError(
                "--meshes: at least two are compared with each other; with one, "
                "`meshloom train` shows the speed"
            )
        keys = [mesh.key for mesh in self.meshes]
        for mesh in self.meshes:
            if keys.count(mesh.key) > 1:
                raise ValueError(f"mesh {mesh.text!r} is given twice; remove one")
        for mesh in self.meshes if self.kind == "weak" else ():
            if self.batch_size * mesh.devices % self.meshes[0].devices:
                raise ValueError(
                    f"--weak: mesh {mesh.text!r} has {mesh.devices} devices, and a "
                    f"batch of {self.batch_size} on {self.meshes[0].devices} does not "
                    "scale to them. Choose a batch_size that the first mesh divides."
                )
        if self.workdir.exists() and any(self.workdir.iterdir()):
            raise ValueError(
                f"{self.workdir} is not empty. Remove it, or pass another --workdir."
            )

    def batch_of(self, mesh: ProcessMesh) -> int:
        if self.kind == "strong":
            return self.batch_size
        return self.batch_size * mesh.devices // self.meshes[0].devices

    def run(self) -> Result:
        """Measures; writes the result as JSON and as a picture, and returns it."""
        from .scale_plot import svg

        with contextlib.ExitStack() as stack:
            machine = self._machine()
            jobs = self._start(machine, stack)
            found = {mesh.text: self._prepare(mesh, jobs) for mesh in self.meshes}
            self._rounds(found, jobs)
            self._after(found, jobs)
        result = Result(
            kind=self.kind,
            steps=self.steps,
            drift=self.drift,
            straggler=self.straggler,
            platform=machine.platform,
            meshes=tuple(found.values()),
        )
        document = json.dumps(result.to_json(), indent=1) + "\n"
        replace_text(self.workdir / FILE, document)
        replace_text(self.workdir / PICTURE, svg(result))
        return result

    @property
    def _largest(self) -> dict[int, ProcessMesh]:
        """Returns the mesh with the most devices for each number of processes."""
        found: dict[int, ProcessMesh] = {}
        for mesh in self.meshes:
            before = found.setdefault(mesh.processes, mesh)
            if mesh.devices > before.devices:
                found[mesh.processes] = mesh
        return found

    def _machine(self) -> Machine:
        largest = self._largest
        machine = find_machine(list(largest.values()), self.log, self.platforms)
        if machine != Machine() and len(largest) > 1:
            raise ValueError(
                f"--meshes: jobs of {', '.join(map(str, largest))} processes cannot "
                f"share the {machine.platform} devices here. Measure each number of "
                "processes by itself, or set JAX_PLATFORMS=cpu."
            )
        return machine

    def _start(
        self, machine: Machine, stack: contextlib.ExitStack
    ) -> dict[int, scale_jobs.Job]:
        """Starts a job for each number of processes, with devices for its meshes."""
        jobs, ports = {}, set()
        for number, largest in self._largest.items():
            port = free_port(ports)
            ports.add(port)
            meshes = [mesh for mesh in self.meshes if mesh.processes == number]
            spec = {
                "configs": self.configs,
                "sets": self.sets,
                "meshes": {
                    mesh.text: (mesh.text.partition("@")[0], self.batch_of(mesh))
                    for mesh in meshes
                },
            }
            jobs[number] = stack.enter_context(
                scale_jobs.Job(
                    spec,
                    machine.environments(largest, port),
                    self.workdir / f"logs-{number}",
                    self.seconds,
                )
            )
        return jobs

    def _prepare(self, mesh: ProcessMesh, jobs: dict[int, scale_jobs.Job]) -> Measured:
        self.log(f"{mesh.text}: compiling ...")
        try:
            answers = jobs[mesh.processes].ask("prepare", mesh.text)
            # Not timed: the first steps load what later ones find.
            warm = jobs[mesh.processes].ask("steps", mesh.text, 0, self.steps)
        except ValueError as error:
            raise ValueError(f"mesh {mesh.text!r}: {error}") from error
        found = Measured(
            text=mesh.text,
            devices=mesh.devices,
            processes=mesh.processes,
            batch_size=self.batch_of(mesh),
            plan=answers[0]["plan"],
            sharded=answers[0]["sharded"],
            foretold=answers[0]["foretold"],
            not_foretold=answers[0]["not_foretold"],
        )
        found.losses += warm[0]["losses"]
        return found

    def _rounds(
        self, found: dict[str, Measured], jobs: dict[int, scale_jobs.Job]
    ) -> None:
        for number in range(self.rounds):
            self.log(f"round {number + 1} of {self.rounds} ...")
            first = self.steps * (number + 1)
            for mesh in _rotated(self.meshes, number):
                answers = jobs[mesh.processes].ask(
                    "steps", mesh.text, first, self.steps
                )
                measured = found[mesh.text]
                measured.losses += answers[0]["losses"]
                slowest = max(answer["seconds"] for answer in answers)
                measured.rounds.append(slowest / self.steps)

    def _after(
        self, found: dict[str, Measured], jobs: dict[int, scale_jobs.Job]
    ) -> None:
        """Measures what disturbs the speed, once the speed has been measured."""
        first = self.steps * (self.rounds + 1)
        for mesh in self.meshes:
            self.log(f"{mesh.text}: comparing states, profiling ...")
            job, measured = jobs[mesh.processes], found[mesh.text]
            measured.state = job.ask("state", mesh.text)[0]
            answers = job.ask("communication", mesh.text, first, self.steps)
            measured.communication = statistics.fmean(x["share"] for x in answers)
        several = [mesh for mesh in self.meshes if mesh.processes > 1]
        if several:
            self.log(f"a process that takes {self.straggler:g} times as long ...")
        first += self.steps
        for number in range(self.rounds):
            for mesh in _rotated(several, number):
                job, measured = jobs[mesh.processes], found[mesh.text]
                delay = (self.straggler - 1) * statistics.median(measured.rounds)
                for seconds, wait in (
                    (measured.even_rounds, 0.0),
                    (measured.slowed_rounds, delay),
                ):
                    step = first + 2 * number * self.steps
                    step += self.steps if wait else 0
                    answers = job.ask("steps", mesh.text, step, self.steps, wait)
                    slowest = max(answer["seconds"] for answer in answers)
                    seconds.append(slowest / self.steps)


def _rotated(meshes: Sequence[ProcessMesh], number: int) -> list[ProcessMesh]:
    start = number % max(len(meshes), 1)
    return [*meshes[start:], *meshes[:start]]


def parse_meshes(texts: Sequence[str], processes: Sequence[int]) -> list[ProcessMesh]:
    """Returns the meshes, each in each of these numbers of processes.

    Args:
      texts: such as data=4, or data=4@2 in two processes.
      processes: for meshes without @.
    """
    found = []
    for text in texts:
        if "@" in text:
            found.append(ProcessMesh.parse(text))
            continue
        for number in processes:
            name = text if number == 1 else f"{text}@{number}"
            found.append(ProcessMesh.parse(name))
    return found
