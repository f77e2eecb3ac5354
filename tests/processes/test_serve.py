"""`meshloom serve` with real processes on this machine, ended by SIGKILL if need be."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from importlib import metadata

import numpy as np
import pytest

from meshloom.service.blocks.hashing import owners
from meshloom.service.blocks.layout import Leaf, make_layout
from meshloom.service.rounds.policy import Outer, Policy
from meshloom.service.wire.calls import Channel
from meshloom.service.wire.errors import Refused, Unavailable
from meshloom.trainer.program.digest import tree_digests

pytestmark = pytest.mark.processes

LAYOUT = make_layout([Leaf("w", (8, 4), "float32", (None, None))], block_bytes=32)
LIMIT = 60.0
NUM_ROUNDS = 6
SERVE = [
    *(sys.executable, "-c"),
    "import sys; from meshloom.trainer import cli; "
    "from meshloom.trainer.commands import serve; "
    "cli.COMMANDS = tuple(dict.fromkeys((*cli.COMMANDS, serve))); "
    "sys.exit(cli.main(sys.argv[1:]))",
    "serve",
]


def spec(job: str = "run", **changes):
    policy = Policy(local_steps=2, outer=Outer(learning_rate=1.0), quorum=1.0)
    return {
        "job": job,
        "policy": policy.to_json(),
        "num_learners": 2,
        "num_rounds": NUM_ROUNDS,
        "layout": LAYOUT.to_json(),
        "update": {"kind": "outer"},
        "max_grad_norm": None,
        "skip_grad_norm": None,
        "compression": {"push": "float32"},
        "config_digest": "c0ffee",
        "data": {},
        "version": metadata.version("meshloom"),
        **changes,
    }


class Service:
    """Processes of one service, each with its output in a file."""

    def __init__(self, folder):
        self.folder = folder
        self.processes: list[subprocess.Popen] = []

    def start(self, *flags: str, folder: str = "service") -> subprocess.Popen:
        """Starts one process; returns once it is bound, or has ended."""
        home = self.folder / folder
        home.mkdir(exist_ok=True)
        (home / "address").unlink(missing_ok=True)
        env = {**os.environ, "PYTHONUNBUFFERED": "1"}
        with open(home / "output", "ab") as output:
            process = subprocess.Popen(
                [*SERVE, "--folder", str(home), *flags],
                env=env,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.processes.append(process)
        wait(lambda: (home / "address").exists() or process.poll() is not None)
        return process

    def address(self, folder: str = "service") -> str:
        return (self.folder / folder / "address").read_text().strip()

    def output(self, folder: str = "service") -> str:
        return (self.folder / folder / "output").read_text()

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


@pytest.fixture
def service(tmp_path):
    made = Service(tmp_path)
    yield made
    made.close()


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


def final(service: Service, job: str = "run") -> dict:
    return json.loads((service.folder / "service" / job / "final.json").read_text())


def test_two_jobs_share_one_service_and_do_not_meet(service):
    process = service.start("--once")
    jobs = [[Learner(service, i, job) for i in range(2)] for job in ("one", "two")]
    for learners in jobs:
        for learner in learners:
            learner.join()
    for learners in jobs:
        play_to_the_end(learners)
        np.testing.assert_allclose(learners[0].pull(NUM_ROUNDS), expected(), rtol=1e-6)
        digests = tree_digests({"w": learners[0].pull(NUM_ROUNDS)})
        assert final(service, learners[0].job)["digests"] == digests
    for learners in jobs:
        for learner in learners:
            learner.call("Leave", reason="done")
    assert process.wait(LIMIT) == 0, service.output()


def test_kill_9_of_everything_continues_from_the_checkpoint(service):
    service.start("--save-every", "2")
    learners = [Learner(service, index) for index in range(2)]
    for learner in learners:
        learner.join()
    play_to_the_end(learners, until=3)
    os.killpg(service.processes[-1].pid, signal.SIGKILL)
    service.processes[-1].wait()
    with pytest.raises(Unavailable):
        learners[0].call("Next", round=3)
    service.start("--save-every", "2")
    for learner in learners:
        learner.open()
    play_to_the_end(learners)
    assert [learner.incarnation for learner in learners] == [2, 2]
    np.testing.assert_allclose(learners[0].pull(NUM_ROUNDS), expected(), rtol=1e-6)
    assert "continues from version 2" in service.output()
    rows = (service.folder / "service" / "run" / "metrics.jsonl").read_text()
    steps = [json.loads(line)["step"] for line in rows.splitlines()]
    assert steps == list(range(1, NUM_ROUNDS + 1))


def test_kill_9_of_the_coordinator_alone_loses_nothing(service):
    flags = ("--role", "coordinator", "--servers", "2", "--save-every", "100")
    service.start(*flags)
    address = service.address()
    for name in ("a", "b"):
        service.start("--role", "server", "--coordinator", address, folder=name)
    learners = [Learner(service, index) for index in range(2)]
    for learner in learners:
        learner.join()
    play_to_the_end(learners, until=3)
    os.killpg(service.processes[0].pid, signal.SIGKILL)
    service.processes[0].wait()
    coordinator = service.start(*flags, "--bind", address)
    for learner in learners:
        learner.open()
    play_to_the_end(learners)
    assert [learner.incarnation for learner in learners] == [1, 1]
    np.testing.assert_allclose(learners[0].pull(NUM_ROUNDS), expected(), rtol=1e-6)
    assert "abandoned" not in service.output()
    # And a server that is killed stops the service aloud.
    os.killpg(service.processes[1].pid, signal.SIGKILL)
    assert coordinator.wait(LIMIT) == 69
    assert "is lost: not heard of for 10 s" in service.output()
    assert "Restart the service: it continues from the checkpoint of version" in (
        service.output()
    )


def test_sigterm_saves_and_leaves_with_75(service):
    process = service.start("--save-every", "100")
    learners = [Learner(service, index) for index in range(2)]
    for learner in learners:
        learner.join()
    play_to_the_end(learners, until=3)
    process.send_signal(signal.SIGTERM)
    assert process.wait(LIMIT) == 75, service.output()
    assert "run: saved at version 3" in service.output()
    assert not (service.folder / "service" / "address").exists()
    manifest = service.folder / "service" / "run" / "service" / "3" / "manifest.json"
    assert json.loads(manifest.read_text())["version"] == 3
    service.start()
    for learner in learners:
        learner.open()
    play_to_the_end(learners)
    np.testing.assert_allclose(learners[0].pull(NUM_ROUNDS), expected(), rtol=1e-6)


def test_a_folder_or_port_in_use_is_one_line(service):
    service.start()
    process = service.start()
    assert process.wait(LIMIT) == 2
    last = service.output().splitlines()[-1]
    assert "another coordinator is writing this log" in last


def test_a_stranger_is_refused(service, tmp_path):
    token = tmp_path / "token"
    token.write_text("a secret\n")
    service.start("--token-file", str(token))
    with pytest.raises(Refused, match="wrong or missing token"):
        Learner(service, 0).open()
    channel = Channel(service.address(), token="a secret")
    assert channel.call("Status", {}, 10)["jobs"] == {}
    channel.close()


def run(*flags: str, folder) -> tuple[int, str]:
    """Runs the command with flags that it refuses."""
    done = subprocess.run(
        [*SERVE, "--folder", str(folder), *flags],
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )
    return done.returncode, done.stderr.strip()


BAD_FLAGS = {
    "no coordinator": (["--role", "server"], "give the address of the coordinator"),
    "wildcard": (["--bind", "0.0.0.0:0"], "it must be one at which they reach"),
    "open": (["--bind", "10.0.0.1:0"], "so set a token or TLS files"),
    "half of TLS": (["--tls-ca", "ca.pem"], "--tls-cert is missing: TLS needs all"),
    "no servers": (["--servers", "0"], "--servers must be >= 1, got 0"),
    "no bind": (["--bind", "here"], "expected HOST:PORT"),
}


@pytest.mark.parametrize("bad", BAD_FLAGS)
def test_flags_that_cannot_work_are_one_line(tmp_path, bad):
    flags, message = BAD_FLAGS[bad]
    status, error = run(*flags, folder=tmp_path)
    assert status == 2 and message in error and len(error.splitlines()) == 1, error
