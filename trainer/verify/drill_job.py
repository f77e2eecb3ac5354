"""A supervised job that a drill starts, watches and strikes."""

import contextlib
import dataclasses
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from ...launch.exit_codes import DONE, MEANINGS
from ...launch.workers import GUARD
from ..job.fault_points import VARIABLE, Hold
from ..record import ledger, metrics

POLL_SECONDS = 0.02


@dataclasses.dataclass(frozen=True)
class Plan:
    """How the jobs of a drill are run.

    Attributes:
      train: arguments of `meshloom train`, without the run folder and the mesh.
      mesh: as of train; "" for the config's.
      stall_seconds: after which a job that makes no progress is restarted.
      limit_seconds: after which a job has failed the drill, and is killed.
    """

    train: tuple[str, ...]
    mesh: str
    processes: int
    cpu_devices: int
    num_steps: int
    save_every: int
    stall_seconds: float = 5.0
    limit_seconds: float = 300.0

    @property
    def name(self) -> str:
        """The mesh with the number of processes."""
        return f"{self.mesh or 'mesh of the config'}@{self.processes}"

    @property
    def is_elastic(self) -> bool:
        """Whether the mesh follows the number of devices."""
        return not self.mesh or "-1" in self.mesh

    def argv(self, folder: Path) -> list[str]:
        settings = (
            f"save_every={self.save_every}",
            f"stall_seconds={self.stall_seconds}",
            "log_every=1",
            "checkpoint_folder=None",  # the drill looks into the run folder's own
        )
        return [
            *(sys.executable, "-P", "-m", "meshloom.trainer.cli", "launch", "local"),
            *("--processes", str(self.processes)),
            *("--cpu-devices", str(self.cpu_devices)),
            # The watchdogs come first, and need not be waited for long after.
            *("--stall-seconds", str(3 * self.stall_seconds)),
            *("--max-restarts", "10", "--", "train", *self.train),
            *(("--mesh", self.mesh) if self.mesh else ()),
            *("--workdir", str(folder), "--steps", str(self.num_steps)),
            *(part for text in settings for part in ("--set", text)),
        ]


class Failed(Exception):
    """A job did not do what the drill waited for."""


class Job:
    """A running job in a run folder."""

    def __init__(self, folder: Path, process: subprocess.Popen, deadline: float):
        self.folder, self._process, self._deadline = folder, process, deadline

    def events(self, *kinds: str) -> list[dict[str, Any]]:
        rows = ledger.Ledger(self.folder, is_writer=False).read()
        return [row for row in rows if row["event"] in kinds]

    @property
    def step(self) -> int:
        """The highest that was ever done."""
        return max((row["step"] for row in self.events("step")), default=0)

    @property
    def pids(self) -> list[int]:
        """Of the workers of the newest attempt."""
        rows = metrics.read(self.folder / "logs" / "supervisor.jsonl")
        return [row["pids"] for row in rows if row["event"] == "start"][-1]

    def wait(self, what: str, done: Callable[[], bool]) -> float:
        """Waits until something is so; the time when it was seen."""
        while not done():
            if self._process.poll() is not None and not done():
                raise Failed(
                    f"the job ended with status {self._process.returncode} before "
                    f"{what}; see {self.log}"
                )
            if time.monotonic() > self._deadline:
                raise Failed(f"no {what} within the time limit; see {self.log}")
            time.sleep(POLL_SECONDS)
        return time.monotonic()

    def wait_for_step(self, step: int) -> float:
        return self.wait(f"step {step}", lambda: self.step >= step)

    def strike(self, worker: int, number: int = signal.SIGKILL) -> float:
        """Sends a signal to a worker; the time of it."""
        try:
            os.kill(self.pids[worker], number)
        except ProcessLookupError:
            raise Failed(
                f"worker {worker} was gone before it could be struck, at step "
                f"{self.step}. If the run was done, give it more --steps; otherwise "
                f"see {self.log}"
            ) from None
        return time.monotonic()

    def stop(self) -> int:
        """Tells the supervisor to let all save and leave; its status."""
        self._process.send_signal(signal.SIGTERM)
        return self.finish()

    def finish(self) -> int:
        """Waits for the end of the job; its status."""
        left = max(0.0, self._deadline - time.monotonic())
        try:
            return self._process.wait(left)
        except subprocess.TimeoutExpired:
            raise Failed(f"no end within the time limit; see {self.log}") from None

    @property
    def log(self) -> Path:
        return self.folder / "drill.log"


def recover(job: Job, struck: float) -> float:
    """Waits for a step that is new, then for the end of the job."""
    time.sleep(0.2)  # what was on its way to the ledger is there
    before = job.step
    seconds = job.wait_for_step(before + 1) - struck
    if (status := job.finish()) != DONE:
        words = f" ({MEANINGS[status]})" if status in MEANINGS else ""
        raise Failed(f"the job ended with status {status}{words}; see {job.log}")
    return seconds


@contextlib.contextmanager
def running(
    plan: Plan,
    folder: Path,
    *,
    hold: Hold | None = None,
    around: Sequence[str] = (),
) -> Iterator[Job]:
    """A job that is started, and killed at the end if it still runs.

    Args:
      hold: where a process waits for us.
      around: a command that is given the job's command line to run.
    """
    folder.mkdir(parents=True, exist_ok=True)
    environment = {k: v for k, v in os.environ.items() if not k.startswith("MESHLOOM_")}
    if hold is not None:
        Path(hold.marker).unlink(missing_ok=True)
        environment[VARIABLE] = hold.to_json()
    with open(folder / "drill.log", "ab") as log:
        process = subprocess.Popen(
            # The guard: the kernel ends the job if we are killed ourselves.
            [*GUARD, "worker", str(os.getpid()), *around, *plan.argv(folder)],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        yield Job(folder, process, time.monotonic() + plan.limit_seconds)
    finally:
        # The workers go with their supervisor: the kernel and its heir see to that.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
