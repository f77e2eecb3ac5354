"""Prepares a run: checks a config against devices and data before writing anything."""

import dataclasses
import functools
import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from ...sharding import Sharder
from ...sharding.mesh import mesh_sizes
from ...sharding.text import counted, human_bytes
from ..config import tree as config_tree
from ..data import (
    Dataset,
    Source,
    mixing,
    open_source,
    order_of,
    throughput_unit,
)
from ..data.batches import SAMPLE_IDS, check_dtype
from ..data.growth import GrownOrder, Part
from ..data.mixing import MixedOrder
from ..data.orders import AnyOrder
from ..program import compiler_options, contract
from ..program.build import Batch, IdleAxis, Program, build
from ..program.computation import Choose, Chosen, choose_plain
from ..program.executables import Executables
from ..program.pipelining import Pipelining, Staging
from ..program.rules import name_settings
from ..program.schedules import make_rate
from ..program.state import Layout
from . import sampling
from .held_out import SETTINGS, HeldOut, open_split, with_weights

if TYPE_CHECKING:
    from .data_identity import Identity
    from .train import Config


TRAIN_STEP = "train step"  # the name of its program


@dataclasses.dataclass(frozen=True)
class Prepared:
    """A config with its Program and its data, checked against each other."""

    config: "Config"  # as given
    chosen: Chosen  # with everything that it left open chosen for the mesh
    program: Program
    train_data: Dataset
    held_out: dict[str, HeldOut]  # the splits that are evaluated, by name
    identity: "Identity | None" = None  # of the data; None until it has been read
    environment: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    parts: tuple[Part, ...] = ()  # of data that grows
    compiled: dict[str, Any] = dataclasses.field(default_factory=dict)  # by name

    @property
    def mesh(self) -> Mesh:
        return self.program.mesh

    @property
    def layout(self) -> Layout:
        return self.program.layout

    @property
    def staging(self) -> Staging | None:
        return self.program.staging

    @property
    def batch_size(self) -> int:
        """Rows of the batches of this run; a learner's share of the config's."""
        return self.program.batch_size

    @property
    def datasets(self) -> dict[str, Dataset]:
        """The splits that are used, by name."""
        others = {name: split.data for name, split in self.held_out.items()}
        return {"train": self.train_data, **others}

    @functools.cached_property
    def order(self) -> AnyOrder:
        """The order of the run's examples."""
        if self.parts:
            return GrownOrder(self.parts, self.config.seed)
        return order_of(self.train_data, self.config.seed, self.config.batch_size)

    @property
    def identity_parts(self) -> Sequence[Mapping[str, Any]]:
        """The parts of the data with their files."""
        assert self.identity is not None
        return self.identity.parts

    @property
    def shares(self) -> Callable[[int], Mapping[str, float]] | None:
        """Returns the share of each source of a mixture up to and with a batch."""
        order = self.order
        if not isinstance(order, MixedOrder):
            return None
        names = list(self.train_data.parts)  # type: ignore
        return lambda batch: mixing.shares(order, names, (batch + 1) * self.batch_size)

    @property
    def matmul_dtype(self) -> str:
        """The dtype the model computes in, which selects the peak to compare with."""
        return getattr(self.config.model, "compute_dtype", "float32")

    @property
    def model_flops(self) -> float | None:
        """FLOPs of one update; None if the model does not count them."""
        count = getattr(self.config.model, "model_flops", None)
        return None if count is None else count(self.program.batch)

    def describe(self) -> list[str]:
        """Returns a few lines about what runs where, to print before anything slow."""
        device = self.mesh.devices.flatten()[0]
        params = self.layout.params
        count = sum(x.size for x in jax.tree.leaves(self.layout.abstract.params))
        sizes = ", ".join(f"{k}={v}" for k, v in params.mesh.items() if v > 1)
        where = f"mesh {sizes}, plan {self.chosen.config.plan}"
        processes = {device.process_index for device in self.mesh.devices.flat}
        lines = [
            f"{counted(self.mesh.size, f'{device.device_kind} device')} in "
            f"{counted(len(processes), 'process')}"
            + (f", {where}" if self.mesh.size > 1 else ""),
            f"{count:,} parameters; with optimizer state "
            f"{human_bytes(self.layout.bytes_per_device)} per device",
            f"Data: {_format_facts(self.train_data.describe())}",
        ]
        if self.chosen.line:
            lines.append(self.chosen.line)
        if self.staging is not None:
            lines.append(self.staging.describe(self.batch_size))
        elif self.config.pipeline != Pipelining():
            lines.append("The pipeline settings have no effect: the mesh has pipe=1")
        if hasattr(self.config.model, "notes"):
            shard = Sharder(self.mesh, self.program.rules)
            lines += self.config.model.notes(self.program.batch, shard)  # type: ignore
        exchange = self.config.exchange
        if not exchange.is_on and exchange != type(exchange)():
            lines.append(
                "The exchange settings have no effect: this run trains alone (pass "
                "--exchange HOST:PORT)"
            )
        if self.model_flops is None:
            lines.append(
                f"{type(self.config.model).__name__} has no method model_flops: the "
                "share of the devices' peak is not shown"
            )
        if device.platform == "cpu":
            lines.insert(
                0, "Training on the CPU: no accelerator was found or requested"
            )
        lines += [split.describe() for split in self.held_out.values()]
        if replicated := sum(a.bytes for a in params.replicated()):
            lines.append(
                f"{human_bytes(replicated)} of parameters are replicated on every "
                "device (meshloom explain lists them)"
            )
        return lines

    def metadata(self, step: int, batches_ahead: int = 0) -> dict[str, Any]:
        """Returns the entries about the run in a checkpoint's manifest."""
        return {
            "config_digest": config_tree.digest(self.config),
            "config": config_tree.flatten(self.config),
            "environment": dict(self.environment),
            "data": {
                "next_example": (step + batches_ahead) * self.batch_size,
                **self.train_data.describe(),
                "splits": self.identity.facts() if self.identity else {},
            },
        }

    def data_facts(self) -> dict[str, Any]:
        """Returns what identifies the datasets, wherever they are stored."""
        facts = {}
        for split, data in self.datasets.items():
            of_split = {k: v for k, v in data.describe().items() if k != "path"}
            if self.identity is not None:
                of_split["digest"] = self.identity.splits[split].digest
            facts |= {f"{split} {name}": value for name, value in of_split.items()}
        return facts

    @functools.cached_property
    def lowered(self) -> Any:
        """The lowered train step, for exactly these shapes and shardings.

        Only its gradients for a learner that sends them: the servers do the rest.
        """
        return self.program.lower(only_gradients=self.config.exchange.sends_gradients)

    def fingerprint(self) -> str:
        """Returns a digest of the program, equal in all processes of a job."""
        return hashlib.sha256(self.lowered.as_text().encode()).hexdigest()

    def compile(self, executables: Executables | None = None) -> Any:
        """Returns the compiled train step, which is compiled only once.

        Args:
          executables: where an earlier attempt may have stored it; None always
            compiles.
        """
        executables = executables or Executables(None)
        if TRAIN_STEP in self.compiled:
            return self.compiled[TRAIN_STEP]
        options = compiler_options.parse(self.config.compiler_options)
        try:
            compiled = executables.compile(TRAIN_STEP, self.lowered, options)
            return self.compiled.setdefault(TRAIN_STEP, compiled)
        except jax.errors.JaxRuntimeError as error:
            if "No such compile option" not in str(error):
                raise
            raise ValueError(
                f"compiler_options: {error}. This compiler does not know the option; "
                "remove it from the config."
            ) from None


def prepare(
    config: "Config",
    devices: Any = None,
    *,
    choose: Choose = choose_plain,
    source: Source | None = None,
) -> Prepared:
    """Checks the whole config against devices and data, and builds the Program.

    Args:
      choose: fills in what the config leaves open.
      source: of the data; None for that of the config.
    """
    with name_settings(config):
        return _prepare(config, devices, choose, source or config.data)


def _prepare(
    config: "Config", devices: Any, choose: Choose, source: Source
) -> Prepared:
    contract.check(config.model)
    mesh = config.mesh.make(devices)
    chosen = choose(config, mesh_sizes(mesh), list(mesh.devices.flat))
    settled = chosen.config
    train_data = with_weights(config, open_source(source, "train"))
    splits = (open_split(config, name, source) for name in SETTINGS)
    held_out = {split.name: split for split in splits if split is not None}
    share = config.exchange.share
    rows = share.size(config.batch_size)
    throughput_unit(train_data)  # raises if it is not valid
    first = train_data[0]
    for name, x in first.items():
        check_dtype(name, x.dtype)
    for split in held_out.values():
        _check_same_arrays(first, split.data[0], f"in split {split.name!r}")
    if hasattr(train_data, "example"):
        example = train_data.example(0, 0)  # type: ignore
        _check_same_arrays(first, example, "from its method `example`")
    try:
        program = build(
            settled.model,
            config.exchange.local_optimizer(config.optimizer),
            mesh,
            settled.make_rules(),
            batch_shapes(first, rows),
            learning_rate=make_rate(config.schedule, config.num_steps),
            seed=config.seed,
            num_microbatches=settled.num_microbatches,
            pipeline=settled.pipeline,
            max_grad_norm=config.max_grad_norm,
            skip_grad_norm=config.skip_grad_norm,
            facts=train_data.describe(),
            first_row=share.index * rows,
        )
    except IdleAxis as error:
        raise ValueError(
            f"mesh axis {error.axis}={error.size}: {error.reason}. Give these devices "
            f"to an axis that the plan {settled.plan!r} uses, such as data or fsdp, or "
            "shard one of these dimensions over this axis with `rules`."
        ) from None
    if config.sample_prompt is not None:
        try:
            sampling.check(config, config.sample_prompt, config.sample_tokens)
        except ValueError as error:
            raise ValueError(f"sample_prompt and sample_tokens: {error}") from error
    return Prepared(config, chosen, program, train_data, held_out)


def batch_shapes(example: Mapping[str, Any], batch_size: int) -> Batch:
    """Returns the shapes of a global batch, given one example of the data."""
    batch = {
        name: jax.ShapeDtypeStruct((batch_size, *x.shape), x.dtype)
        for name, x in example.items()
    }
    return batch | {SAMPLE_IDS: jax.ShapeDtypeStruct((batch_size,), jnp.uint32)}


def _check_same_arrays(
    train: Mapping[str, Any], other: Mapping[str, Any], where: str
) -> None:
    """Raises ValueError if an example has other arrays than the train split."""
    expected, found = (
        {name: f"{x.dtype}{list(x.shape)}" for name, x in example.items()}
        for example in (train, other)
    )
    for name in expected | found:
        old, new = (arrays.get(name, "nothing") for arrays in (expected, found))
        if old != new:
            raise ValueError(
                f"the data gives {name!r} as {new} {where} and as {old} in split "
                "'train'. Make all examples have the same arrays."
            )


def _format_facts(facts: Mapping[str, object]) -> str:
    formats = {int: ",", float: ".4g"}
    return ", ".join(
        f"{name.replace('_', ' ')} {format(value, formats.get(type(value), ''))}"
        for name, value in facts.items()
        if name != "digest"
    )
