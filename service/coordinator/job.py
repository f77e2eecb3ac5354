"""A job: feeds events to the engine, and carries out what it decides.

Every event is in the log before the engine sees it, and every commit before a server
applies it. Whatever is killed when, the log says what has happened: replaying its
events gives the same engine, and the newest commit is applied once more, which changes
nothing where it was applied already.

A `Job` has no threads and no clock of its own, and is called by one thread (driver.py).
"""

import secrets
from collections.abc import Mapping
from typing import Any

from ..rounds.engine import Engine
from ..rounds.events import (
    Commit,
    Decision,
    Done,
    Dropped,
    Release,
    Restored,
    SetAside,
    Stopped,
    Tick,
    from_json,
)
from ..wire.errors import Refused
from . import commits, evaluations, requests, sums
from .board import Board
from .checkpoints import Checkpoint, Checkpoints
from .commits import Key, Received
from .evaluations import Evaluations
from .history import History, make_history
from .log import Entry
from .members import Members
from .places import Places
from .requests import Body
from .run_files import RunFiles
from .servers import ServerGroup
from .settings import Surroundings
from .spec import JobSpec


class Job:
    """One job, from its spec to its final parameters."""

    def __init__(self, spec: JobSpec, servers: ServerGroup, around: Surroundings):
        self.spec = spec
        self.servers = servers
        self.board = Board()
        self.around = around
        self.files = RunFiles(around.folder, around.log.check)
        # Absolute, since servers elsewhere are told this path too.
        folder = around.folder.absolute() / "service"
        self.checkpoints = Checkpoints(folder, around.log.check)
        self.num_bytes = 0  # of all contributions in the log
        self.is_held = True  # by the servers, which need not hold a finished job
        self.reset(make_history(around.log.read(spec.job)))

    def reset(self, history: History) -> None:
        """Forgets everything and loads a history, without acting on it yet."""
        spec, settings = self.spec, self.around.settings
        # Versions of another history may have the same numbers, and other parameters.
        self.history = secrets.token_hex(8)
        self.is_initialized = history.is_initialized
        self.is_finished = history.is_finished
        self.engine = Engine(spec.policy, spec.num_learners, spec.num_rounds)
        self.members = Members(
            spec.job, spec.num_learners, settings.lease_seconds, history.incarnations
        )
        self._logged = dict(history.commits)
        self._newest_logged = history.version
        self._received: dict[Key, Received] = {}  # staged on the servers
        self._places = Places()
        self._queue: list[tuple[str, Body]] = []  # accepted, not in the log yet
        self._evaluations = Evaluations(spec.stop)
        self.stopped: str | None = None  # why the job ended before its last round
        self._time = 0.0
        self._polled: float | None = None
        self._event = 0  # number in the log of the event that is being handled
        self._commit_facts: dict[str, Any] | None = None  # of the newest version
        self.cut = 0  # of the event that led to the newest version
        self.saved = -1  # version of the newest checkpoint

    # Requests. Each returns an answer, which counts once `flush` has returned.

    def describe(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Returns where the servers are, and whether they need the parameters."""
        return {
            **self.servers.describe(),
            "initialize": not self.is_initialized,
            "version": self.engine.version,
            "history": self.history,
        }

    def join(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Takes in a learner; tells it its incarnation."""
        now, learner = self.now(), requests.field(message, "learner")
        self.members.check_join(learner, message.get("owner"), now)
        incarnation = self.members.next_incarnation(learner)
        self._accept(requests.joined(message, incarnation, now))
        return {
            "incarnation": incarnation,
            "version": self.engine.version,
            "history": self.history,
            **self.servers.describe(),
            "lease_seconds": self.around.settings.lease_seconds,
        }

    def contribute(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Records a contribution that the servers have; may be repeated."""
        body = requests.contributed(message, self.now())
        event = body["event"]
        member = self.members.get(event["learner"], event["incarnation"])
        if member is None or member.must_rejoin:
            place = self._places.get(event["learner"])
            reason = place.reason if place is not None else ""
            return {"state": "left", "reason": reason or "join again"}
        if event["round"] > member.last_round:
            if (
                requests.field({"epoch": 0, **message}, "epoch")
                < self.servers.placement.since
            ):
                return {"state": "moved"}  # not yet at all servers that need it
            place = self._places.get(event["learner"])
            assert place is not None
            if (place.state, place.round) == ("go", event["round"]):
                requests.check_lease(message, place.blocks)
            self._accept(body)
        return {"state": "ok", "version": self.engine.version}

    def contribute_sum(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Records a sum of contributions: of all in it, or of none."""
        known = self._received, self.members, self._places
        bodies, gone = sums.judged(message, self.spec, self.now(), *known)
        for body in bodies:
            self._accept(body)
        return {"state": "regroup" if gone else "ok", "gone": gone}

    def leave(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Lets a learner go; one that is gone already may say so again."""
        learner = requests.field(message, "learner")
        incarnation = requests.field(message, "incarnation", 1)
        member = self.members.get(learner, incarnation)
        if member is not None:
            reason = str(message.get("reason", "left"))
            failed = message.get("failed") is True
            self._accept(requests.left(member, reason, self.now(), failed=failed))
        return {}

    def initialize(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Takes note that the initial parameters were sent, and saves them."""
        del message
        if not self.is_initialized:
            answers = self.servers.all("Status", {})
            if any(part["version"] is None for part in answers):
                return {"state": "push"}
            self.save()
            self.around.log.append(self.spec.job, "initialized", {})
            self.is_initialized = True
            self._post()
        return {"state": "ok"}

    def report(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Records an evaluation; may be repeated."""
        row = evaluations.row_of(message, self.now())
        if self._evaluations.is_new(row):
            self._evaluations.add(row)
            self._queue.append(("evaluation", row))
        return {}

    def save_now(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Saves a checkpoint of the newest version."""
        del message
        if not self.is_initialized:
            raise Refused(f"job {self.spec.job!r} has no parameters yet")
        self.save()
        return {"version": self.engine.version}

    # The loop of the job's thread: requests, poll, flush, advance.

    def poll(self) -> None:
        """Accepts what follows: lost learners, the end, and ticks of the engine."""
        now, seconds = self.now(), self.around.settings.lease_seconds
        self.servers.take_notes()
        for (learner, incarnation), when in self.board.take_heard().items():
            if self.members.is_stranger(learner, incarnation):
                reason = "the service has no record of it; was its folder removed?"
                self._places.leave(learner, incarnation, f"{reason} Join again")
            self.members.hear(learner, incarnation, when)
        if self._polled is not None and now - self._polled > seconds / 2:
            self.members.extend(now + seconds)  # this process may have been paused
        self._polled = now
        for member in self.members.expired(now):
            reason = f"not heard of for {seconds:g} s"
            self.around.say(f"{self.spec.job}: learner {member.learner} {reason}")
            self._accept(requests.left(member, reason, now, failed=True))
        reason = self._evaluations.reason
        if reason is not None and not self.engine.is_done:
            self._accept({"event": Stopped(now, reason).to_json()})
        deadline = self.engine.deadline
        is_quiet = all(kind != "event" for kind, _ in self._queue)
        if deadline is not None and now >= deadline and is_quiet:
            self._accept({"event": Tick(now).to_json()})

    def flush(self) -> list[Entry]:
        """Writes what was accepted to the log; returns its entries."""
        accepted, self._queue = self._queue, []
        if not accepted:
            return []
        numbers = self.around.log.append_all(self.spec.job, accepted)
        return [Entry(n, *entry) for n, entry in zip(numbers, accepted, strict=True)]

    def advance(self, entries: list[Entry]) -> None:
        """Lets the engine see events of the log, and carries out its decisions."""
        for entry in entries:
            if entry.kind == "evaluation":
                self.files.eval.append(entry.body)
                continue
            self.handle(entry.seq, entry.body)
            self._save_if_due()
        if self.engine.is_done and not self.is_finished:
            self._finish()
        self._post()

    def replay(self, history: History) -> None:
        """Takes the events of the log again; acts only on what was left undone."""
        for entry in history.entries:
            if entry.kind == "event":
                self._take(entry.body)
                self.handle(entry.seq, entry.body)
            elif entry.kind == "evaluation":
                self._evaluations.add(entry.body)
            elif entry.kind == "rollback":
                self._roll_back(entry.body["version"])
        for learner, incarnation in history.incarnations.items():
            place = self._places.get(learner)
            if place is None or place.incarnation < incarnation:  # joined in vain
                reason = "the service restarted from an older version: join again"
                self._places.leave(learner, incarnation, reason)
        self.members.extend(self.now() + self.around.settings.rejoin_seconds)
        self.advance([])

    def handle(self, seq: int, body: Body) -> None:
        """Lets the engine see one event of the log."""
        self._event = seq
        event = body["event"]
        if event["kind"] == "Contributed":
            key = event["learner"], event["incarnation"], event["round"]
            self._received[key] = Received.of(body)
            self.num_bytes += body["bytes"]
        elif event["kind"] == "Stopped" and not self.engine.is_done:
            self.stopped = event["reason"]
        self._carry_out(self.engine.handle(from_json(event)))  # type: ignore[arg-type]

    def _carry_out(self, decisions: list[Decision]) -> None:
        for index, decision in enumerate(decisions):
            if isinstance(decision, Commit):
                self._commit(decision, commits.keys_of(decisions[index + 1 :]))
            elif isinstance(decision, Release):
                self._places.release(decision, self._commit_facts)
            elif isinstance(decision, Dropped):
                self._places.drop(decision)
            elif isinstance(decision, SetAside):
                self.around.say(f"{self.spec.job}: {commits.why_set_aside(decision)}")
            else:
                assert isinstance(decision, Done)
                version, why = self.engine.version, self.stopped or ""
                facts = self._commit_facts
                self._places.end(decision.learner, version, facts, why)

    def now(self) -> float:
        """Returns the time, which never runs backwards, also across restarts."""
        self._time = max(self._time, self.around.clock())
        return self._time

    def save(self) -> Checkpoint | None:
        """Saves the newest version on all servers, unless that was done."""
        version = self.engine.version
        if version == self.saved:
            return None
        folder = self.checkpoints.prepare(version)
        self.servers.save(str(folder), version)
        digest = self.spec.layout.digest
        about = {"job": self.spec.job, "time": round(self.now(), 3)}
        checkpoint = self.checkpoints.complete(version, self.cut, digest, about)
        self.saved = version
        found, _ = self.checkpoints.find()
        older = [c.version for c in found if c.version <= version]
        self.checkpoints.keep(older[: self.around.settings.keep_checkpoints])
        return checkpoint

    def _accept(self, body: Body) -> None:
        self._take(body)
        self._queue.append(("event", body))

    def _take(self, body: Body) -> None:
        """Updates the members by an event, before the engine sees it."""
        event = body["event"]
        self._time = max(self._time, event["time"])
        if event["kind"] in ("Tick", "Stopped"):
            return
        learner, incarnation = event["learner"], event["incarnation"]
        if event["kind"] == "Joined":
            now = event["time"]
            self.members.add(learner, incarnation, now, owner=body["owner"])
            self._places.wait(learner, incarnation)
        elif event["kind"] == "Left":
            self.members.remove(learner)
            self._places.leave(learner, incarnation, event["reason"])
        elif member := self.members.get(learner, incarnation):
            member.last_round = max(member.last_round, event["round"])

    def _commit(self, commit: Commit, later: set[Key]) -> None:
        entry = self._logged.pop(commit.version, None)
        if entry is None:
            entry = self._decide(commit, later)
            self.around.log_commit(self.spec.job, entry)
            self.servers.all("Apply", commits.apply_message(entry))
            self.files.write_commit(entry)
        else:
            commits.check_entry(commit, entry)
            if commit.version == self._newest_logged:
                self.servers.all("Apply", commits.apply_message(entry))
        for key in entry["drop"]:
            self._received.pop(tuple(key), None)
        self.cut = self._event
        self._commit_facts = commits.facts_of(entry)

    def _decide(self, commit: Commit, later: set[Key]) -> dict[str, Any]:
        """Merges on all servers and returns the entry of the commit."""
        received = self._received
        merged = self.servers.all("Merge", commits.merge_message(commit, received))
        entry = commits.make_entry(commit, merged, received, self.spec, self.now())
        in_use = self._places.versions_in_use()
        in_use |= {info.base for info in received.values()}
        wanted = self.engine.kept | later
        return {
            **entry,
            "event": self._event,
            "keep": sorted(v for v in in_use if v < commit.version),
            "drop": commits.unwanted(received, wanted),
        }

    def _roll_back(self, version: int) -> None:
        """Makes everybody join again: the servers restarted from a checkpoint."""
        decisions = self.engine.handle(Restored(self._time))
        if lost := sum(isinstance(decision, Dropped) for decision in decisions):
            self.around.say(
                f"{self.spec.job}: the servers lost {lost} contributions after version "
                f"{version}; their data is leased again"
            )
        self._carry_out(decisions)
        self._received.clear()
        reason = f"the service restarted from version {version}: join again"
        self._places.rejoin(self.members, reason)

    def _save_if_due(self) -> None:
        every = self.around.settings.save_every
        if self.engine.version // every > max(self.saved, 0) // every:
            self.save()

    def _finish(self) -> None:
        self.save()
        version = self.engine.version
        digests = self.servers.digests(version)
        self.files.write_final(version, digests, self.stopped)
        self.around.log.append(self.spec.job, "finished", {"version": version})
        self.is_finished = True
        why = f": {self.stopped}" if self.stopped else ""
        self.around.say(f"{self.spec.job}: done at version {version}{why}", "done")

    def _post(self) -> None:
        """Shows the learners their places; nobody goes before there are parameters."""
        self._places.post(self.board, may_go=self.is_initialized)
