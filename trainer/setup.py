"""What a config means on a mesh: everything checked before a folder is touched."""

import dataclasses
import functools
import hashlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import optax
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from ..sharding import Rules, Sharder, idle_axes, resolve
from ..sharding.mesh import mesh_sizes
from ..sharding.resolve import resolve_dimensions, spec_of
from ..sharding.text import human_bytes
from . import compiler_options, contract, sampling
from . import step as step_lib
from .config import tree as config_tree
from .data import SAMPLE_IDS, Dataset, check_type, throughput_unit
from .executables import Executables
from .held_out import SETTINGS, HeldOut, open_split, with_weights
from .pipelining import Pipelining, Plan, plan_pipeline
from .plan.choosing import Chosen, choose_here
from .rules import name_settings
from .run_folder import environment
from .state import Layout, State, plan_layout

if TYPE_CHECKING:
    from .data_identity import Identity
    from .train import Config


TRAIN_STEP = "train step"  # the name of its program


@dataclasses.dataclass(frozen=True)
class Setup:
    """A config with its mesh, layout, data and jitted steps."""

    config: "Config"  # as it was given
    chosen: Chosen  # what it left open, filled for the mesh
    mesh: Mesh
    rules: Rules
    layout: Layout
    train_data: Dataset
    held_out: dict[str, HeldOut]  # the splits that are evaluated
    batch: dict[str, jax.ShapeDtypeStruct]
    step_fn: Any  # jitted: (state, batch) -> (state, metrics)
    eval_fn: Any  # jitted: (state, batch) -> sums
    pipeline: Plan | None = None
    identity: "Identity | None" = None  # of the data; None until it has been read

    @property
    def datasets(self) -> dict[str, Dataset]:
        """The splits that are used, by name."""
        others = {name: split.data for name, split in self.held_out.items()}
        return {"train": self.train_data, **others}

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
    def model_flops(self) -> float | None:
        """FLOPs of one update; None where the model does not count them."""
        count = getattr(self.config.model, "model_flops", None)
        return None if count is None else count(self.batch)

    def describe(self) -> list[str]:
        """What runs where, in a few lines, before anything slow begins."""
        device = self.mesh.devices.flatten()[0]
        params = self.layout.params
        count = sum(x.size for x in jax.tree.leaves(self.layout.abstract.params))
        sizes = ", ".join(f"{k}={v}" for k, v in params.mesh.items() if v > 1)
        where = f"mesh {sizes}, plan {self.chosen.config.plan}"
        lines = [
            f"{_count(self.mesh.size, f'{device.device_kind} device')} in "
            f"{_count(jax.process_count(), 'process')}"
            + (f", {where}" if self.mesh.size > 1 else ""),
            f"{count:,} parameters; with optimizer state "
            f"{human_bytes(self.layout.bytes_per_device)} a device",
            f"Data: {_words(self.train_data.describe())}",
        ]
        if self.chosen.line:
            lines.append(self.chosen.line)
        if self.pipeline is not None:
            lines.append(self.pipeline.describe(self.config.batch_size))
        elif self.config.pipeline != Pipelining():
            lines.append(
                "The settings of the pipeline have no effect: the mesh has pipe=1"
            )
        if self.model_flops is None:
            lines.append(
                f"{type(self.config.model).__name__} has no method model_flops: the "
                "share of the devices' peak is not shown"
            )
        if device.platform == "cpu":
            lines.insert(
                0, "Training on the CPU: no accelerator was found or asked for"
            )
        lines += [split.describe() for split in self.held_out.values()]
        if whole := sum(a.bytes for a in params.replicated()):
            lines.append(
                f"{human_bytes(whole)} of parameters are whole on every device "
                "(meshloom explain lists them)"
            )
        return lines

    def about(self, step: int, batches_ahead: int = 0) -> dict[str, Any]:
        """What the manifest of a checkpoint says of the run."""
        return {
            "config_digest": config_tree.digest(self.config),
            "config": config_tree.flatten(self.config),
            "environment": environment(self.layout.params.mesh),
            "data": {
                "next_example": (step + batches_ahead) * self.config.batch_size,
                **self.train_data.describe(),
                "splits": self.identity.facts() if self.identity else {},
            },
        }

    @functools.cached_property
    def lowered(self) -> Any:
        """The train step as a program, for exactly these shapes and shardings."""
        return self.step_fn.lower(self.abstract_state, self.batch)

    def fingerprint(self) -> str:
        """A digest of the program, equal in all processes of a job."""
        return hashlib.sha256(self.lowered.as_text().encode()).hexdigest()

    @functools.cached_property
    def _compiled(self) -> dict[str, Any]:
        """The train step, once it is."""
        return {}

    def compile(self, executables: Executables | None = None) -> Any:
        """The train step as it runs; whoever asks again gets the same.

        Args:
          executables: where an attempt before may have left it; None compiles.
        """
        executables = executables or Executables(None)
        if TRAIN_STEP in self._compiled:
            return self._compiled[TRAIN_STEP]
        options = compiler_options.parse(self.config.compiler_options)
        try:
            compiled = executables.compile(TRAIN_STEP, self.lowered, options)
            return self._compiled.setdefault(TRAIN_STEP, compiled)
        except jax.errors.JaxRuntimeError as error:
            if "No such compile option" not in str(error):
                raise
            raise ValueError(
                f"compiler_options: {error}. The compiler here knows no such option; "
                "take it out of the config."
            ) from None


def prepare(config: "Config", devices: Any = None) -> Setup:
    """Checks the whole config against devices and data; every error is raised here."""
    with name_settings(config):
        return _prepare(config, devices)


def _prepare(config: "Config", devices: Any) -> Setup:
    contract.check(config.model)
    mesh = config.mesh.make(devices)
    chosen = choose_here(config, mesh_sizes(mesh), list(mesh.devices.flat))
    settled = chosen.config
    rules = settled.make_rules()
    learning_rate = config.schedule.make(config.num_steps)
    make_tx = functools.partial(_make_tx, config.optimizer, config.model.axes())
    pipeline = plan_pipeline(settled, mesh, rules)
    if pipeline is not None and mesh.devices.flat[0].platform == "cpu":
        _compile_anew()
    layout = plan_layout(
        config.model,
        make_tx(learning_rate),
        rules,
        mesh,
        pipeline.order if pipeline else None,
        state_axes=getattr(config.optimizer, "state_axes", None),
    )
    num_microbatches = settled.num_microbatches or 1
    if pipeline is not None:
        num_microbatches = pipeline.schedule.num_microbatches
    shard = Sharder(mesh, rules)
    staged = pipeline.bind(settled, mesh, rules) if pipeline else None
    train_data = with_weights(config, config.data.open("train"))
    splits = (open_split(config, name) for name in SETTINGS)
    held_out = {split.name: split for split in splits if split is not None}
    throughput_unit(train_data)  # raises where it is not one
    first = train_data[0]
    facts = train_data.describe()
    batch = _abstract_batch(config, first, facts, rules, mesh, num_microbatches)
    for split in held_out.values():
        _check_alike(first, split.data[0], f"in split {split.name!r}")
    if hasattr(train_data, "example"):
        example = train_data.example(0, 0)  # type: ignore
        _check_alike(first, example, "by its method `example`")
    shardings = layout.shardings(mesh)
    batch_shardings = {name: x.sharding for name, x in batch.items()}
    whole = NamedSharding(mesh, P())
    step_fn = jax.jit(
        functools.partial(
            step_lib.train_step,
            model=config.model,
            make_tx=make_tx,
            learning_rate=learning_rate,
            shard=shard,
            seed=config.seed,
            num_microbatches=num_microbatches,
            pipeline=staged,
            max_grad_norm=config.max_grad_norm,
            skip_grad_norm=config.skip_grad_norm,
        ),
        in_shardings=(shardings, batch_shardings),
        out_shardings=(shardings, whole),
        donate_argnums=0,
    )
    eval_fn = jax.jit(
        functools.partial(
            step_lib.eval_step,
            model=config.model,
            shard=shard,
            seed=config.seed,
            pipeline=staged,
        ),
        in_shardings=(shardings, batch_shardings),
        out_shardings=whole,
    )
    setup = Setup(
        config,
        chosen,
        mesh,
        rules,
        layout,
        train_data,
        held_out,
        batch,
        step_fn,
        eval_fn,
        pipeline,
    )
    _refuse_idle_axes(setup, step_fn.trace(setup.abstract_state, setup.batch))
    if config.sample_prompt is not None:
        try:
            sampling.check(config, config.sample_prompt, config.sample_tokens)
        except ValueError as error:
            raise ValueError(f"sample_prompt and sample_tokens: {error}") from error
    return setup


def _refuse_idle_axes(setup: Setup, traced: Any) -> None:
    """Raises ValueError for a mesh axis that would only multiply the devices."""
    axes = setup.config.model.batch_axes()
    shapes = {name: x for name, x in setup.batch.items() if name in axes}
    names = {name: axes[name] for name in shapes}
    batch = resolve(
        {"batch": shapes},
        setup.rules,
        setup.mesh,
        axes={"batch": names},
        role="compute",
    )
    layout = setup.layout
    layouts = [batch, layout.params, layout.opt_state, layout.variables]
    for axis, reason in idle_axes(setup.rules, layouts, traced).items():
        raise ValueError(
            f"mesh axis {axis}={setup.mesh.shape[axis]}: {reason}. Give these devices "
            f"to an axis that the plan {setup.chosen.config.plan!r} uses, such as data "
            "or fsdp, or shard one of these dimensions over this axis by `rules`."
        )


def _make_tx(optimizer: Any, axes: Any, learning_rate: optax.Schedule) -> Any:
    return optimizer.make(learning_rate, axes)


def _compile_anew() -> None:
    """Keeps programs of this process out of the cache of compiled programs.

    XLA's CPU programs lose the order of their collectives when they come from there
    (seen with jax 0.10.2): devices then wait for one another in different ones, for
    ever. A pipeline has several at a time; a program compiled here keeps their order.
    """
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()


def _abstract_batch(
    config: "Config",
    example: dict[str, Any],
    facts: dict[str, Any],
    rules: Rules,
    mesh: Mesh,
    num_microbatches: int,
) -> dict[str, jax.ShapeDtypeStruct]:
    """The batch as shapes with shardings, from one example of the data."""
    axes = config.model.batch_axes()
    whole = f"batch_size {config.batch_size}"
    part = f"{whole} in {num_microbatches} microbatches"
    batch = {}
    for name, x in example.items():
        if name not in axes:
            raise ValueError(
                f"the data gives an array {name!r}, which the model does not take; it "
                f"takes {', '.join(axes)}"
            )
        check_type(name, x.dtype)
        shape = (config.batch_size, *x.shape)
        dimensions = resolve_dimensions(
            axes[name],
            shape,
            rules,
            mesh,
            name=f"{whole}, array {name!r}",
            role="compute",
        )
        micro = (config.batch_size // num_microbatches, *x.shape)
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
    config.model.check_batch(batch, facts)
    rows = next(iter(batch.values())).sharding.spec[:1]
    batch[SAMPLE_IDS] = jax.ShapeDtypeStruct(
        (config.batch_size,), jnp.uint32, sharding=NamedSharding(mesh, P(*rows))
    )
    return batch


def _check_alike(
    train: Mapping[str, Any], other: Mapping[str, Any], where: str
) -> None:
    """Raises where an example has other arrays than `[0]` of the train split."""
    forms = (
        {name: f"{x.dtype}{list(x.shape)}" for name, x in example.items()}
        for example in (train, other)
    )
    expected, found = forms
    for name in expected | found:
        old, new = (form.get(name, "nothing") for form in (expected, found))
        if old != new:
            raise ValueError(
                f"the data gives {name!r} as {new} {where} and {old} in split "
                "'train'. Let all examples have the same arrays."
            )


def _count(number: int, noun: str) -> str:
    plural = "es" if noun.endswith("s") else "s"
    return f"{number} {noun}{plural if number != 1 else ''}"


def _words(facts: Mapping[str, object]) -> str:
    forms = {int: ",", float: ".4g"}
    return ", ".join(
        f"{name.replace('_', ' ')} {format(value, forms.get(type(value), ''))}"
        for name, value in facts.items()
        if name != "digest"
    )
