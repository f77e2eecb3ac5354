"""A coordinator's job without network, threads or clock, and with servers to kill."""

import dataclasses
import json
import os
import pathlib
from typing import Any

import pytest
from job_specs import job_spec

from meshloom.service.blocks.layout import Leaf, make_layout
from meshloom.service.coordinator import driver, restoring
from meshloom.service.coordinator.cleaning import Cleaner
from meshloom.service.coordinator.coordinator import Coordinator
from meshloom.service.coordinator.job import Job
from meshloom.service.coordinator.log import Log
from meshloom.service.coordinator.servers import ServerGroup
from meshloom.service.coordinator.settings import Settings, Surroundings
from meshloom.service.coordinator.spec import parse_spec
from meshloom.service.rounds.policy import make_policy
from meshloom.service.wire.errors import Refused

VERSION = "0.1.0"
LEAVES = (Leaf("w", (8, 4), "float32", (None, None)),)


class Killed(BaseException):
    """What happens to a process at kill -9, as far as one can tell in one process."""


class Fate:
    """Kills at the n-th of the points that the run passes; counts them."""

    def __init__(self):
        self.passed: list[str] = []
        self.fatal: int | None = None

    def point(self, name: str) -> None:
        self.passed.append(name)
        if len(self.passed) == self.fatal:
            raise Killed(name)


class FakeServer:
    """A server with one number for all of its blocks; it adds the mean to it."""

    def __init__(self, name: str, fate: Fate):
        self.name, self.address, self.fate = name, f"{name}:1", fate
        self.applied: list[int] = []
        self.refusing: dict[str, Exception] = {}
        self.blocks: dict[str, list[int]] = {}  # of each job
        self.lose()

    def lose(self) -> None:
        """Forgets everything, as a server that was killed."""
        self.jobs: dict[str, dict[str, Any]] = {}
        self.applied.clear()

    def call(self, method: str, message: dict[str, Any]) -> dict[str, Any]:
        self.fate.point(f"before {method} at {self.name}")
        if method in self.refusing:
            raise self.refusing[method]
        message = json.loads(json.dumps(message, allow_nan=False))
        answer = getattr(self, method.lower())(message)
        self.fate.point(f"after {method} at {self.name}")
        return json.loads(json.dumps(answer))

    def of(self, message: dict[str, Any]) -> dict[str, Any]:
        if message["job"] not in self.jobs:
            raise Refused(f"no job {message['job']!r} here")
        return self.jobs[message["job"]]

    def create(self, message):
        assert message["blocks"], "a server without blocks has no part in a job"
        fresh = {"version": None, "versions": {}, "staged": {}, "merged": None}
        self.blocks[message["job"]] = message["blocks"]
        self.jobs.setdefault(message["job"], fresh)
        return {}

    def stage(self, job: str, key: tuple[int, int, int], value: float) -> None:
        state = self.of({"job": job})
        if key[2] == 0:
            state.update(version=0, versions={0: value})
        else:
            before = state["staged"].setdefault(key, value)
            assert repr(before) == repr(value), "another value for the same piece"

    def status(self, message):
        state = self.of(message)
        staged = [list(key) for key in state["staged"]]
        about = {"staged": staged, "blocks": 1, "bytes": 64}
        about["held"] = self.blocks[message["job"]]
        return {"version": state["version"], **about}

    def place(self, message):
        self.of(message)
        return {}

    def drop(self, message):
        staged = self.of(message)["staged"]
        gone = [tuple(owner[:2]) for owner in message["contributions"]]
        old = [key for key in staged if key[:2] in gone]
        for key in old:
            del staged[key]
        return {"bytes": 10 * len(old)}

    def forget(self, message):
        self.jobs.pop(message["job"], None)
        return {}

    def merge(self, message):
        state = self.of(message)
        assert message["version"] == state["version"] + 1, (message, state)
        total = 0.0
        for part in message["contributions"]:
            key = part["learner"], part["incarnation"], part["round"]
            if key not in state["staged"]:
                raise Refused(f"{key} is not staged at {self.name}")
            total += part["coefficient"] * state["staged"][key]
        state["merged"] = message["version"], total / message["divisor"]
        mean = state["merged"][1]
        is_finite = mean == mean
        return {"sum_of_squares": mean**2 if is_finite else "NaN", "finite": is_finite}

    def apply(self, message):
        state, version = self.of(message), message["version"]
        if version > state["version"]:
            assert version == state["version"] + 1
            value = state["versions"][state["version"]]
            if message["scale"]:
                merged_for, mean = state["merged"]
                assert merged_for == version
                value += message["scale"] * message["share"] * mean
            state["versions"][version] = value
            state["version"] = version
            self.applied.append(version)
        wanted = {*message["keep"], state["version"]}
        state["versions"] = {v: x for v, x in state["versions"].items() if v in wanted}
        for key in message["drop"]:
            state["staged"].pop(tuple(key), None)
        return {}

    def save(self, message):
        state = self.of(message)
        assert message["version"] == state["version"]
        path = pathlib.Path(message["folder"]) / f"{self.name}.json"
        path.write_text(json.dumps(state["versions"][state["version"]]))
        return {"crcs": {}}

    def load(self, message):
        path = pathlib.Path(message["folder"]) / f"{self.name}.json"
        try:
            value = json.loads(path.read_text())
        except ValueError:
            raise Refused(f"{path} is damaged") from None
        version = message["version"]
        state = {"version": version, "versions": {version: value}, "staged": {}}
        self.jobs[message["job"]] = {**state, "merged": None}
        return {}

    def digest(self, message):
        value = self.of(message)["versions"][message["version"]]
        return {"lanes": {"w": [int(value * 8) % 2**32, 1]}}


class FatalLog(Log):
    """A log around whose writes the process can be killed."""

    fate: Fate

    def __init__(self, store, leadership):
        super().__init__(store, leadership)
        # No power is lost here, and waiting for the disk is most of the time.
        store._connection.execute("PRAGMA synchronous = OFF")

    def _write(self, changes):
        kinds = [type(change).__name__ for change in changes]
        is_compacting = "Delete" in kinds or changes[0].key.startswith("snapshots/")
        if not is_compacting:  # `append_all` has points of its own
            return super()._write(changes)
        self.fate.point(f"before {kinds[0]} of the log")
        super()._write(changes)
        self.fate.point(f"after {kinds[0]} of the log")

    def append_all(self, job, entries):
        entries = list(entries)
        kinds = "+".join(kind for kind, _ in entries)
        self.fate.point(f"before log of {kinds}")
        numbers = super().append_all(job, entries)
        self.fate.point(f"after log of {kinds}")
        return numbers


def spec_message(**changes) -> dict[str, Any]:
    mode, overrides = changes.pop("mode", "sync"), changes.pop("policy", {})
    layout = make_layout(LEAVES, block_bytes=16)
    facts = {"num_rounds": 4, "version": VERSION, **changes}
    return job_spec(make_policy(mode, **overrides), layout, **facts)


class House:
    """A service in one folder: its servers live on when its coordinator is killed."""

    def __init__(self, folder: pathlib.Path, num_servers: int = 2, **changes):
        self.folder = folder
        facts = {"save_every": 2, "keep_checkpoints": 3}
        facts = {name: changes.pop(name, value) for name, value in facts.items()}
        self.settings = Settings(**facts)
        self.message = spec_message(**changes)
        self.spec = parse_spec(self.message, VERSION)
        self.fate = Fate()
        self.servers = [FakeServer(f"s{i}", self.fate) for i in range(num_servers)]
        self.time = 100.0
        self.said: list[str] = []
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.job: Job | None = None
        self.log: FatalLog | None = None

    def start(self) -> Job:
        """Starts the coordinator, anew if it was killed."""
        self.stop()
        self.log = FatalLog.embedded(self.folder / "coordinator.db")
        self.log.fate = self.fate
        log, name = self.log, self.spec.job

        def record(placement, why: str) -> None:
            log.append(name, "placement", {"placement": placement.to_json()})

        about = name, self.spec.layout, self.servers
        group = ServerGroup(*about, copies=self.spec.copies, record=record)
        if not self.log.read(self.spec.job):
            body = {"spec": self.message, "servers": group.names}
            self.log.append(self.spec.job, "spec", body)
        around = Surroundings(
            folder=self.folder / self.spec.job,
            log=self.log,
            clock=lambda: self.time,
            say=self.say,
            settings=self.settings,
        )
        self.job = Job(self.spec, group, around)
        restoring.start(self.job)
        self.cleaner = Cleaner(self.job)
        return self.job

    def say(self, text: str, event: str = "note", **fields: Any) -> None:
        self.events.append((event, fields))
        if text:
            self.said.append(text)

    def stop(self) -> None:
        if self.log is not None:
            self.log.close()
        if self.job is not None:
            self.job.servers.close()

    def ask(self, method: str, **message) -> dict[str, Any]:
        assert self.job is not None
        request = driver.Request(method, message)
        driver.cycle(self.job, self.cleaner, [request])
        return request.answer.result(timeout=0)

    def pass_time(self, seconds: int) -> None:
        """Lets time pass while the thread of the job looks at the leases."""
        for _ in range(seconds):
            self.time += 1.0
            driver.cycle(self.job, self.cleaner, [])

    def next(self, learner: int, incarnation: int, after: int) -> dict[str, Any]:
        assert self.job is not None
        return self.job.board.wait(learner, incarnation, after, seconds=0)

    def initialize(self) -> None:
        for i, server in enumerate(self.servers):
            server.stage("run", (0, 0, 0), float(i))
        assert self.ask("initialize") == {"state": "ok"}

    def stage(self, learner: int, incarnation: int, round: int, value: float) -> None:
        for server in self.servers:
            server.stage("run", (learner, incarnation, round), value)

    def contribute(self, learner: int, incarnation: int, round: int, base: int, **more):
        message = {
            **{"learner": learner, "incarnation": incarnation, "round": round},
            **{"base": base, "weight": 2.0, "steps": 1},
            "sums": {"loss": 2.0 * (learner + 1), "weight": 2.0},
            "epoch": self.job.servers.placement.epoch,
            **more,
        }
        return self.ask("contribute", **message)


@pytest.fixture
def make_house(tmp_path, monkeypatch):
    """Makes houses in the test's folder, and closes them after it."""
    houses: list[House] = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)  # as for the log

    def make(name: str = "service", **changes) -> House:
        houses.append(House(tmp_path / name, **changes))
        return houses[-1]

    yield make
    for house in houses:
        house.stop()


@pytest.fixture
def killed() -> type[BaseException]:
    return Killed


@pytest.fixture
def make_spec():
    return spec_message


class Remote:
    """A fake server behind the interface of one that is called over the network."""

    def __init__(self, server):
        self.name, self.address = server.name, server.address
        self.call = server.call
        self.is_lost = False

    def mark_lost(self) -> None:
        self.is_lost = True


@dataclasses.dataclass
class Center:
    """A coordinator with fake servers, and its clock."""

    coordinator: Coordinator
    servers: list
    said: list
    time: list

    def call(self, method: str, **message):
        answer = self.coordinator.methods[method](message)
        assert isinstance(answer, dict)
        return answer

    def pass_time(self, seconds: int) -> None:
        for _ in range(seconds):
            self.time[0] += 1
            self.coordinator.watch()

    def initialize(self, job: str = "run") -> None:
        for i, server in enumerate(self.servers):
            server.stage(job, (0, 0, 0), float(i))
        assert self.call("Initialized", job=job) == {"state": "ok"}

    def contribute(self, learner: int, round: int = 1, job: str = "run", **changes):
        message = {
            **{"job": job, "learner": learner, "incarnation": 1, "round": round},
            **{"base": round - 1, "weight": 2.0, "steps": 1},
            "sums": {"loss": 1.0, "weight": 2.0},
            **changes,
        }
        return self.call("Contribute", **message)


@pytest.fixture
def center(make_house, tmp_path, monkeypatch):
    from meshloom.service.coordinator import coordinator as module

    monkeypatch.setattr(module, "ANSWER_SECONDS", 5.0)
    servers = make_house().servers
    by_name = {server.name: server for server in servers}
    said: list[str] = []
    now = [100.0]
    coordinator = Coordinator(
        tmp_path / "folder",
        num_servers=2,
        version=VERSION,
        settings=Settings(save_every=2),
        connect=lambda name, address: Remote(by_name[name]),  # type: ignore
        clock=lambda: now[0],
        say=lambda text, *_, **__: said.append(text) if text else None,
    )
    yield Center(coordinator, servers, said, now)
    coordinator.close()


@pytest.fixture
def opened(center, make_spec):
    for server in center.servers:
        center.call("RegisterServer", name=server.name, address=server.address)
    answer = center.call("OpenJob", **make_spec())
    names = ["s0", "s1"]
    where = {"copies": 1, "epoch": 0, "since": 0, "lost": []}
    assert answer == {
        "servers": {"s0": "s0:1", "s1": "s1:1"},
        "placement": {**where, "before": names, "members": names},
        "initialize": True,
        **{"version": 0, "history": answer["history"]},
    }
    return center
