"""How to run the trainings of a drill of learners."""

import dataclasses
import sys
from pathlib import Path

PROGRAM = (sys.executable, "-P", "-m", "meshloom.trainer.cli")


@dataclasses.dataclass(frozen=True)
class FleetSpec:
    """How to run the trainings of a drill.

    Attributes:
      train: the arguments of `meshloom train`, without --workdir.
      learners, servers: how many there are.
      cpu_devices: the number of CPU devices of each process of a learner.
      num_steps: the number of steps of each learner.
      save_every: the number of commits between checkpoints of the service, and of steps
        between those of a learner.
      limit_seconds: how long anything may take before the drill has failed: a start, a
        recovery, a commit; a replay may take ten times as long.
      processes: of each learner.
      copies: of each block, on different servers.
      target, launch: that of `meshloom launch`, and more of its flags.
    """

    train: tuple[str, ...]
    learners: int
    servers: int
    cpu_devices: int
    num_steps: int
    save_every: int
    limit_seconds: float
    processes: int = 1
    copies: int = 1
    target: str = "local"
    launch: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        name = f"{self.learners} learners, {self.servers} servers"
        if self.processes > 1:
            name += f", {self.processes} processes each"
        return name if self.copies == 1 else f"{name}, {self.copies} copies"

    def argv(self, run: Path) -> list[str]:
        """Returns the command line of a training."""
        count = "--processes-per-host" if self.target == "ssh" else "--processes"
        return [
            *(*PROGRAM, "launch", self.target, "--learners", str(self.learners)),
            *("--servers", str(self.servers), "--cpu-devices", str(self.cpu_devices)),
            *((count, str(self.processes)) if self.processes > 1 else ()),
            *(("--copies", str(self.copies)) if self.copies > 1 else ()),
            *("--save-commits", str(self.save_every), "--max-restarts", "10"),
            *self.launch,
            *("--", "train", *self.train, "--workdir", str(run)),
            *("--steps", str(self.num_steps), "--set", f"save_every={self.save_every}"),
        ]
