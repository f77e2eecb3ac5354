"""Trains a small model in every mode, in one process and in simulated time.

The engine and the clock are those of the simulator, merging and updating those of the
servers, and gradients those of a Program. Learners share the compiled Program; random
keys of a model (dropout) are those of the first rows for all of them.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ...service.blocks.box import Box
from ...service.learner import shards
from ...service.learner.compression import Compressor, packed_share
from ...service.rounds.cluster import Cluster, Outcome
from ...service.rounds.events import Commit, Release
from ...service.rounds.leases import from_ranges
from ...service.rounds.policy import Policy
from ...service.rounds.simulate import simulate
from ...service.server.store import BlockStore
from ...service.wire.codecs import PLAIN, Codec
from ..run.exchange_update import make_update, update_spec
from .compare_task import Task

Packing = tuple[Codec, Codec]  # of pushes and of pulls
DENSE: Packing = (PLAIN, PLAIN)
REFERENCE = "sync"
# What counts as the loss of sync: modes differ in the last percents for long.
TARGET = 1.05


@dataclasses.dataclass(frozen=True)
class Point:
    """Shared parameters at some time: committed samples, and the held-out loss."""

    samples: int
    seconds: float
    loss: float


@dataclasses.dataclass(frozen=True)
class Result:
    """One mode.

    Attributes:
      distance: |parameters - those of sync| / |those of sync|, at the end.
      seconds_to_target: simulated time to 1.05 times the final loss of sync; None:
        never.
    """

    mode: str
    points: tuple[Point, ...]
    outcome: Outcome
    distance: float
    seconds_to_target: float | None

    def to_json(self) -> dict[str, Any]:
        learners = self.outcome.learners
        return {
            "mode": self.mode,
            "loss": self.points[-1].loss,
            "seconds": self.outcome.seconds,
            "seconds_to_target": self.seconds_to_target,
            "distance": self.distance,
            "bytes_per_learner": self.bytes_per_learner,
            "commits": self.outcome.num_commits,
            "dropped": self.outcome.num_dropped,
            "samples": self.points[-1].samples,
            "points": [dataclasses.astuple(point) for point in self.points],
            "learners": len(learners),
        }

    @property
    def bytes_per_learner(self) -> float:
        """Bytes that a learner sends and receives, on average."""
        learners = self.outcome.learners
        return sum(x.bytes_up + x.bytes_down for x in learners) / len(learners)


@dataclasses.dataclass
class Replica:
    """A learner's own state: parameters on the host, and the optimizer's."""

    leaves: list[np.ndarray]
    base: list[np.ndarray]  # what the servers had when each fragment was read
    opt_state: Any
    done: int = 0  # steps of the current round
    sent: list[shards.Piece] = dataclasses.field(default_factory=list)
    weight: float = 0.0


class Training:
    """The `Work` of a simulation: one mode with real numerics."""

    def __init__(
        self, task: Task, policy: Policy, num_points: int, packing: Packing = DENSE
    ):
        """Args:
        packing: how learners pack what they send, and servers what they publish.
        """
        push, pull = packing
        self._task, self._policy = task, policy
        self._layout = task.make_layout(policy)
        self._compressor = Compressor(push, self._layout)
        self._residuals: dict[int, shards.Arrays] = {}
        config = SimpleNamespace(
            exchange=SimpleNamespace(policy=policy),
            optimizer=task.config.optimizer,
            schedule=task.config.schedule,
            num_steps=task.config.num_steps,
        )
        spec = {
            "job": "compare",
            "policy": policy.to_json(),
            "layout": self._layout.to_json(),
            "update": update_spec(config),
            "compression": {"push": str(push), "pull": str(pull)},
        }
        self._store = BlockStore(spec, make_update=make_update)
        leaves = [np.array(x) for x in jax.tree.leaves(task.initial.params)]
        plain = Compressor(PLAIN, self._layout)
        self._stage((0, 1, 0), plain.contribution(_arrays(leaves))[0])
        self._replicas: dict[int, Replica] = {}
        self._bases: dict[tuple[int, int, int], int] = {}
        self._reading: dict[int, int] = {}  # the version that each learner began with
        self._samples = 0
        self._every = task.config.batch_size * task.config.num_steps / num_points
        self.points = [Point(0, 0.0, task.loss(leaves))]

    def released(self, release: Release, fragment: int | None) -> None:
        """Reads the released version into the learner's parameters."""
        self._reading[release.learner] = release.version
        if fragment is None:
            leaves = self.shared()
            base = [np.array(x) for x in leaves]
            opt_state = self._task.initial.opt_state
            self._replicas[release.learner] = Replica(leaves, base, opt_state)
            return
        replica, mix = self._replicas[release.learner], self._policy.mix
        for block in self._layout.blocks:
            if self._layout.fragment_of(block.index) != fragment:
                continue
            for slab in block.slabs:
                new = self._store.read(release.version, slab.leaf, slab.box)
                index = (*slab.box.slices(), ...)
                own = replica.leaves[slab.leaf][index]
                replica.leaves[slab.leaf][index] = mix * new + (1 - mix) * own
                replica.base[slab.leaf][index] = new

    def computed(self, release: Release, delay: int) -> None:
        """Computes what a learner sends, and steps of its next round."""
        replica, policy = self._replicas[release.learner], self._policy
        first = policy.steps_before(release.round)
        last = policy.steps_before(release.round + 1)
        if policy.outer is None:
            self._gradients(release, replica, first)
            return
        replica.weight = 0.0
        blocks = from_ranges(release.blocks)[replica.done :]
        self._local_steps(replica, first + replica.done, blocks)
        pairs = zip(replica.base, replica.leaves, strict=True)
        self._send(release, replica, [base - now for base, now in pairs])
        # Steps that were done ahead have the weight of the others.
        replica.weight *= (last - first) / max(last - first - replica.done, 1)
        weight = replica.weight
        self._local_steps(replica, last, from_ranges(release.ahead)[:delay])
        replica.done, replica.weight = delay, weight

    def arrived(self, release: Release) -> float:
        replica = self._replicas[release.learner]
        key = release.learner, release.incarnation, release.round
        self._stage(key, replica.sent)
        self._bases[key] = release.version
        return replica.weight

    def committed(self, commit: Commit, time: float) -> None:
        """Merges and applies a commit as a coordinator with one server does."""
        contributions = [dataclasses.asdict(part) for part in commit.contributions]
        merged = self._store.merge(
            commit.version, commit.fragment, contributions, commit.divisor
        )
        scale = 1.0 if merged["finite"] else 0.0
        limit = self._task.config.max_grad_norm
        if merged["finite"] and limit is not None and self._policy.outer is None:
            norm = math.sqrt(merged["sum_of_squares"])
            scale = min(1.0, limit / max(norm, 1e-12))
        # Compensation compares with the version that a gradient came from; nothing
        # else reads an old one.
        keep = {*self._bases.values(), *self._reading.values()}
        keep = keep if self._policy.compensation else set()
        self._store.apply(commit.version, scale, commit.step, commit.share, keep)
        for part in commit.contributions:
            if not part.is_reused:
                steps = self._policy.steps_of(part.round)
                self._samples += steps * self._task.rows
        if self._samples >= len(self.points) * self._every:
            self.note(time)

    def settled(self, kept: set[tuple[int, int, int]]) -> None:
        gone = [key for key in self._bases if key not in kept]
        self._store.drop(gone)
        for key in gone:
            del self._bases[key]

    def shared(self) -> list[np.ndarray]:
        """Returns a copy of the newest shared parameters."""
        newest = self._store.newest
        assert newest is not None
        boxes = [Box.whole(leaf.shape) for leaf in self._layout.leaves]
        return [np.array(self._store.read(newest, i, b)) for i, b in enumerate(boxes)]

    def note(self, time: float) -> None:
        """Records the held-out loss of the shared parameters."""
        loss = self._task.loss(self.shared())
        self.points.append(Point(self._samples, time, loss))

    def _gradients(self, release: Release, replica: Replica, step: int) -> None:
        state = self._state(replica, step)
        (block,) = from_ranges(release.blocks)
        batch = self._task.batch(block)
        found = self._task.program.gradients(state, batch)
        self._send(release, replica, jax.tree.leaves(found.params))
        replica.weight = float(found.sums["weight"])

    def _send(self, release: Release, replica: Replica, leaves: Sequence[Any]) -> None:
        """Packs what a learner sends, as it does on its devices."""
        arrays, learner = _arrays(leaves), release.learner
        residual: shards.Arrays = {}
        if self._compressor.has_residual:
            zeros = {i: jnp.zeros(x.shape, jnp.float32) for i, x in arrays.items()}
            residual = self._residuals.get(learner, zeros)
        replica.sent, self._residuals[learner] = self._compressor.contribution(
            arrays, self._policy.fragment_of(release.round), residual=residual
        )

    def _local_steps(self, replica: Replica, start: int, blocks: Sequence[int]):
        if not blocks:
            return
        state = self._state(replica, start)
        for block in blocks:
            state, metrics = self._task.program.step(state, self._task.batch(block))
            replica.weight += float(metrics["weight"])
        replica.leaves = [np.array(x) for x in jax.tree.leaves(state.params)]
        replica.opt_state = state.opt_state

    def _state(self, replica: Replica, step: int) -> Any:
        number = jax.device_put(np.int32(step), self._task.program.shardings.step)
        return self._task.initial._replace(
            step=number,
            params=self._task.params(replica.leaves),
            opt_state=replica.opt_state,
        )

    def _stage(self, key: tuple[int, int, int], sent: Sequence[shards.Piece]) -> None:
        for piece in sent:
            array = piece.unpacked()
            self._store.stage(*key, piece.block, piece.slab, piece.start, array)


def compare(
    config: Any,
    policies: Mapping[str, Policy],
    cluster: Cluster,
    *,
    num_points: int = 32,
) -> list[Result]:
    """Trains in every mode with the same samples; sync is trained in any case.

    Args:
      config: of a run; `num_steps` is the number of local steps of each learner, and
        its exchange says how they compress what they send and receive; the sync that
        others are compared with does not.
      cluster: learners and links. Its `param_bytes` says what is simulated, which
        need not be the size of the model.
    """
    task = Task(config, len(cluster.step_seconds))
    num_steps: int = config.num_steps
    packing = config.exchange.push_codec, config.exchange.pull_codec

    def run(policy: Policy, num_rounds: int, packing: Packing) -> tuple:
        training = Training(task, policy, num_points, packing)
        up, down = (packed_share(task.make_layout(policy), x) for x in packing)
        links = dataclasses.replace(cluster, push_share=up, pull_share=down)
        outcome = simulate(policy, links, num_rounds, work=training)
        training.note(outcome.seconds)
        return training.points, outcome, _flat(training.shared())

    runs = {}
    if REFERENCE not in policies or packing != DENSE:
        runs[None] = run(Policy(), num_steps, DENSE)
    for mode, policy in policies.items():
        runs[mode] = run(policy, policy.num_rounds(num_steps), packing)
    points, _, reference = runs.get(None) or runs[REFERENCE]
    target = TARGET * points[-1].loss
    results = []
    for mode in policies:
        points, outcome, params = runs[mode]
        reached = [point.seconds for point in points if point.loss <= target]
        distance = np.linalg.norm(params - reference) / np.linalg.norm(reference)
        first = min(reached, default=None)
        results.append(Result(mode, tuple(points), outcome, float(distance), first))
    return results


def _arrays(leaves: Sequence[Any]) -> dict[int, jax.Array]:
    return {i: jnp.asarray(x, jnp.float32) for i, x in enumerate(leaves)}


def _flat(leaves: list[np.ndarray]) -> np.ndarray:
    return np.concatenate([leaf.ravel().astype(np.float64) for leaf in leaves])
