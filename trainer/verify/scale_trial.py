"""A process of `meshloom scale`: several meshes, trained a few steps at a time.

Every process of a job makes the same calls in the same order.
"""

import collections
import dataclasses
import math
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from ...sharding import MeshSpec
from ...sharding.mesh import AXES
from ..checkpoint import manifest
from ..job.group import Group
from ..program.computation import Choose
from ..run.prepare import Prepared, prepare
from ..run.reading import batches_of
from ..run.train import Config

NUM_PROBES = 16
# Of events in a profile: a collective, whatever its number, kind or half of it.
COLLECTIVES = (
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
    "collective-broadcast",
)

Answer = dict[str, Any]
Span = tuple[float, float]  # nanoseconds
# What a plan says of a step: its seconds, or why it says nothing.
Foretell = Callable[[Prepared], tuple[float | None, str]]


@dataclasses.dataclass
class Trial:
    """A mesh with its compiled step and its state."""

    prepared: Prepared
    step: Any
    state: Any


class Trials:
    """The meshes that a job of `group.size` processes trains.

    Args:
      meshes: {name: (sizes, batch_size)}.
      choose: fills in what the config leaves open.
    """

    def __init__(
        self,
        config: Config,
        meshes: Mapping[str, tuple[str, int]],
        group: Group,
        choose: Choose,
        foretell: Foretell,
    ):
        self._config, self._meshes, self._group = config, meshes, group
        self._choose, self._foretell = choose, foretell
        self._trials: dict[str, Trial] = {}

    def prepare(self, mesh: str) -> Answer:
        """Compiles the step of a mesh and initializes its state."""
        sizes, batch_size = self._meshes[mesh]
        spec = MeshSpec.parse(sizes)
        config = dataclasses.replace(self._config, mesh=spec, batch_size=batch_size)
        prepared = prepare(config, self._devices(spec), choose=self._choose)
        seconds, reason = self._foretell(prepared)
        step = prepared.compile()
        state = prepared.program.init(jax.random.key(config.seed))
        self._trials[mesh] = Trial(prepared, step, state)
        return {
            "plan": prepared.chosen.config.plan,
            "foretold": seconds,
            "not_foretold": reason,
            "sharded": _sharded(state.params),
        }

    def steps(
        self, mesh: str, first: int, count: int, delay: float | None = None
    ) -> Answer:
        """Runs steps `first` + 1 to `first` + `count`, and times them.

        Args:
          delay: the last process waits so long before each step, and every process for
            the end of each step; None dispatches all at once, as in training.
        """
        trial = self._trials[mesh]
        with batches_of(trial.prepared, range(first, first + count)) as loaded:
            batches = list(loaded)
        jax.block_until_ready(batches)
        is_last = self._group.index == self._group.size - 1
        found = []
        self._meet()
        begin = time.perf_counter()
        for batch in batches:
            if delay and is_last:
                time.sleep(delay)
            trial.state, metrics = trial.step(trial.state, batch)
            found.append(metrics["loss"])
            if delay is not None:
                jax.block_until_ready(trial.state)
        jax.block_until_ready(trial.state)
        seconds = time.perf_counter() - begin
        return {"seconds": seconds, "losses": [float(loss) for loss in found]}

    def state(self, mesh: str) -> Answer:
        """Returns what the parameters are compared by."""
        trial = self._trials[mesh]
        on = trial.prepared.mesh
        params = trial.prepared.layout.canonical(trial.state, on).params
        probes, norm = jax.jit(_probes, out_shardings=NamedSharding(on, P()))(params)
        return {
            "digest": manifest.tree_digest(params),
            "probes": [float(x) for x in jax.device_get(probes)],
            "norm": float(norm),
        }

    def communication(self, mesh: str, first: int, count: int) -> Answer:
        """Profiles steps: the share of their time that devices spend in collectives."""
        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = 0
        with tempfile.TemporaryDirectory() as folder:
            with jax.profiler.trace(folder, profiler_options=options):
                timed = self.steps(mesh, first, count)
            (file,) = Path(folder).rglob("*.xplane.pb")
            profile = jax.profiler.ProfileData.from_file(str(file))
        return {"share": communication_share(profile), "losses": timed["losses"]}

    def _devices(self, spec: MeshSpec) -> Sequence[Any]:
        """Returns the first devices of each process, the same number of each."""
        number = math.prod(getattr(spec, axis) for axis in AXES)
        each = number // self._group.size
        found = []
        for process in range(self._group.size):
            own = [d for d in jax.devices() if d.process_index == process]
            found += own[:each]
        return found

    def _meet(self) -> None:
        if self._group.size > 1:
            multihost_utils.sync_global_devices("scale")


def _sharded(params: Any) -> float:
    """Returns the share of the parameters that each device holds."""
    leaves = jax.tree.leaves(params)
    own = sum(x.addressable_shards[0].data.size for x in leaves)
    return own / sum(x.size for x in leaves)


def _probes(params: Any) -> tuple[jax.Array, jax.Array]:
    """Returns products with random vectors, and the norm.

    The mean square of the difference of such products estimates the squared distance
    of two states, without moving either of them.
    """
    leaves = jax.tree.leaves(params)

    def one(probe: jax.Array) -> jax.Array:
        key = jax.random.fold_in(jax.random.key(0), probe)
        total = jnp.float32(0)
        for i, leaf in enumerate(leaves):
            draw = jax.random.normal(jax.random.fold_in(key, i), leaf.shape)
            total += jnp.sum(leaf.astype(jnp.float32) * draw)
        return total

    norm = sum(jnp.sum(jnp.square(x.astype(jnp.float32))) for x in leaves)
    return jax.lax.map(one, jnp.arange(NUM_PROBES)), jnp.sqrt(norm)


def communication_share(profile: Any) -> float:
    """Returns the share of the devices' busy time in which a collective runs.

    Operations of one device may run at the same time, so overlaps count once.
    """
    busy: dict[Any, list[Span]] = collections.defaultdict(list)
    collectives: dict[Any, list[Span]] = collections.defaultdict(list)
    for plane in profile.planes:
        for event in (event for line in plane.lines for event in line.events):
            stats = dict(event.stats)
            if "hlo_op" not in stats:
                continue
            device = plane.name, stats.get("device_ordinal")
            span = event.start_ns, event.start_ns + event.duration_ns
            busy[device].append(span)
            if stats["hlo_op"].split(".")[0].removesuffix("-done") in COLLECTIVES:
                collectives[device].append(span)
    total = sum(map(_covered, busy.values()))
    if not total:
        raise ValueError(
            "the profile of these devices names no operations, so their share of "
            "communication is not known. Measure with another version of jax."
        )
    return sum(map(_covered, collectives.values())) / total


def _covered(spans: list[Span]) -> float:
    """Returns the length of the union of spans."""
    total, end = 0.0, -math.inf
    for start, stop in sorted(spans):
        total += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return total
