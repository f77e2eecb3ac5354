"""`meshloom rounds replay`: recomputes a training between groups from its commit log.

Timing decides what is in the log, never what the log means: the log says which rounds
of which learners make each commit, and a round is a function of the version that it
starts from, of the learner's own optimizer state and of its samples. So one process can
compute everything again, in the order of the commits, and must find the same digests.
"""

import dataclasses
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from pathlib import Path
from typing import Any

import jax
import numpy as np

from ...service.blocks.digest import digest_of
from ...service.blocks.layout import Layout
from ...service.blocks.pieces import pieces
from ...service.learner import shards
from ...service.learner.compression import Compressor
from ...service.learner.merging import Merging, Read
from ...service.rounds.leases import from_ranges
from ...service.rounds.policy import Policy
from ...service.server.store import BlockStore
from ...service.wire.codecs import PLAIN
from ...sharding import MeshSpec
from ...sharding.mesh import AXES
from ..config import files as config_files
from ..program.state import State
from ..record.ledger import Ledger
from ..record.run_folder import CONFIG_GIN
from ..run.exchange_update import make_update
from ..run.exchanged import Exchanged
from ..run.prepare import Prepared, prepare
from ..run.reading import batches_of
from ..run.train import Config
from .training_audit import read_commits

Key = tuple[int, int, int]  # learner, incarnation, round


@dataclasses.dataclass(frozen=True)
class Round:
    """A round that a learner has computed.

    Attributes:
      base: the version that it started from.
      first, stop: its local steps are first + 1 .. stop.
      blocks: of the data, one for each of them.
      optimizer_step: of the checkpoint that the learner's own optimizer state came
        from, if it joined right before this round; None if it just went on.
    """

    key: Key
    base: int
    first: int
    stop: int
    blocks: Sequence[int]
    optimizer_step: int | None = None


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What a replay found.

    Attributes:
      different: paths of leaves whose final digest is another one.
      norms: versions whose gradient norm is another one.
    """

    commits: int
    rounds: int
    different: tuple[str, ...]
    norms: tuple[int, ...]
    num_leaves: int

    @property
    def passed(self) -> bool:
        return not self.different and not self.norms

    def __str__(self) -> str:
        what = f"{self.commits} commits of {self.rounds} rounds recomputed"
        if self.passed:
            return f"{what}: all {self.num_leaves} arrays are bit-equal"
        lines = [f"{what}: FAILED"]
        if self.norms:
            lines.append(f"  first different gradient norm: commit {self.norms[0]}")
        lines += [f"  different final digest: {path}" for path in self.different[:5]]
        if len(self.different) > 5:
            lines.append(f"  and {len(self.different) - 5} more arrays")
        return "\n".join(lines)


def replay(run: Path, log: Callable[[str], None] = print) -> Verdict:
    """Recomputes a finished run; this process needs devices for the largest mesh."""
    spec, final = _read(run, "spec.json"), _read(run, "final.json")
    commits = read_commits(run)
    rounds = find_rounds(run, commits, Policy.from_json(spec["policy"]))
    replayer = Replayer(run, spec, rounds)
    norms = []
    for number, commit in enumerate(commits, start=1):
        if not replayer.commit(commit, commits[number:]):
            norms.append(int(commit["version"]))
        if number % max(len(commits) // 10, 1) == 0:
            log(f"commit {number} of {len(commits)}")
    found = replayer.digests()
    different = tuple(p for p, digest in final["digests"].items() if found[p] != digest)
    return Verdict(
        len(commits), replayer.num_computed, different, tuple(norms), len(found)
    )


def num_devices(run: Path) -> int:
    """Returns the devices of the largest learner."""
    _read(run, "spec.json")
    meshes = (_mesh_of(folder) for folder in sorted((run / "learners").iterdir()))
    return max(_size(mesh) for mesh in meshes)


def _read(run: Path, name: str) -> dict[str, Any]:
    path = run / name
    if not path.exists():
        raise ValueError(
            f"{path} is missing: expected the folder of a finished training between "
            "learners, as `meshloom serve` writes it"
        )
    return json.loads(path.read_text())


def find_rounds(
    run: Path, commits: Sequence[Mapping[str, Any]], policy: Policy
) -> dict[int, list[Round]]:
    """Returns the rounds of each learner in the order in which it computed them.

    Most are in a commit. Those that were dropped count too, because they changed the
    learner's own optimizer state; they are in its ledger. Those that a learner forgot
    do not: it came back with a state from before, and they are in no commit, perhaps
    because the service fell back to a checkpoint.
    """
    bases: dict[Key, int] = {}
    leased: dict[Key, Sequence[Sequence[int]]] = {}  # ranges of blocks
    joined: dict[tuple[int, int], Mapping[str, Any]] = {}
    for commit in commits:
        for part in commit["contributions"]:
            key = (part["learner"], part["incarnation"], part["round"])
            bases[key] = part["base"]
            # Once more in a later commit, it has consumed its blocks already.
            leased.setdefault(key, part["blocks"])
    for folder in (run / "learners").iterdir():
        for row in Ledger(folder, is_writer=False).read():
            if row["event"] == "joined":
                joined[row["learner"], row["incarnation"]] = row
            elif row["event"] == "round":
                key = row["learner"], row["incarnation"], row["round"]
                bases[key], leased[key] = row["base"], row["blocks"]
    found: dict[int, list[Round]] = {}
    for key in sorted(bases):
        learner, incarnation, number = key
        own = found.setdefault(learner, [])
        is_first = not own or own[-1].key[1] != incarnation
        start = joined.get((learner, incarnation), {}) if is_first else {}
        first, stop = policy.steps_before(number), policy.steps_before(number + 1)
        blocks, saved = from_ranges(leased[key]), start.get("optimizer_step")
        own.append(Round(key, bases[key], first, stop, blocks, saved))
    committed = {_key(part) for row in commits for part in row["contributions"]}
    return {learner: _remembered(own, committed) for learner, own in found.items()}


def _remembered(rounds: Sequence[Round], committed: Set[Key]) -> list[Round]:
    """Returns the rounds of a learner that a commit or a later round depends on."""
    found: list[Round] = []
    used: tuple[int, int] | None = None  # an incarnation with such a later round
    back: int | None = None  # the step of the state with which the learner came back
    for round in reversed(rounds):
        is_forgotten = round.key[:2] != used and round.key not in committed
        if not is_forgotten or back is None or round.first < back:
            found.append(round)
            used = round.key[:2]
        if round.optimizer_step is not None:
            back = round.optimizer_step
    return found[::-1]


class Replayer:
    """Computes rounds and commits again, in one process."""

    def __init__(
        self, run: Path, spec: Mapping[str, Any], rounds: dict[int, list[Round]]
    ):
        self._policy = Policy.from_json(spec["policy"])
        self._store = BlockStore(spec, make_update=make_update)
        self._layout: Layout = self._store.layout
        self._todo = rounds
        self._learners = {
            number: _Replayed(
                run / "learners" / str(number),
                own,
                self._policy,
                self._layout,
                self._read,
            )
            for number, own in rounds.items()
        }
        self.num_computed = 0
        first = self._learners[min(self._learners)]
        self._stage((0, 0, 0), first.parameters())

    def commit(
        self, commit: Mapping[str, Any], later: Sequence[Mapping[str, Any]]
    ) -> bool:
        """Applies a commit; returns whether its gradient norm is the one in the log."""
        parts = commit["contributions"]
        for part in parts:
            self._compute((part["learner"], part["incarnation"], part["round"]))
        merged = self._store.merge(
            commit["version"], commit["fragment"], parts, commit["divisor"]
        )
        used = {_key(part) for row in later for part in row["contributions"]}
        self._store.apply(
            commit["version"],
            commit["scale"],
            commit["update_step"],
            commit["share"],
            keep={r.base for own in self._todo.values() for r in own},
            drop=[list(_key(part)) for part in parts if _key(part) not in used],
        )
        return _same_norm(merged["sum_of_squares"], commit["norm"])

    def digests(self) -> dict[str, str]:
        newest = self._store.newest
        assert newest is not None
        sums = self._store.digest_lanes(newest)
        return {x.path: digest_of(x, sums[x.path]) for x in self._layout.leaves}

    def _compute(self, key: Key) -> None:
        """Computes the rounds of a learner up to this one, unless that was done."""
        own, learner = self._todo[key[0]], self._learners[key[0]]
        while any(round.key == key for round in own):
            round = own.pop(0)
            self._stage(round.key, learner.compute(round))
            self.num_computed += 1

    def _read(
        self,
        version: int,
        buffers: shards.Host,
        fragment: int | None,
        base: shards.Host,
    ) -> int:
        """Fills buffers like a learner that pulls; a fragment only with its blocks."""
        del base
        for (leaf, box), buffer in buffers.items():
            for block, _, part in pieces(self._layout, leaf, box):
                if fragment in (None, self._layout.fragment_of(block)):
                    found = self._store.read(version, leaf, part)
                    buffer[part.slices(box)] = found
        return 0

    def _stage(self, key: Key, sent: Iterable[shards.Piece]) -> None:
        for piece in sent:
            array = piece.unpacked()
            self._store.stage(*key, piece.block, piece.slab, piece.start, array)


class _Replayed:
    """One learner of a run, on a mesh like its own."""

    def __init__(
        self,
        folder: Path,
        rounds: Sequence[Round],
        policy: Policy,
        layout: Layout,
        read: Read,
    ):
        loaded = config_files.load([str(folder / CONFIG_GIN)], (), root=Config)
        config = dataclasses.replace(loaded.config, mesh=_mesh_of(folder))
        devices = jax.devices()[: _size(config.mesh)]
        self._prepared: Prepared = prepare(config, devices)
        self._exchanged = Exchanged(self._prepared, config.exchange)
        self._policy, self._layout = policy, layout
        self._compressor = Compressor(config.exchange.push_codec, layout)
        self._merging = Merging(self._exchanged, layout, read, policy.mix)
        self._state: State | None = None
        # States after these steps are needed again, by a later incarnation.
        self._saved_at = {r.optimizer_step for r in rounds if r.optimizer_step}
        self._saved: dict[int, State] = {}

    def initial(self) -> State:
        key = jax.random.key(self._prepared.config.seed)
        return self._prepared.layout.create(key, self._prepared.mesh)

    def parameters(self) -> list[shards.Piece]:
        """Returns the parameters of version 0, as a learner sends them."""
        arrays = self._exchanged.of(self.initial().params)
        return Compressor(PLAIN, self._layout).contribution(arrays)[0]

    def compute(self, round: Round) -> list[shards.Piece]:
        """Computes a round; returns what the learner has sent."""
        step_fn = self._prepared.compile()
        if self._policy.outer is None:
            state = self._joined(round)
            with batches_of(self._prepared, round.blocks) as batches:
                grads = step_fn(state, next(batches))
            return self._sent(round, state, grads.params)
        state, merge_at = self._state, round.first + self._policy.delay
        if round.optimizer_step is not None or state is None:
            state, merge_at = self._joined(round), -1
        with batches_of(self._prepared, round.blocks) as batches:
            for step, batch in enumerate(batches, start=round.first):
                if step == merge_at:
                    state = self._merged(state, round)
                state, _ = step_fn(state, batch)
                if step + 1 in self._saved_at:
                    self._saved[step + 1] = _copy(state)
        if merge_at == round.stop:
            state = self._merged(state, round)
        return self._sent(round, state, state.params, self._merging.base)

    def _sent(
        self, round: Round, state: State, arrays: Any, base: shards.Host | None = None
    ) -> list[shards.Piece]:
        """Returns what the learner has sent, and keeps its state after that."""
        fragment = None
        if self._policy.fragments > 1:
            fragment = self._policy.fragment_of(round.key[2])
        sent, residual = self._compressor.contribution(
            self._exchanged.of(arrays),
            fragment,
            base=base,
            residual=self._exchanged.residual(state),
        )
        state = self._state = self._exchanged.put_residual(state, residual)
        # A checkpoint may be of a later step, if rounds were passed over.
        later = {step for step in self._saved_at if step >= round.stop}
        if residual and later:
            self._saved |= dict.fromkeys(later, _copy(state))
        return sent

    def _joined(self, round: Round) -> State:
        """Returns the state after joining, with all parameters of a version.

        A learner that sends gradients has no optimizer state of its own, but for what
        it has not sent yet.
        """
        has_state = self._policy.outer is not None or self._compressor.has_residual
        state = self._state
        if round.optimizer_step and has_state:
            state = _copy(self._saved[round.optimizer_step])
        elif state is None or round.optimizer_step == 0:
            state = self.initial()
        self._state = state
        fetched, _ = self._merging.fetch(round.base, None)
        return self._exchanged.at_step(
            self._merging.replace(state, fetched), round.first
        )

    def _merged(self, state: State, round: Round) -> State:
        """Returns the state with what the round before this one has brought."""
        fragment = None
        if self._policy.fragments > 1:
            fragment = self._policy.fragment_of(round.key[2] - 1)
        fetched, _ = self._merging.fetch(round.base, fragment)
        return self._merging.merge(state, fetched, fragment)


def _copy(state: State) -> State:
    """Returns a state that a step can consume without taking the original with it."""
    return jax.tree.map(lambda x: x.copy(), state)


def _mesh_of(folder: Path) -> MeshSpec:
    """Returns the mesh that a learner had, with all its sizes."""
    text = json.loads((folder / "environment.json").read_text())["mesh"]
    return MeshSpec() if text == "1" else MeshSpec.parse(text)


def _size(mesh: MeshSpec) -> int:
    return math.prod(getattr(mesh, axis) for axis in AXES)


def _key(part: Mapping[str, Any]) -> Key:
    return part["learner"], part["incarnation"], part["round"]


def _same_norm(sum_of_squares: float, logged: float) -> bool:
    norm = float(np.float32(np.sqrt(np.float64(sum_of_squares))))
    return norm == logged or (norm != norm and logged != logged)
