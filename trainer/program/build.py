"""The train step as an object: built from a model, an optimizer and a mesh, no run.

A Program touches no file and no environment, changes no setting of jax, and knows
nothing of other processes than that its mesh may span them. Two of them on different
devices can train in one process, and one that is dropped leaves nothing behind.
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
from . import contract
from . import step as step_lib
from .compiled_anew import CompiledAnew
from .optimizers import Optimizer
from .pipelining import Pipelining, Staging, make_staging
from .state import Layout, Model, State, make_layout, placed

Batch = dict[str, jax.ShapeDtypeStruct]


@dataclasses.dataclass(frozen=True)
class Program:
    """The jitted functions of a model on a mesh, all pure.

    Attributes:
      batch: a batch as shapes with shardings.
      staging: how the model runs as a pipeline; None without a pipe axis.
      init: key -> state of step 0.
      gradients: (state, batch) -> step.Gradients.
      apply: (state, Gradients) -> (state, metrics).
      step: (state, batch) -> (state, metrics); bit for bit `gradients`, then `apply`.
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
        """The state as shapes with shardings, to compile for or restore into."""
        return self.layout.placed(self.mesh)

    @property
    def shardings(self) -> State:
        return self.layout.shardings(self.mesh)

    @property
    def batch_shardings(self) -> dict[str, NamedSharding]:
        return {name: x.sharding for name, x in self.batch.items()}  # type: ignore

    def lower(self) -> Any:
        """Lowers the step, for exactly these shapes and shardings."""
        return self.step.lower(self.abstract_state, self.batch)


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
    donate: bool = True,
) -> Program:
    """Builds the Program of a model; raises ValueError for all that does not fit.

    Args:
      optimizer: one of `optimizers`, or any of optax, which has its own learning rate.
      rules: how logical axes are sharded, for instance `parse_plan("data+fsdp")`.
      batch: the arrays of a global batch, or their shapes and types. An array
        `sample_ids` (uint32) numbers the samples, for models that take random keys.
      learning_rate: of the step number; for optimizers of `optimizers` only.
      seed: of the random keys of models that take them.
      num_microbatches: parts of the batch computed one after the other; None is 1, and
        in a pipeline a number with a small bubble.
      pipeline: how a mesh axis `pipe` larger than 1 is used; None for the defaults.
      facts: what the data says of itself, for the model's `check_batch`.
      donate: whether `step` and `apply` take the memory of the state they are given.
    """
    contract.check(model)
    pipeline = pipeline or Pipelining()
    shapes = _shapes(model, batch)
    batch_size = next(iter(shapes.values())).shape[0]
    _check_microbatches(batch_size, num_microbatches)
    make_tx, rate, state_axes = _optimizer(optimizer, model, learning_rate)
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
        make_tx(rate),
        rules,
        mesh,
        staging.order if staging else None,
        state_axes=state_axes,
    )
    num = staging.schedule.num_microbatches if staging else num_microbatches or 1
    sharded = _sharded(model, shapes, rules, mesh, num)
    arrays = {name: x for name, x in sharded.items() if name != SAMPLE_IDS}
    model.check_batch(arrays, dict(facts or {}))
    shard = Sharder(mesh, rules)
    staged = staging.bind(model, mesh, rules, pipeline) if staging else None
    bound = {"model": model, "shard": shard, "seed": seed, "pipeline": staged}
    compute = functools.partial(step_lib.gradients, num_microbatches=num, **bound)
    update = functools.partial(
        step_lib.apply,
        model=model,
        make_tx=make_tx,
        learning_rate=rate,
        max_grad_norm=max_grad_norm,
        skip_grad_norm=skip_grad_norm,
    )
    state, whole = layout.shardings(mesh), NamedSharding(mesh, P())
    taken = (state, {name: x.sharding for name, x in sharded.items()})
    found = step_lib.Gradients(whole, state.params, whole, whole)  # type: ignore
    donated = {"donate_argnums": 0} if donate else {}

    def jit(function: Any, taken: Any, given: Any, **options: Any) -> Any:
        jitted = jax.jit(function, in_shardings=taken, out_shardings=given, **options)
        if staging is not None and mesh.devices.flat[0].platform == "cpu":
            return CompiledAnew(jitted)
        return jitted

    step = functools.partial(step_lib.train_step, compute=compute, update=update)
    evaluate = functools.partial(step_lib.eval_step, **bound)
    program = Program(
        model,
        mesh,
        rules,
        layout,
        sharded,
        staging,
        init=functools.partial(layout.create, mesh=mesh),
        gradients=jit(compute, taken, found),
        apply=jit(update, (state, found), (state, whole), **donated),
        step=jit(step, taken, (state, whole), **donated),
        evaluate=jit(evaluate, taken, whole),
    )
    _refuse_idle_axes(program)
    return program


def _check_microbatches(batch_size: int, num_microbatches: int | None) -> None:
    num = 1 if num_microbatches is None else num_microbatches
    if num < 1:
        raise ValueError(f"num_microbatches must be at least 1, got {num}")
    if short := -batch_size % num:
        raise ValueError(
            f"batch_size {batch_size} is not divided by num_microbatches {num}; "
            f"{batch_size + short} would be"
        )


def _optimizer(
    optimizer: Any, model: Model, learning_rate: Any
) -> tuple[Any, Any, Any]:
    """A function that makes the optimizer for a schedule, the schedule, state axes."""
    rate = learning_rate
    if not callable(rate):
        rate = optax.constant_schedule(rate)
    if isinstance(optimizer, optax.GradientTransformation):
        return (lambda _: optimizer), rate, None
    make_tx = functools.partial(_make_tx, optimizer, model.axes())
    return make_tx, rate, getattr(optimizer, "state_axes", None)


def _make_tx(optimizer: Any, axes: Any, learning_rate: optax.Schedule) -> Any:
    return optimizer.make(learning_rate, axes)


def _shapes(model: Model, batch: Mapping[str, Any]) -> Batch:
    axes = model.batch_axes()
    for name in batch:
        if name not in axes and name != SAMPLE_IDS:
            raise ValueError(
                f"the data gives an array {name!r}, which the model does not take; it "
                f"takes {', '.join(axes)}"
            )
    found = {k: jax.ShapeDtypeStruct(x.shape, x.dtype) for k, x in batch.items()}
    if not set(found) - {SAMPLE_IDS}:
        raise ValueError(
            f"the batch holds no array that the model takes; it takes {', '.join(axes)}"
        )
    sizes = {name: x.shape[0] for name, x in found.items()}
    if len(set(sizes.values())) > 1:
        raise ValueError(f"the arrays of the batch differ in their rows: {sizes}")
    return found


def _sharded(
    model: Model, shapes: Batch, rules: Rules, mesh: Mesh, num_microbatches: int
) -> Batch:
    """The batch with shardings; each microbatch of it must divide as the whole does."""
    axes, batch = model.batch_axes(), {}
    for name, x in shapes.items():
        if name == SAMPLE_IDS:
            continue
        size = x.shape[0]
        micro = (size // num_microbatches, *x.shape[1:])
        parts = f" in {num_microbatches} microbatches"
        for shape, words in ((micro, parts), (x.shape, "")):
            what = f"batch_size {size}{words}, array {name!r}"
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


def _refuse_idle_axes(program: Program) -> None:
    """Raises ValueError for a mesh axis that would only multiply the devices."""
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
