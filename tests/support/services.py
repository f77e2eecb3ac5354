"""A service in real processes, and learners without a model that play their rounds."""

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

import numpy as np
from job_specs import job_spec
from tiny_runs import COMMAND

from meshloom.service.blocks.hashing import owners
from meshloom.service.blocks.layout import Leaf, make_layout
from meshloom.service.rounds.policy import Outer, Policy
from meshloom.service.wire.calls import Channel

LAYOUT = make_layout([Leaf("w", (8, 4), "float32", (None, None))], block_bytes=32)
LIMIT = 60.0
NUM_ROUNDS = 6


def spec(job: str = "run", **changes):
    policy = Policy(local_steps=2, outer=Outer(learning_rate=1.0), quorum=1.0)
    facts = {"num_rounds": NUM_ROUNDS, "version": metadata.version("meshloom")}
    return job_spec(policy, LAYOUT, **{"job": job, **facts, **changes})


class Service:
    """Processes of one service, each with its output in a file.

    Args:
      around: a command that runs each of them.
      root: where they see `folder`, if that is on a disk of their own.
    """

    def __init__(self, folder: Path, around: Sequence[str] = (), root: str = "/"):
        self.folder, self._around, self._root = folder, around, Path(root)
        self.processes: list[subprocess.Popen] = []

    def home(self, folder: str = "service") -> Path:
        return self._root / (self.folder / folder).relative_to("/")

    def start(self, *flags: str, folder: str = "service") -> subprocess.Popen:
        """Starts one process; returns once it is bound, or has ended."""
        home = self.home(folder)
        home.mkdir(exist_ok=True)
        (home / "address").unlink(missing_ok=True)
        argv = [COMMAND, "serve", "--folder", str(self.folder / folder), *flags]
        with open(self.folder / f"{folder}.log", "ab") as output:
            process = subprocess.Popen(
                [*self._around, *argv],
                env={**os.environ, "PYTHONUNBUFFERED": "1"},
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.processes.append(process)
        wait(lambda: (home / "address").exists() or process.poll() is not None)
        return process

    def address(self, folder: str = "service") -> str:
        return (self.home(folder) / "address").read_text().strip()

    def output(self, folder: str = "service") -> str:
        return (self.folder / f"{folder}.log").read_text()

    def close(self) -> None:
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def wait(is_so, seconds: float = LIMIT) -> None:
    deadline = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < deadline, "took too long"
        time.sleep(0.02)


class Learner:
    """A learner with one process and no model: its change follows from its version."""

    def __init__(self, service: Service, index: int, job: str = "run"):
        self.service, self.index, self.job = service, index, job
        self.servers: dict[str, Channel] = {}
        self.round, self.incarnation = 0, 0

    def open(self, message=None) -> dict:
        self.channel = Channel(self.service.address())
        opened = self.channel.call("OpenJob", message or spec(self.job), 20)
        self.servers = {n: Channel(a) for n, a in opened["servers"].items()}
        return opened

    def call(self, method: str, **message) -> dict:
        who = {"job": self.job, "learner": self.index, "incarnation": self.incarnation}
        return self.channel.call(method, {**who, **message}, 20)

    def join(self) -> None:
        if self.open()["initialize"] and self.index == 0:
            self.push(0, np.ones((8, 4), np.float32))
            assert self.call("Initialized") == {"state": "ok"}
        owner = f"{self.job}/{self.index}"
        self.incarnation = self.call("Join", owner=owner)["incarnation"]
        self.round = 0

    def push(self, round: int, array: np.ndarray) -> None:
        owner_of = owners(LAYOUT, self.job, sorted(self.servers))
        for name, channel in self.servers.items():
            pieces = [
                (block, i, slab.box.start, array[slab.box.slices()])
                for block, owner in owner_of.items()
                if owner == name
                for i, slab in enumerate(LAYOUT.blocks[block].slabs)
            ]
            channel.push(self.job, self.index, self.incarnation, round, pieces)

    def pull(self, version: int) -> np.ndarray:
        owner_of = owners(LAYOUT, self.job, sorted(self.servers))
        whole = np.zeros((8, 4), np.float32)
        for block, name in owner_of.items():
            boxes = [(slab.leaf, slab.box) for slab in LAYOUT.blocks[block].slabs]

            def put(leaf, box, array):
                whole[box.slices()] = array

            self.servers[name].pull(self.job, version, boxes, put)
        return whole

    def play(self) -> str:
        """Does one round if it may; returns the state it was told."""
        place = self.call("Next", round=self.round, seconds=0.05)
        if place["state"] == "go":
            start = self.pull(place["version"])
            self.push(place["round"], start / 8 + self.index)
            sums = {"loss": 1.0, "weight": 1.0}
            about = {"base": place["version"], "weight": 1.0, "steps": 2, "sums": sums}
            self.call("Contribute", round=place["round"], **about)
            self.round = place["round"]
        return place["state"]


def play_to_the_end(learners: list[Learner], until: int | None = None) -> None:
    """Plays all learners, which join again when they must."""
    deadline = time.monotonic() + LIMIT
    states = {}
    while set(states.values()) != {"done"} or len(states) < len(learners):
        assert time.monotonic() < deadline, states
        for learner in learners:
            states[learner.index] = learner.play()
            if states[learner.index] == "left":
                learner.join()
        if until is not None and min(x.round for x in learners) >= until:
            return


def expected() -> np.ndarray:
    """The parameters that follow from the rounds."""
    value = np.ones((8, 4), np.float32)
    for _ in range(NUM_ROUNDS):
        value = value - (value / 8 + np.float32(0.5))
    return value
