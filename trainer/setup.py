"""What a config means on a mesh: everything checked before a folder is touched."""

import dataclasses
import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import jax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from ..sharding import Rules, Sharder, parse_plan
from ..sharding.resolve import resolve_dimensions, spec_of
from ..sharding.text import human_bytes
from . import sampling
from . import step as step_lib
from .data import Dataset
from .state import Layout, State, plan_layout

if TYPE_CHECKING:
    from .train import Config


@dataclasses.dataclass(frozen=True)
class Setup:
    """A config with its mesh, layout, data and jitted steps."""

    config: "Config"
    mesh: Mesh
    rules: Rules
    layout: Layout
    train_data: Dataset
    eval_data: Dataset | None
    batch: dict[str, jax.ShapeDtypeStruct]
    step_fn: Any  # jitted: (state, batch) -> (state, metrics)
    eval_fn: Any  # jitted: (params, batch) -> sums

    @property
    def batch_shardings(self) -> dict[str, NamedSharding]:
        return {name: x.sharding for name, x in self.batch.items()}  # type: ignore

    @property
    def abstract_state(self) -> State:
        """The state as shapes with shardings, to compile for."""
        return self.layout.placed(self.mesh)

    @property
    def matmul_dtype(self) -> str:
        """The type the model computes in, to compare with the device's peak."""
        return getattr(self.config.model, "compute_dtype", "float32")

    @property
    def num_eval_batches(self) -> int:
        """Whole batches of an evaluation: those asked for, or as many as there are."""
        if self.eval_data is None:
            return 0
        available = len(self.eval_data) // self.config.batch_size
        return min(self.config.eval_batches, available)

    def describe(self) -> list[str]:
        """What runs where, in a few lines, before anything slow begins."""
        device = self.mesh.devices.flatten()[0]
        params = self.layout.params
        count = sum(x.size for x in jax.tree.leaves(self.layout.abstract.params))
        sizes = ", ".join(f"{k}={v}" for k, v in params.mesh.items() if v > 1)
        lines = [
            f"{self.mesh.size} {device.device_kind} device(s) in {jax.process_count()} "
            f"process(es), mesh {sizes or 'of one device'}, plan {self.config.plan}",
            f"{count:,} parameters; with optimizer state "
            f"{human_bytes(self.layout.bytes_per_device)} a device",
            f"Data: {_words(self.train_data.describe())}",
        ]
        if device.platform == "cpu":
            lines.insert(0, "No accelerator found or asked for: training on the CPU")
        if self.num_eval_batches < self.config.eval_batches:
            lines.append(
                f"Each evaluation takes {self.num_eval_batches} batches, not the "
                f"{self.config.eval_batches} of eval_batches: the held-out split has "
                "no more"
            )
        if whole := sum(a.bytes for a in params.replicated()):
            lines.append(
                f"{human_bytes(whole)} of parameters are whole on every device "
                "(meshloom explain lists them)"
            )
        return lines

    def compile(self) -> Any:
        """The train step, compiled for exactly these shapes and shardings."""
        return self.step_fn.lower(self.abstract_state, self.batch).compile()


def prepare(config: "Config", devices: Any = None) -> Setup:
    """Checks the whole config against devices and data; every error is raised here."""
    mesh = config.mesh.make(devices)
    rules = parse_plan(config.plan)
    learning_rate = config.schedule.make(config.num_steps)
    tx = config.optimizer.make(learning_rate, config.model.axes())
    layout = plan_layout(config.model, tx, rules, mesh)
    shard = Sharder(mesh, rules)
    train_data = config.data.open("train")
    eval_data = _held_out(config) if config.eval_batches else None
    batch = _abstract_batch(config, train_data, rules, mesh)
    shardings = layout.shardings(mesh)
    batch_shardings = {name: x.sharding for name, x in batch.items()}
    whole = NamedSharding(mesh, P())
    step_fn = jax.jit(
        functools.partial(
            step_lib.train_step,
            model=config.model,
            tx=tx,
            learning_rate=learning_rate,
            shard=shard,
            num_microbatches=config.num_microbatches,
            max_grad_norm=config.max_grad_norm,
        ),
        in_shardings=(shardings, batch_shardings),
        out_shardings=(shardings, whole),
        donate_argnums=0,
    )
    eval_fn = jax.jit(
        functools.partial(step_lib.eval_step, model=config.model, shard=shard),
        in_shardings=(shardings.params, batch_shardings),
        out_shardings=whole,
    )
    setup = Setup(
        config, mesh, rules, layout, train_data, eval_data, batch, step_fn, eval_fn
    )
    jax.eval_shape(step_fn, setup.abstract_state, setup.batch)
    if config.sample_prompt is not None:
        try:
            sampling.check(config, config.sample_prompt, config.sample_tokens)
        except ValueError as error:
            raise ValueError(f"sample_prompt and sample_tokens: {error}") from error
    return setup


def _held_out(config: "Config") -> Dataset:
    data = config.data.open("eval")
    if len(data) < config.batch_size:
        raise ValueError(
            f"the held-out split has {len(data)} examples, fewer than one batch of "
            f"{config.batch_size}. Hold out more, make batches smaller, or set "
            "eval_batches=0 to train without evaluation."
        )
    return data


def _abstract_batch(
    config: "Config", data: Dataset, rules: Rules, mesh: Mesh
) -> dict[str, jax.ShapeDtypeStruct]:
    """The batch as shapes with shardings, from one example of the data."""
    axes = config.model.batch_axes()
    whole = f"batch_size {config.batch_size}"
    part = f"{whole} in {config.num_microbatches} microbatches"
    batch = {}
    for name, x in data[0].items():
        if name not in axes:
            raise ValueError(
                f"the data gives an array {name!r}, which the model does not take; it "
                f"takes {', '.join(axes)}"
            )
        shape = (config.batch_size, *x.shape)
        dimensions = resolve_dimensions(
            axes[name],
            shape,
            rules,
            mesh,
            name=f"{whole}, array {name!r}",
            role="compute",
        )
        micro = (config.batch_size // config.num_microbatches, *x.shape)
        resolve_dimensions(
            axes[name],
            micro,
            rules,
            mesh,
            name=f"{part}, array {name!r}",
            role="compute",
        )
        sharding = NamedSharding(mesh, spec_of(dimensions))
        batch[name] = jax.ShapeDtypeStruct(shape, x.dtype, sharding=sharding)
    config.model.check_batch(batch, data.describe())
    return batch


def _words(facts: Mapping[str, object]) -> str:
    forms = {int: ",", float: ".4g"}
    return ", ".join(
        f"{name} {format(value, forms.get(type(value), ''))}"
        for name, value in facts.items()
        if name != "digest"
    )
