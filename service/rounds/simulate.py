"""Runs the engine in virtual time, with learners that compute, send, wait and fail.

The links of the servers and the time of an update are not modelled: a transfer takes
the latency and its bytes over the learner's own link.
"""

import bisect
import collections
import dataclasses
import heapq
import random
from typing import Protocol

from .cluster import Cluster, Learner, Outcome, Segment
from .engine import Engine
from .events import (
    Commit,
    Contributed,
    Done,
    Dropped,
    Event,
    Joined,
    Left,
    Release,
    Tick,
)
from .policy import Policy

# A run that takes so many times its ideal time does not get anywhere.
HOPELESS = 200.0


class Work(Protocol):
    """What learners and servers really compute while time is simulated."""

    def released(self, release: Release, fragment: int | None) -> None:
        """A learner reads a fragment of the released version; None: all of it."""
        ...

    def computed(self, release: Release, delay: int) -> None:
        """A learner ends its round, and does the first steps of the next if told so."""
        ...

    def arrived(self, release: Release) -> float:
        """The contribution is at the servers; returns its weight."""
        ...

    def committed(self, commit: Commit, time: float) -> None:
        """The servers apply a commit."""
        ...

    def settled(self, kept: set[tuple[int, int, int]]) -> None:
        """All other contributions are done with."""
        ...


class Simulation:
    """One run: a heap of things that will happen, and the engine that decides."""

    def __init__(
        self,
        policy: Policy,
        cluster: Cluster,
        num_rounds: int,
        *,
        record: bool = False,
        work: Work | None = None,
    ):
        self._work = work
        self._policy, self._cluster, self._record = policy, cluster, record
        num_learners = len(cluster.step_seconds)
        self._engine = Engine(policy, num_learners, num_rounds)
        self._num_rounds = num_rounds
        self._random = random.Random(cluster.seed)
        self._learners = [Learner(i, s) for i, s in enumerate(cluster.step_seconds)]
        self._heap: list[tuple[float, int, str, int, int]] = []
        self._count = 0
        self._time = 0.0
        self._tick: float | None = None
        self._first_done: float | None = None
        self._useful_steps = 0  # until then
        self._fragment_bytes = cluster.param_bytes / policy.fragments
        self._push_bytes = self._fragment_bytes * cluster.push_share
        self._commits_of = {f: [] for f in range(policy.fragments)}
        # Of each contribution: the version of what it changes.
        self._read: dict[tuple[int, int, int], int] = {}
        self._commits: list[float] = []
        self._staleness: collections.Counter[int] = collections.Counter()
        self._num_contributions = self._num_dropped = self._num_failures = 0
        self._segments: list[Segment] = []

    def run(self) -> Outcome:
        """Runs until the job is complete."""
        steps = self._policy.steps_before(self._num_rounds + 1)
        ideal = steps * max(self._cluster.step_seconds)
        limit = HOPELESS * (ideal + self._push_seconds() * self._num_rounds)
        for learner in self._learners:
            self._push(0.0, "join", learner)
        while not self._engine.is_done:
            time, _, kind, index, incarnation = heapq.heappop(self._heap)
            if time > limit:
                raise ValueError(
                    f"after {time:.3g} simulated seconds only {self._engine.version} "
                    "commits are made: learners fail faster than they finish a round. "
                    "Raise the time between failures, or lower local_steps"
                )
            self._time = time
            self._happen(kind, self._learners[index], incarnation)
        for learner in self._learners:
            if learner.is_done:
                continue
            self._flush(learner, self._time)
            self._spend(learner, "wait" if learner.is_up else "down", self._time)
        return self._outcome()

    def _push(self, time: float, kind: str, learner: Learner) -> None:
        self._count += 1
        key = time, self._count, kind, learner.index, learner.incarnation
        heapq.heappush(self._heap, key)

    def _happen(self, kind: str, learner: Learner, incarnation: int) -> None:
        if kind == "join":
            self._join(learner)
        elif kind == "tick":
            if self._tick == self._time:
                self._tick = None
            self._feed(Tick(self._time))
        elif kind == "left":
            self._feed(Left(self._time, learner.index, incarnation, "crashed", True))
        elif incarnation != learner.incarnation or not learner.is_up:
            return  # it has failed meanwhile
        elif learner.is_done:
            return
        elif kind == "fail":
            self._fail(learner)
        elif kind == "computed":
            self._send(learner)
        else:
            assert kind == "arrived", kind
            self._contribute(learner)

    def _join(self, learner: Learner) -> None:
        if learner.incarnation:
            self._spend(learner, "down", self._time)
        learner.incarnation += 1
        learner.is_up, learner.ahead = True, 0
        learner.free = self._time
        if self._cluster.mean_uptime is not None:
            uptime = self._random.expovariate(1 / self._cluster.mean_uptime)
            self._push(self._time + uptime, "fail", learner)
        self._feed(Joined(self._time, learner.index, learner.incarnation))

    def _fail(self, learner: Learner) -> None:
        self._num_failures += 1
        self._flush(learner, self._time)
        self._spend(learner, "wait", self._time)
        learner.is_up, learner.free = False, self._time
        noticed = min(self._cluster.lease_seconds, self._cluster.restart_seconds)
        self._push(self._time + noticed, "left", learner)
        self._push(self._time + self._cluster.restart_seconds, "join", learner)

    def _release(self, release: Release) -> None:
        """Plans the round of a learner: it receives, and computes."""
        learner, policy = self._learners[release.learner], self._policy
        is_first = learner.release is None or (
            learner.release.incarnation != release.incarnation
        )
        if is_first:
            learner.bases = [release.version] * policy.fragments
            fragment = None
            size = float(self._cluster.param_bytes)
        else:
            assert learner.release is not None
            fragment = policy.fragment_of(learner.release.round)
            bounds = learner.bases[fragment], release.version
            size = self._pull_bytes(fragment, *bounds)
            learner.bases[fragment] = release.version
        if self._work is not None:
            self._work.released(release, fragment)
        learner.release = release
        learner.bytes_down += size
        self._flush(learner, self._time)
        received = self._time + self._cluster.latency + size / self._cluster.down
        start = max(received, learner.free)
        steps = policy.steps_of(release.round) - learner.ahead
        end = start + steps * self._step(learner)
        if self._time > learner.free:
            self._plan(learner, "wait", learner.free, self._time)
        self._plan(learner, "send", max(self._time, learner.free), start)
        self._plan(learner, "compute", start, end)
        learner.free = end
        self._push(end, "computed", learner)

    def _send(self, learner: Learner) -> None:
        """Sends what was computed; meanwhile goes on if the policy has a delay."""
        assert learner.release is not None
        round = learner.release.round
        self._flush(learner, self._time)
        wait = self._policy.wait_seconds(self._cluster.seed, learner.index, round)
        arrived = self._time + wait + self._push_seconds()
        learner.bytes_up += self._push_bytes
        learner.ahead = self._policy.delay if round < self._num_rounds else 0
        if self._work is not None:
            self._work.computed(learner.release, learner.ahead)
        if learner.ahead:
            learner.free = self._time + learner.ahead * self._step(learner)
            self._plan(learner, "compute", self._time, learner.free)
        else:
            self._plan(learner, "wait", self._time, self._time + wait)
            self._plan(learner, "send", self._time + wait, arrived)
            learner.free = arrived
        self._push(arrived, "arrived", learner)

    def _contribute(self, learner: Learner) -> None:
        release, policy = learner.release, self._policy
        assert release is not None
        steps = policy.steps_of(release.round)
        key = learner.index, learner.incarnation, release.round
        self._read[key] = learner.bases[policy.fragment_of(release.round)]
        weight = float(steps) if self._work is None else self._work.arrived(release)
        self._feed(Contributed(self._time, *key, release.version, weight, steps))

    def _feed(self, event: Event) -> None:
        for decision in self._engine.handle(event):
            if isinstance(decision, Release):
                self._release(decision)
            elif isinstance(decision, Commit):
                self._commit(decision)
            elif isinstance(decision, Done):
                self._finish(decision.learner)
            elif isinstance(decision, Dropped):
                key = decision.learner, decision.incarnation, decision.round
                self._read.pop(key, None)
                self._num_dropped += 1
        if self._work is not None:
            self._work.settled(self._engine.kept)
        deadline = self._engine.deadline
        if deadline is not None and deadline != self._tick:
            self._tick = deadline
            self._push(deadline, "tick", self._learners[0])

    def _finish(self, index: int | None) -> None:
        if self._first_done is None:
            self._first_done = self._time
        if index is not None and not self._learners[index].is_done:
            learner = self._learners[index]
            self._flush(learner, self._time)
            kind = "wait" if learner.is_up else "down"
            self._spend(learner, kind, self._time)
            learner.is_done = True

    def _commit(self, commit: Commit) -> None:
        if self._work is not None:
            self._work.committed(commit, self._time)
        earlier = self._commits_of[commit.fragment]
        for part in commit.contributions:
            if part.is_reused:
                continue
            steps = self._policy.steps_of(part.round)
            self._learners[part.learner].useful_steps += steps
            self._learners[part.learner].last_useful = self._time
            if self._first_done is None or self._time <= self._first_done:
                self._useful_steps += steps
            self._num_contributions += 1
            base = self._read.pop((part.learner, part.incarnation, part.round))
            self._staleness[len(earlier) - bisect.bisect_right(earlier, base)] += 1
        earlier.append(commit.version)
        self._commits.append(self._time)

    def _step(self, learner: Learner) -> float:
        if not self._cluster.jitter:
            return learner.step_seconds
        return learner.step_seconds * self._random.lognormvariate(
            0.0, self._cluster.jitter
        )

    def _push_seconds(self) -> float:
        return self._cluster.latency + self._push_bytes / self._cluster.up

    def _pull_bytes(self, fragment: int, base: int, version: int) -> float:
        """Returns the bytes of a fragment for a learner that has a version of it.

        With compression it receives the changes since then, unless they are more.
        """
        if self._cluster.pull_share >= 1:
            return self._fragment_bytes
        commits = self._commits_of[fragment]
        first, last = (bisect.bisect_right(commits, v) for v in (base, version))
        share = (last - first) * self._cluster.pull_share
        return self._fragment_bytes * min(share, 1.0)

    def _plan(self, learner: Learner, kind: str, start: float, end: float) -> None:
        if end > start:
            learner.plan.append(Segment(learner.index, kind, start, end))

    def _flush(self, learner: Learner, now: float) -> None:
        """Books what was planned up to now; the rest, if any, still lies ahead."""
        rest = []
        for part in learner.plan:
            end = min(part.end, now)
            if end > part.start:
                learner.seconds[part.kind] += end - part.start
                if self._record:
                    self._segments.append(dataclasses.replace(part, end=end))
            if part.end > now and learner.is_up:
                start = max(part.start, now)
                rest.append(dataclasses.replace(part, start=start))
        learner.plan = rest

    def _spend(self, learner: Learner, kind: str, until: float) -> None:
        """Books the time since a learner had nothing left to do."""
        if until > learner.free:
            self._plan(learner, kind, learner.free, until)
            self._flush(learner, until)
        if kind == "wait":
            learner.plan = []

    def _outcome(self) -> Outcome:
        assert self._first_done is not None
        ideal = sum(1 / learner.step_seconds for learner in self._learners)
        return Outcome(
            seconds=self._time,
            num_commits=self._engine.version,
            num_contributions=self._num_contributions,
            num_dropped=self._num_dropped,
            num_failures=self._num_failures,
            goodput=self._useful_steps / self._first_done / ideal,
            staleness=dict(self._staleness),
            learners=tuple(self._learners),
            commits=tuple(self._commits),
            segments=tuple(self._segments),
        )


def simulate(
    policy: Policy,
    cluster: Cluster,
    num_rounds: int,
    *,
    record: bool = False,
    work: Work | None = None,
) -> Outcome:
    """Simulates a job; the same arguments always give the same outcome.

    Args:
      record: whether to keep what every learner did when, for a picture.
      work: what is computed meanwhile; nothing by default.
    """
    return Simulation(policy, cluster, num_rounds, record=record, work=work).run()
