"""A training between learners that a drill starts, watches and injects faults into."""

import contextlib
import dataclasses
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ...launch.exit_codes import DONE, MEANINGS
from ...launch.workers import GUARD
from ..job.fault_points import TRAPS
from ..record import metrics
from .cut_network import Hosts
from .drill_job import POLL_SECONDS, Failed
from .etcd_cluster import Cluster
from .fleet_spec import FleetSpec
from .fleet_wire import Wire
from .small_disk import SmallDisk
from .training_audit import COMMITS

# What is compiled for one process is there for the next, and for the replay.
CACHED = {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
ABANDONED = "abandoned.jsonl"
# Faults are injected while the furthest learner has done less than this share of its
# rounds, so that who was hit can come back before the end.
LAST_SHARE = 0.7


class Ended(Failed):
    """A training was done before it could recover from a fault."""


@dataclasses.dataclass(frozen=True)
class Mark:
    """Where a training stood when a fault was injected.

    Attributes:
      time: of the fault (Unix time).
      version: the newest one.
      hit: learners that the fault has hit, with their incarnation then.
      target: what was hit, for the log.
    """

    time: float
    version: int
    hit: Mapping[int, int]
    target: str


class Fleet:
    """A running training.

    Args:
      start: starts it, or continues it.

    Attributes:
      run: its folder.
      wire: what its processes call each other through, if bits can be flipped there.
      disk: the disk that the service writes to, if it can be filled.
      hosts: what it runs on, if that is two: the service and learner 0 on the first.
      etcd: where its coordinators keep their log, if there are several.
    """

    wire: Wire | None = None
    disk: SmallDisk | None = None
    etcd: Cluster | None = None
    hosts: Hosts | None = None

    def __init__(
        self,
        spec: FleetSpec,
        run: Path,
        start: Callable[[], subprocess.Popen],
        traps: Path,
    ):
        self.spec, self.run, self._traps = spec, run, traps
        self._start, self._process = start, start()

    # What it has written.

    @property
    def log(self) -> Path:
        return self.run.parent / f"{self.run.name}.log"

    def commits(self) -> list[dict[str, Any]]:
        file = self.run / COMMITS
        return metrics.read(file) if file.exists() else []

    def taken_back(self) -> int:
        """Returns how many commits restarts from a checkpoint have taken back."""
        file = self.run / ABANDONED
        return len(metrics.read(file)) if file.exists() else 0

    def events(self, learner: int | None = None) -> list[dict[str, Any]]:
        """Returns the events of a supervisor: the fleet's, or that of one learner."""
        folder = self.run if learner is None else self._home(learner)
        file = folder / "logs" / "supervisor.jsonl"
        return metrics.read(file) if file.exists() else []

    def pid_of(self, role: str) -> int:
        """Returns the newest process of a role: "server 1", "learner 0 process 1".

        "learner I" is its process 0.
        """
        events, number = self.events(), 0
        if role.startswith("learner"):
            _, learner, *process = role.split()
            events, role = self.events(int(learner)), ""
            number = int(process[1]) if process else 0
        found = [
            event["pids"][number]
            for event in events
            if event["event"] == "start" and event.get("name", "") == role
        ]
        if not found:
            raise Failed(f"{role} was never started; see {self.log}")
        return found[-1]

    def role_of(self, pid: int) -> str:
        for learner in range(self.spec.learners):
            for event in self.events(learner):
                if pid in event.get("pids", ()):
                    role = f"learner {learner}"
                    process = f" process {event['pids'].index(pid)}"
                    return role + process if self.spec.processes > 1 else role
        names = [e["name"] for e in self.events() if pid in e.get("pids", ())]
        return names[-1]

    def pids(self) -> list[int]:
        """Returns every process that was started."""
        learners = range(self.spec.learners)
        events = [self.events(), *map(self.events, learners)]
        return [pid for each in events for pid in _pids(each)]

    def is_ending(self) -> bool:
        """Whether it is too late for another fault."""
        parts = [part for row in self.commits() for part in row["contributions"]]
        steps: dict[int, int] = {}
        for part in parts:
            steps[part["learner"]] = steps.get(part["learner"], 0) + part["steps"]
        return max(steps.values(), default=0) > LAST_SHARE * self.spec.num_steps

    # Faults.

    def mark(self, roles: Iterable[str]) -> Mark:
        """Records where the training stands, right before a fault."""
        commits, roles = self.commits(), list(roles)
        known = {
            part["learner"]: part["incarnation"]
            for row in commits
            for part in row["contributions"]
        }
        learners = [int(r.split()[1]) for r in roles if r.startswith("learner")]
        hit = {learner: known.get(learner, 0) for learner in learners}
        newest = commits[-1]["version"] if commits else 0
        return Mark(time.time(), newest, hit, ", ".join(roles))

    def kill(self, *roles: str, pids: Sequence[int] = ()) -> Mark:
        """Kills processes at once, each by the name of its role or by its id."""
        pids = [*pids, *map(self.pid_of, roles)]
        mark = self.mark([self.role_of(pid) for pid in pids])
        for pid in pids:
            self.send(pid, signal.SIGKILL)
        return mark

    def send(self, pid: int, number: int) -> None:
        if not self._has(pid):
            raise Failed(f"process {pid} ended before the fault; see {self.log}")
        os.kill(pid, number)

    def trap(self, point: str) -> int:
        """Waits until a process reaches a point; returns its id. It stays there."""
        asked = self._traps / point
        asked.touch()
        found: list[Path] = []

        def is_held() -> bool:
            found[:] = self._traps.glob(f"{point}.*")
            return bool(found)

        try:
            self.wait(f"process at the point {point!r}", is_held)
        finally:
            asked.unlink(missing_ok=True)
        held = found[0]
        return int(held.suffix[1:])

    def release(self) -> None:
        """Releases all held processes."""
        for held in self._traps.glob("*.*"):
            held.unlink()

    # Waiting.

    def wait(self, what: str, done: Callable[[], Any]) -> None:
        """Args:
        what: what is waited for, for the error message.
        """
        deadline = time.monotonic() + self.spec.limit_seconds
        while not done():
            if (status := self._process.poll()) is not None and not done():
                if status == DONE:
                    raise Ended(f"the training was done before {what}; see {self.log}")
                meaning = f" ({MEANINGS[status]})" if status in MEANINGS else ""
                raise Failed(
                    f"the training exited with status {status}{meaning} before {what}; "
                    f"see {self.log}"
                )
            if time.monotonic() > deadline:
                seconds = self.spec.limit_seconds
                raise Failed(f"no {what} within {seconds:g} s; see {self.log}")
            time.sleep(5 * POLL_SECONDS)

    def wait_for_commits(self, number: int) -> None:
        self.wait(f"commit {number}", lambda: len(self.commits()) >= number)

    def recover(self, mark: Mark) -> tuple[float, float]:
        """Waits until the training has recovered from a fault.

        Returns:
          The seconds from the fault to the next commit, and to the first version that
          was not there before, with a contribution of each learner that was hit.
        """

        def new() -> list[dict[str, Any]]:
            return [row for row in self.commits() if row["time"] > mark.time]

        def back() -> float | None:
            missing = set(mark.hit)
            for row in new():
                missing -= {
                    part["learner"]
                    for part in row["contributions"]
                    if part["incarnation"] > mark.hit.get(part["learner"], 0)
                }
                if row["version"] > mark.version and not missing:
                    return row["time"]
            return None

        self.wait(f"commit after the fault of {mark.target}", new)
        first = new()[0]["time"]
        self.wait(f"recovery of {mark.target}", back)
        return first - mark.time, (back() or time.time()) - mark.time

    def end(self) -> int:
        """Waits until the training has ended; returns its exit status.

        The limit is for each commit: how many are left depends on the training.
        """
        seconds, known, deadline = self.spec.limit_seconds, -1, 0.0
        while True:
            if (number := len(self.commits())) != known:
                known, deadline = number, time.monotonic() + seconds
            try:
                return self._process.wait(POLL_SECONDS * 10)
            except subprocess.TimeoutExpired:
                if time.monotonic() > deadline:
                    raise Failed(
                        f"not done, and no commit within {seconds:g} s; see {self.log}"
                    ) from None

    def start_again(self) -> None:
        """Continues a training that has ended, with the same command."""
        self._process = self._start()

    def kill_all(self) -> None:
        """Kills the training; its heir and the kernel end all that it has started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def finish(self) -> None:
        """Waits until the training is done and all its processes are gone."""
        if (status := self.end()) != DONE:
            meaning = f" ({MEANINGS[status]})" if status in MEANINGS else ""
            raise Failed(f"it exited with status {status}{meaning}; see {self.log}")
        deadline = time.monotonic() + 10
        while left := [pid for pid in self.pids() if self._has(pid)]:
            if time.monotonic() > deadline:
                raise Failed(f"it left processes {left} behind; see {self.log}")
            time.sleep(POLL_SECONDS)

    def _has(self, pid: int) -> bool:
        """Returns whether a process is one of this training; ids are used again."""
        about = Path(f"/proc/{pid}")
        try:
            if not Path("/proc/self/environ").exists():
                os.kill(pid, 0)
                return True
            command = (about / "cmdline").read_bytes()
            # Workers that were forked have the environment of the warm process.
            variables = (about / "environ").read_bytes()
        except OSError:
            return False
        names = (f"{self.run}/".encode(), f"{self.run}\0".encode())
        is_named = any(name in command for name in names)
        return is_named or f"{TRAPS}={self._traps}\0".encode() in variables

    def _home(self, learner: int) -> Path:
        return self.run / "learners" / str(learner)


def _pids(events: Iterable[Mapping[str, Any]]) -> list[int]:
    return [pid for event in events for pid in event.get("pids", ())]


def environment(cache: Path) -> dict[str, str]:
    """Returns the variables of the processes that a drill starts."""
    own = {k: v for k, v in os.environ.items() if not k.startswith("MESHLOOM_")}
    return {"JAX_COMPILATION_CACHE_DIR": str(cache), **CACHED, **own}


@contextlib.contextmanager
def running(
    spec: FleetSpec, run: Path, around: Sequence[str] = (), **more: str
) -> Iterator[Fleet]:
    """Starts a training, and kills it on exit if it is still running.

    Args:
      run: its folder, which is made.
      around: a command that is given that of the training as arguments.
      more: variables of its processes.
    """
    traps = run.parent / f"{run.name}.traps"
    traps.mkdir(parents=True, exist_ok=True)
    variables = {**environment(run.parent / "cache"), TRAPS: str(traps), **more}

    def start() -> subprocess.Popen:
        with open(run.parent / f"{run.name}.log", "ab") as log:
            return subprocess.Popen(
                # With the guard, the kernel ends the fleet if this process is killed.
                [*GUARD, "worker", str(os.getpid()), *around, *spec.argv(run)],
                env=variables,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    fleet = Fleet(spec, run, start, traps)
    try:
        yield fleet
    finally:
        fleet.kill_all()
        with contextlib.suppress(OSError):
            fleet.release()
            traps.rmdir()
