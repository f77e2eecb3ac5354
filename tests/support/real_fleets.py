"""Real fleets on this machine: `meshloom launch local --learners`, and their files."""

import contextlib
import json
import os
import signal
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

from launched import default_signals, ending, wait_until
from test_jobs import ends
from tiny_runs import COMMAND, command, sets_of

from meshloom.launch.fleet_status import last_commit
from meshloom.service.coordinator.log import Log
from meshloom.trainer.checkpoint.manager import committed_steps
from meshloom.trainer.record import metrics
from meshloom.trainer.record.ledger import Ledger

SECONDS = 240  # a fleet takes 20 to 60 on two quiet cores
# A model that compiles fast, in blocks of which two servers have some each: 20 blocks,
# so once in 500,000 fleets one server has none.
SMALL = ["--config", "drill", *sets_of("model.num_layers=1", "model.unroll=1")]
SMALL += sets_of("model.d_model=16", "model.d_ff=32", "exchange.block_bytes=1024")
# What is compiled for one process is there for the next, for a replay too.
ENV = {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}


class RealFleet:
    """Attributes:
    run: the folder of the training.
    """

    def __init__(self, folder: Path, process: subprocess.Popen):
        self.run, self.output, self.process = folder / "run", folder / "output", process

    def events(self, *folder: str) -> list[dict]:
        file = self.run.joinpath(*folder, "logs", "supervisor.jsonl")
        lines = file.read_text().splitlines() if file.exists() else []
        return [json.loads(line) for line in lines]

    def restarts(self, learner: int) -> list[dict]:
        """Returns what the learner's own supervisor restarted."""
        events = self.events("learners", str(learner))
        return [event for event in events if event["event"] == "restart"]

    def pids(self) -> list[int]:
        """Everything that was started, and by whom ever."""
        learners = sorted((self.run / "learners").glob("*"))
        found = [self.events(), *(self.events("learners", x.name) for x in learners)]
        return [pid for events in found for e in events for pid in e.get("pids", [])]

    def pid_of(self, name: str) -> int:
        """Returns the newest process of a role; of "learner I" its training process."""
        if name.startswith("learner"):
            events = self.events("learners", name.split()[1])
        else:
            events = [e for e in self.events() if e.get("name") == name]
        return [e for e in events if e["event"] == "start"][-1]["pids"][0]

    def kill(self, name: str) -> None:
        os.kill(self.pid_of(name), signal.SIGKILL)

    def starts(self) -> dict[str, int]:
        names = [e["name"] for e in self.events() if e["event"] == "start"]
        return {name: names.count(name) for name in names}

    def until(self, done) -> None:
        wait_until(done, self.process, self.output, SECONDS)

    def until_commit(self, number: int) -> None:
        self.until(lambda: (last_commit(self.run) or 0) >= number)

    def until_saved(self, learner: int) -> None:
        """Waits until the learner has a checkpoint to come back with."""
        folder = self.run / "learners" / str(learner) / "checkpoints"
        self.until(lambda: committed_steps(folder))

    def until_service_saved(self, commit: int) -> None:
        """Waits until the service has a checkpoint of this commit or a later one."""

        def newest() -> int:
            found = (self.run / "service").glob("[0-9]*/manifest.json")
            return max((int(path.parent.name) for path in found), default=0)

        self.until(lambda: newest() >= commit)

    def status(self) -> int:
        """Waits for the end; every process that was started has gone by then."""
        status = self.process.wait(SECONDS)
        assert self.pids() and all(ends(pid) for pid in self.pids()), self.text
        return status

    @property
    def text(self) -> str:
        return self.output.read_text(errors="replace")

    def num_busy_servers(self) -> int:
        """Returns how many servers had blocks of the job when it began."""
        (file,) = self.run.glob("**/coordinator.db")
        with contextlib.closing(Log.embedded(file)) as log:
            (job,) = log.jobs()
            specs = [entry.body for entry in log.read(job) if entry.kind == "spec"]
        return len(specs[0]["servers"])

    def commits(self) -> list[dict]:
        return metrics.read(self.run / "commits.jsonl")

    def who(self) -> set[tuple[int, int]]:
        """Returns the (learner, incarnation) of all contributions."""
        parts = [part for row in self.commits() for part in row["contributions"]]
        return {(part["learner"], part["incarnation"]) for part in parts}

    def ledger(self, learner: int) -> list[dict]:
        return Ledger(self.run / "learners" / str(learner), is_writer=False).read()


@contextlib.contextmanager
def real_fleet(
    folder: Path, train: Sequence[str], *, learners: int = 2, flags: Sequence[str] = ()
) -> Iterator[RealFleet]:
    """A fleet with two servers; ends with everything it started.

    Args:
      train: flags of train.
      flags: more flags of launch.
    """
    command = [COMMAND, "launch", "local", "--learners", str(learners), "--servers"]
    command += ["2", *flags, "--", "train", *train, "--workdir", str(folder / "run")]
    with open(folder / "output", "wb") as output, default_signals():
        process = subprocess.Popen(
            command,
            cwd=folder,
            env={**os.environ, **ENV},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    with ending(process):
        yield RealFleet(folder, process)


def check_replay(run: Path) -> None:
    """Computes a training again; a process like the learners finds their programs."""
    done = command("rounds", "replay", str(run), timeout=SECONDS, env=ENV)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "are bit-equal" in done.stdout
