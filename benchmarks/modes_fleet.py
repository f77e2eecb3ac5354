"""One training of one mode: a real fleet, and what it leaves behind.

A fleet is `meshloom launch local --learners N --servers 2`: N learners with supervisors
of their own, a coordinator and two servers. The shared parameters are read from the
checkpoints of the service, so that all modes are judged by the same thing, and learners
do nothing but train.
"""

import contextlib
import dataclasses
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from modes_cases import Case
from modes_slots import Slots, busy_share, core_ticks

from meshloom.launch.target import GUARD
from meshloom.trainer.record import metrics
from meshloom.trainer.record.ledger import Ledger

PROGRAM = (sys.executable, "-P", "-m", "meshloom.trainer.cli")
INHERITED = os.environ.get("XLA_FLAGS", "")
# One thread of arithmetic for each process. Without a least time to compile, the second
# fleet finds every program of the first.
ENV = {
    "XLA_FLAGS": f"{INHERITED} --xla_cpu_multi_thread_eigen=false".strip(),
    "NPROC": "1",
    "JAX_PLATFORMS": "cpu",
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
}
POLL_SECONDS = 0.1
LIMIT_SECONDS = 1800.0


class Failed(Exception):
    """A fleet that did not train to the end by itself."""


@contextlib.contextmanager
def trained(case: Case, folder: Path) -> Iterator["Trained"]:
    """Trains in a folder that is deleted at the end of the block."""
    run = folder / case.name
    shutil.rmtree(run, ignore_errors=True)
    run.mkdir(parents=True)
    try:
        yield _train(case, run, cache=folder / "compiled")
    finally:
        shutil.rmtree(run, ignore_errors=True)


@dataclasses.dataclass(frozen=True)
class Trained:
    """What a training has left behind.

    Attributes:
      run: the folder of the training.
      saved: the folders of versions of the shared parameters.
      began: Unix time from which on all learners were training.
      allowed: seconds since then in which each learner with slots could run.
      busy: with slots, the share of this machine's cores that had work, from any
        program; 0 without.
    """

    run: Path
    saved: Mapping[int, Path]
    began: float
    allowed: Mapping[int, float]
    busy: float

    def learner(self, number: int) -> Path:
        return self.run / "learners" / str(number)


def _train(case: Case, home: Path, cache: Path) -> Trained:
    run, log = home / "run", home.with_suffix(".log")
    command = [*PROGRAM, "launch", "local", "--learners", str(case.learners)]
    command += ["--servers", "2", "--cpu-devices", "1"]
    command += ["--save-commits", str(case.commits_between_points()), "--"]
    command += ["train", "--config", case.config, "--workdir", str(run)]
    for binding in (*case.bindings, f"exchange.mode={case.mode!r}"):
        command += ["--set", binding]
    snapshots = Snapshots(run / "service", home / "saved")
    watch, deadline = Watch(run, case), time.monotonic() + LIMIT_SECONDS
    env = {**os.environ, **ENV, "JAX_COMPILATION_CACHE_DIR": str(cache)}
    with running(command, env, log) as process, watch:
        while process.poll() is None:
            time.sleep(POLL_SECONDS)
            snapshots.take()
            watch.look()
            if time.monotonic() > deadline:
                raise Failed(f"not done after {LIMIT_SECONDS:g} s, see {log}")
    snapshots.take()
    if process.returncode:
        raise Failed(f"the fleet exited with {process.returncode}, see {log}")
    for path in run.glob("**/supervisor.jsonl"):
        if '"event": "restart"' in path.read_text():
            raise Failed(f"something was restarted, see {log}")
    began = watch.began or max(compiled(run, case.learners).values())
    return Trained(run, snapshots.saved, began, watch.allowed, watch.busy)


@contextlib.contextmanager
def running(command: list[str], env: dict[str, str], log: Path) -> Iterator:
    """A process that ends with this block, and with us; so does all it has started."""
    with open(log, "wb") as output:
        process = subprocess.Popen(
            [*GUARD, "worker", str(os.getpid()), *command],
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        yield process
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


class Snapshots:
    """Keeps the checkpoints of a service, which deletes all but the newest three."""

    def __init__(self, source: Path, target: Path):
        self._source, self._target = source, target
        self.saved: dict[int, Path] = {}

    def take(self) -> None:
        for manifest in self._source.glob("[0-9]*/manifest.json"):
            version = int(manifest.parent.name)
            if version in self.saved:
                continue
            folder = self._target / str(version)
            folder.mkdir(parents=True)
            try:
                for file in manifest.parent.glob("block-*"):
                    os.link(file, folder / file.name)
                complete = manifest.exists()  # it is deleted before the other files
            except FileNotFoundError:
                complete = False
            if complete:
                self.saved[version] = folder
            else:  # deleted meanwhile: one point less
                shutil.rmtree(folder)


def compiled(run: Path, learners: int) -> dict[int, float]:
    """Returns when learners had compiled their step, as far as they have."""
    found = {}
    for number in range(learners):
        folder = run / "learners" / str(number)
        for row in Ledger(folder, is_writer=False).read():
            if row["event"] == "phases":
                found[number] = row["times"]["compiled"]
    return found


class Watch:
    """Gives learners their slots once all of them train; notes how busy cores are."""

    def __init__(self, run: Path, case: Case):
        self._run, self._case = run, case
        self.slots = Slots(case.share, case.factors) if case.share else None
        self._before = core_ticks()
        self.allowed: dict[int, float] = {}
        self.busy = 0.0

    def __enter__(self) -> "Watch":
        return self

    def __exit__(self, *_) -> None:
        if self.slots is not None:
            self.slots.end()

    @property
    def began(self) -> float | None:
        return None if self.slots is None else self.slots.began

    def look(self) -> None:
        if self.slots is None:
            return
        if (self._run / "final.json").exists():
            self.slots.end()
        elif self.slots.began is not None:
            self.allowed = dict(self.slots.seconds)
            self.busy = busy_share(self._before, core_ticks())
        elif len(compiled(self._run, self._case.learners)) == self._case.learners:
            self._before = core_ticks()
            self.slots.begin({i: self._pid(i) for i in range(self._case.learners)})

    def _pid(self, learner: int) -> int:
        """Returns the training process of a learner, not its supervisor."""
        log = self._run / "learners" / str(learner) / "logs" / "supervisor.jsonl"
        starts = [row for row in metrics.read(log) if row["event"] == "start"]
        return starts[-1]["pids"][0]
