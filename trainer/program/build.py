"""The train step as an object, built from a model, an optimizer and a mesh.

A Program reads no files and no environment variables, changes no jax settings, and
knows about other processes only that its mesh may span them. Two Programs on different
devices can train in one process, and a Program that is dropped leaves nothing behind.
"""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from ...sharding import Rules, Sharder, idle_axes, resolve
from ...sharding.resolve import resolve_dimensions, spec_of
from ..data.batches import SAMPLE_IDS
from ..data.refusals import refusals_of
from . import contract
from . import step as step_lib
from .optimizers import Optimizer, make_tx
from .pipelining import Pipelining, Staging, make_staging
from .state import Layout, Model, State, make_layout, placed
from .uncached import UncachedJit

Batch = dict[str, jax.ShapeDtypeStruct]


@dataclasses.dataclass(frozen=True)
class Program:
    """The pure, jitted functions of a model on a mesh.

    Attributes:
      batch: shapes, dtypes and shardings of a batch.
      staging: how the model is pipelined; None without a pipe axis.
      init: key -> state of step 0.
      gradients: (state, batch) -> step.Gradients.
      apply: (state, Gradients) -> (state, metrics).
      step: (state, batch) -> (state, metrics); bit-identical to `gradients` followed by
        `apply`.
      evaluate: (state, batch) -> sums.
    """

    model: Model
    mesh: Mesh
    rules: Rules
    layout: Layout
    batch: Batch
    staging: Staging | None
    init: Any
    gradients: Any
    apply: Any
    step: Any
    evaluate: Any

    @property
    def batch_size(self) -> int:
        return next(iter(self.batch.values())).shape[0]

    @property
    def abstract_state(self) -> State:
        """Shapes, dtypes and shardings of the state, to compile for or restore into."""
        return self.layout.placed(self.mesh)

    @property
    def shardings(self) -> State:
        return self.layout.shardings(self.mesh)

    @property
    def batch_shardings(self) -> dict[str, NamedSharding]:
        return {name: x.sharding for name, x in self.batch.items()}  # type: ignore

    def lower(self, *, only_gradients: bool = False) -> Any:
        """Lowers the step for the shapes and shardings of this Program."""
        function = self.gradients if only_gradients else self.step
        return function.lower(self.abstract_state, self.batch)


def build(
    model: Model,
    optimizer: Optimizer | optax.GradientTransformation,
    mesh: Mesh,
    rules: Rules,
    batch: Mapping[str, Any],
    *,
    learning_rate: optax.Schedule | float = 1e-3,
    seed: int = 0,
    num_microbatches: int | None = None,
    pipeline: Pipelining | None = None,
    max_grad_norm: float | None = None,
    skip_grad_norm: float | None = None,
    facts: Mapping[str, Any] | None = None,
    first_row: int = 0,
    donate: bool = True,
) -> Program:
    """Builds the Program of a model; raises ValueError if its arguments do not fit.

    Args:
      optimizer: one of `optimizers`, or any optax transformation, which has its own
        learning rate.
      rules: how logical axes are sharded, for instance `parse_plan("data+fsdp")`.
      batch: the arrays of a global batch, or their shapes and dtypes. An array
        `sample_ids` (uint32) identifies the samples, for models that take random keys.
      learning_rate: a constant or a function of the step number. It has no effect on
        optax transformations.
      seed: for the random keys of models that take them.
      num_microbatches: number of microbatches, computed sequentially. None means 1, or
        in a pipeline a number with a small bubble.
      pipeline: how to use a mesh axis `pipe` larger than 1; None means the defaults.
      facts: properties of the dataset, for the model's `check_batch`.
      first_row: number of the batch's first row, from which random keys are made, if
        this is a part of a larger batch.
      donate: whether `step` and `apply` donate the buffers of their input state.
    """
    contract.check(model)
    pipeline = pipeline or Pipelining()
    shapes = _shapes(model, batch)
    batch_size = next(iter(shapes.values())).shape[0]
    _check_microbatches(batch_size, num_microbatches)
    make, rate, state_axes = _optimizer(optimizer, model, learning_rate)
    staging = make_staging(
        model,
        mesh,
        rules,
        pipeline,
        batch_size=batch_size,
        num_microbatches=num_microbatches,
    )
    layout = make_layout(
        model,
        make(rate),
        rules,
        mesh,
        staging.order if staging else None,
        state_axes=state_axes,
    )
    num = staging.schedule.num_microbatches if staging else num_microbatches or 1
    sharded = _shard_batch(model, shapes, rules, mesh, num)
    _check_batch(model, sharded, facts)
    computations = _computations(
        model,
        Sharder(mesh, rules),
        staging.bind(model, mesh, rules, pipeline) if staging else None,
        seed,
        gradients={"num_microbatches": num, "first_row": first_row},
        make_tx=make,
        learning_rate=rate,
        max_grad_norm=max_grad_norm,
        skip_grad_norm=skip_grad_norm,
    )
    is_uncached = staging is not None and mesh.devices.flat[0].platform == "cpu"
    functions = _jit(
        *computations, layout, sharded, mesh, donate=donate, is_uncached=is_uncached
    )
    program = Program(model, mesh, rules, layout, sharded, staging, **functions)
    _check_idle_axes(program)
    return program


def _check_batch(model: Model, batch: Batch, facts: Mapping[str, Any] | None) -> None:
    arrays = {name: x for name, x in batch.items() if name != SAMPLE_IDS}
    with refusals_of(model, "check_batch"):
        model.check_batch(arrays, dict(facts or {}))


def _computations(
    model: Model,
    shard: Sharder,
    staged: Any,
    seed: int,
    *,
    gradients: Mapping[str, int],
    **update: Any,
) -> tuple[Any, Any, Any]:
    """Returns the functions that compute gradients, update the state and evaluate.

    Args:
      gradients, update: further arguments of `step.gradients` and of `step.apply`.
    """
    bound = {"model": model, "shard": shard, "seed": seed, "pipeline": staged}
    return (
        functools.partial(step_lib.gradients, **gradients, **bound),
        functools.partial(step_lib.apply, model=model, **update),
        functools.partial(step_lib.eval_step, **bound),
    )


def _jit(
    compute: Any,
    update: Any,
    evaluate: Any,
    layout: Layout,
    shapes: Batch,
    mesh: Mesh,
    *,
    donate: bool,
    is_uncached: bool,
) -> dict[str, Any]:
    """Jits the functions of a Program, by name, with the shardings of its arrays."""
    state, replicated = layout.shardings(mesh), NamedSharding(mesh, P())
    batch = {name: x.sharding for name, x in shapes.items()}
    grads = step_lib.Gradients(replicated, state.params, replicated, replicated)  # type: ignore
    donated = {"donate_argnums": 0} if donate else {}

    def jit(function: Any, inputs: Any, outputs: Any, **options: Any) -> Any:
        jitted = jax.jit(
            function, in_shardings=inputs, out_shardings=outputs, **options
        )
        return UncachedJit(jitted) if is_uncached else jitted

    step = functools.partial(step_lib.train_step, compute=compute, update=update)
    return {
        "init": functools.partial(layout.create, mesh=mesh),
        "gradients": jit(compute, (state, batch), grads),
        "apply": jit(update, (state, grads), (state, replicated), **donated),
        "step": jit(step, (state, batch), (state, replicated), **donated),
        "evaluate": jit(evaluate, (state, batch), replicated),
    }


def _check_microbatches(batch_size: int, num_microbatches: int | None) -> None:
    num = 1 if num_microbatches is None else num_microbatches
    if num < 1:
        raise ValueError(f"num_microbatches must be >= 1, got {num}")
    if short := -batch_size % num:
        raise ValueError(
            f"batch_size {batch_size} is not divisible by num_microbatches {num}; "
            f"{batch_size + short} would be"
        )


def _optimizer(
    optimizer: Any, model: Model, learning_rate: Any
) -> tuple[Any, Any, Any]:
    """Returns (schedule -> optax transformation, the schedule, state axes)."""
    rate = learning_rate
    if not callable(rate):
        rate = optax.constant_schedule(rate)
    if isinstance(optimizer, optax.GradientTransformation):
        return (lambda _: optimizer), rate, None
    make = functools.partial(make_tx, optimizer, model.axes())
    return make, rate, getattr(optimizer, "state_axes", None)


def _shapes(model: Model, batch: Mapping[str, Any]) -> Batch:
    axes = model.batch_axes()
    for name in batch:
        if name not in axes and name != SAMPLE_IDS:
            raise ValueError(
                f"the data has an array {name!r}, which the model does not take; it "
                f"takes {', '.join(axes)}"
            )
    shapes = {k: jax.ShapeDtypeStruct(x.shape, x.dtype) for k, x in batch.items()}
    if not set(shapes) - {SAMPLE_IDS}:
        raise ValueError(
            f"the batch has no array that the model takes; it takes {', '.join(axes)}"
        )
    sizes = {name: x.shape[0] for name, x in shapes.items()}
    if len(set(sizes.values())) > 1:
        raise ValueError(
            f"the arrays of the batch have different numbers of rows: {sizes}"
        )
    return shapes


def placed_batch(
    model: Model, batch: Mapping[str, Any], rules: Rules, mesh: Mesh
) -> Batch:
    """Returns shapes, dtypes and shardings of a batch, or raises ValueError."""
    return _shard_batch(model, _shapes(model, batch), rules, mesh, 1)


def _shard_batch(
    model: Model, shapes: Batch, rules: Rules, mesh: Mesh, num_microbatches: int
) -> Batch:
    """Adds shardings to the batch; each microbatch must be divisible likewise."""
    axes, batch = model.batch_axes(), {}
    for name, x in shapes.items():
        if name == SAMPLE_IDS:
            continue
        size = x.shape[0]
        micro = (size // num_microbatches, *x.shape[1:])
        in_microbatches = f" in {num_microbatches} microbatches"
        for shape, suffix in ((micro, in_microbatches), (x.shape, "")):
            what = f"batch_size {size}{suffix}, array {name!r}"
            dimensions = resolve_dimensions(
                axes[name], shape, rules, mesh, name=what, role="compute"
            )
        batch[name] = placed(x, NamedSharding(mesh, spec_of(dimensions)))
    if SAMPLE_IDS in shapes:
        rows = next(iter(batch.values())).sharding.spec[:1]
        size = shapes[SAMPLE_IDS].shape
        batch[SAMPLE_IDS] = jax.ShapeDtypeStruct(
            size, jnp.uint32, sharding=NamedSharding(mesh, P(*rows))
        )
    return batch


def _check_idle_axes(program: Program) -> None:
    """Raises IdleAxis for a mesh axis over which nothing would be sharded."""
    axes, rules, mesh = program.model.batch_axes(), program.rules, program.mesh
    shapes = {name: x for name, x in program.batch.items() if name in axes}
    names = {name: axes[name] for name in shapes}
    batch = resolve(
        {"batch": shapes}, rules, mesh, axes={"batch": names}, role="compute"
    )
    layout = program.layout
    layouts = [batch, layout.params, layout.opt_state, layout.variables]
    traced = program.step.trace(program.abstract_state, program.batch)
    for axis, reason in idle_axes(rules, layouts, traced).items():
        raise IdleAxis(axis, mesh.shape[axis], reason)


class IdleAxis(ValueError):
    """A mesh axis over which nothing is sharded."""

    def __init__(self, axis: str, size: int, reason: str):
        super().__init__(
            f"mesh axis {axis}={size}: {reason}. Give these devices to an axis that "
            "the rules use, such as data or fsdp, or add a rule that shards one of "
            "these dimensions over this axis."
        )
        self.axis, self.size, self.reason = axis, size, reason
