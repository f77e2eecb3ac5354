"""A supervised job that a drill starts, watches and injects faults into."""

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
class JobSpec:
    """How to run the jobs of a drill.

    Attributes:
      train: the arguments of `meshloom train`, without --workdir and --mesh.
      mesh: the value of --mesh; "" uses the mesh of the config.
      processes: the number of processes.
      cpu_devices: the number of CPU devices per process.
      num_steps: the number of steps.
      save_every: the number of steps between checkpoints.
      stall_seconds: how long a job may make no progress before it is restarted.
      limit_seconds: how long a job may take before it is killed and has failed.
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
        """The mesh and the number of processes, such as "fsdp=4@4"."""
        return f"{self.mesh or 'mesh of the config'}@{self.processes}"

    @property
    def is_elastic(self) -> bool:
        """Whether the mesh adapts to the number of devices."""
        return not self.mesh or "-1" in self.mesh

    def argv(self, folder: Path) -> list[str]:
        """Returns the command line of the supervised job."""
        settings = (
            f"save_every={self.save_every}",
            f"stall_seconds={self.stall_seconds}",
            "log_every=1",
            "probe_network=False",
            "checkpoint_folder=None",  # the drill inspects the run folder's checkpoints
        )
        return [
            *(sys.executable, "-P", "-m", "meshloom.trainer.cli", "launch", "local"),
            *("--processes", str(self.processes)),
            *("--cpu-devices", str(self.cpu_devices)),
            # Longer than the watchdogs, which should notice a stall first.
            *("--stall-seconds", str(3 * self.stall_seconds)),
            *("--max-restarts", "10", "--", "train", *self.train),
            *(("--mesh", self.mesh) if self.mesh else ()),
            *("--workdir", str(folder), "--steps", str(self.num_steps)),
            *(part for text in settings for part in ("--set", text)),
        ]


class Failed(Exception):
    """A job did not do what the drill expected."""


class Job:
    """A running job in a run folder."""

    def __init__(self, folder: Path, process: subprocess.Popen, deadline: float):
        self.folder, self._process, self._deadline = folder, process, deadline

    def events(self, *kinds: str) -> list[dict[str, Any]]:
        """Returns the ledger's events of the given kinds."""
        rows = ledger.Ledger(self.folder, is_writer=False).read()
        return [row for row in rows if row["event"] in kinds]

    @property
    def step(self) -> int:
        """The highest step done so far, in any attempt."""
        return max((row["step"] for row in self.events("step")), default=0)

    @property
    def pids(self) -> list[int]:
        """The process ids of the workers of the latest attempt."""
        rows = metrics.read(self.folder / "logs" / "supervisor.jsonl")
        return [row["pids"] for row in rows if row["event"] == "start"][-1]

    def wait(self, what: str, done: Callable[[], bool]) -> float:
        """Waits for `done()` and returns when it became true.

        Args:
          what: what is waited for, for the error message.
          done: polled until it returns True.
        """
        while not done():
            if self._process.poll() is not None and not done():
                raise Failed(
                    f"the job exited with status {self._process.returncode} before "
                    f"{what}; see {self.log}"
                )
            if time.monotonic() > self._deadline:
                raise Failed(f"no {what} within the time limit; see {self.log}")
            time.sleep(POLL_SECONDS)
        return time.monotonic()

    def wait_for_step(self, step: int) -> float:
        return self.wait(f"step {step}", lambda: self.step >= step)

    def kill(self, worker: int, signum: int = signal.SIGKILL) -> float:
        """Sends a signal to a worker and returns when it was sent."""
        try:
            os.kill(self.pids[worker], signum)
        except ProcessLookupError:
            raise Failed(
                f"worker {worker} exited before the fault, at step {self.step}. If "
                f"the run was complete, pass more --steps; otherwise see {self.log}"
            ) from None
        return time.monotonic()

    def stop(self) -> int:
        """Tells the supervisor to stop the job; returns its exit status."""
        self._process.send_signal(signal.SIGTERM)
        return self.finish()

    def finish(self) -> int:
        """Waits for the job to finish and returns its exit status."""
        left = max(0.0, self._deadline - time.monotonic())
        try:
            return self._process.wait(left)
        except subprocess.TimeoutExpired:
            raise Failed(f"not done within the time limit; see {self.log}") from None

    @property
    def log(self) -> Path:
        return self.folder / "drill.log"


def recover(job: Job, fault_time: float) -> float:
    """Waits for a new step and for the job to finish.

    Args:
      job: the job that a fault was injected into.
      fault_time: when the fault was injected.

    Returns:
      The seconds from the fault to the first step that was not done before.
    """
    time.sleep(0.2)  # let pending rows reach the ledger
    before = job.step
    seconds = job.wait_for_step(before + 1) - fault_time
    if (status := job.finish()) != DONE:
        meaning = f" ({MEANINGS[status]})" if status in MEANINGS else ""
        raise Failed(f"the job exited with status {status}{meaning}; see {job.log}")
    return seconds


@contextlib.contextmanager
def running(
    spec: JobSpec,
    folder: Path,
    *,
    hold: Hold | None = None,
    around: Sequence[str] = (),
) -> Iterator[Job]:
    """Starts a job, and kills it on exit if it is still running.

    Args:
      spec: how to run the job.
      folder: the run folder.
      hold: the fault point at which a process waits.
      around: a command that is given the job's command line as arguments.
    """
    folder.mkdir(parents=True, exist_ok=True)
    environment = {k: v for k, v in os.environ.items() if not k.startswith("MESHLOOM_")}
    if hold is not None:
        Path(hold.marker).unlink(missing_ok=True)
        environment[VARIABLE] = hold.to_json()
    with open(folder / "drill.log", "ab") as log:
        process = subprocess.Popen(
            # With the guard, the kernel ends the job if this process is killed.
            [*GUARD, "worker", str(os.getpid()), *around, *spec.argv(folder)],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        yield Job(folder, process, time.monotonic() + spec.limit_seconds)
    finally:
        # Workers die with their supervisor: the kernel and the guard see to that.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
