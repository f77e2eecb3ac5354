"""Small models in pipelines, and the same models on one device as a reference."""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from toy_stack import Classifier

from meshloom.models import transformer
from meshloom.sharding import MeshSpec, Sharder, parse_plan, resolve
from meshloom.sharding.pipeline import Pipeline, layer_order, make, reorder

LENGTH, VOCAB = 8, 60
GPT = transformer.Config(
    vocab_size=VOCAB,
    pad_vocab_to=16,
    num_layers=8,
    d_model=16,
    num_heads=4,
    d_ff=32,
    max_length=LENGTH,
    mlp="gelu",
    compute_dtype="float32",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """A model with a schedule on a mesh.

    Attributes:
      packed: batches have segments and positions (transformers only).
    """

    model: Any
    mesh: str
    schedule: str
    num_microbatches: int
    num_chunks: int | None = None
    plan: str = "data+fsdp+tensor+pipeline"
    gather: Any = "step"
    bubble: float | None = None
    num_rows: int = 48
    packed: bool = False

    def __str__(self) -> str:
        parts = (self.schedule, self.mesh, self.num_microbatches, self.model.remat)
        plan = "" if self.plan == Case.plan else f"-{self.plan}"
        return "-".join(map(str, parts)) + plan

    @functools.cached_property
    def pipeline(self) -> Pipeline:
        spec = MeshSpec.parse(self.mesh)
        num_devices = math.prod(spec.abstract().axis_sizes)
        mesh = spec.make(jax.devices()[:num_devices])
        return Pipeline(
            self.model.stack(),
            make(
                self.schedule,
                mesh.shape["pipe"],
                self.num_microbatches,
                self.num_chunks,
            ),
            mesh,
            parse_plan(self.plan),
            self.model.axes(),
            self.model.batch_axes(),
            gather=self.gather,
            bubble=self.bubble,
        )

    @property
    def order(self) -> np.ndarray:
        schedule = self.pipeline.schedule
        return layer_order(
            self.model.num_layers, schedule.num_stages, schedule.num_chunks
        )

    def inputs(self) -> tuple[Any, Any]:
        """Returns parameters in the pipeline's order and a batch, both sharded."""
        params = reorder(params_of(self.model), self.pipeline.axes, self.order)
        batch = batch_of(self.model, self.num_rows, self.packed)
        return jax.device_put((params, batch), self._shardings(params, batch))

    def compile(self, method: str = "value_and_grad") -> jax.stages.Compiled:
        """Compiles the program from shapes, without any values."""
        shapes = (
            jax.eval_shape(self.model.init, jax.random.key(0)),
            jax.eval_shape(lambda: _batch(self.model, self.num_rows, self.packed)),
        )
        sharded = jax.tree.map(
            lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
            shapes,
            self._shardings(*shapes),
        )
        return jax.jit(getattr(self.pipeline, method)).lower(*sharded).compile()

    def in_order(self, tree: Any) -> Any:
        """Returns parameters or gradients on the host, with layers in natural order."""
        tree = jax.device_get(tree)
        return reorder(tree, self.pipeline.axes, np.argsort(self.order))

    def _shardings(self, params, batch):
        p = self.pipeline
        names = {name: p.batch_axes[name] for name in batch}
        return tuple(
            resolve(tree, p.rules, p.mesh, axes=axes, role=role).shardings(p.mesh)
            for tree, axes, role in (
                (params, p.axes, "param"),
                (batch, names, "compute"),
            )
        )


@functools.cache
def reference(model: Any, num_rows: int, packed: bool = False) -> tuple[Any, Any]:
    """Returns the sums and gradients of a model on one device, without a pipeline."""
    if model.remat != "none":
        return reference(dataclasses.replace(model, remat="none"), num_rows, packed)

    def loss(params, batch):
        total, weight, others = model.loss(params, batch, Sharder())
        return total, {"loss": total, "weight": weight, **others}

    grads, sums = jax.jit(jax.grad(loss, has_aux=True))(
        params_of(model), batch_of(model, num_rows, packed)
    )
    return jax.device_get((sums, grads))


@functools.cache
def params_of(model: Any) -> Any:
    return jax.device_get(jax.jit(model.init)(jax.random.key(0)))


@functools.cache
def batch_of(model: Any, num_rows: int, packed: bool = False) -> dict[str, np.ndarray]:
    return jax.device_get(_batch(model, num_rows, packed))


def _batch(model: Any, num_rows: int, packed: bool) -> dict[str, jax.Array]:
    if isinstance(model, Classifier):
        return model.batch(num_rows)
    keys = jax.random.split(jax.random.key(1), 3)
    shape = (num_rows, model.max_length)
    inputs, targets = (jax.random.randint(key, shape, 0, VOCAB) for key in keys[:2])
    weights = (jax.random.uniform(keys[2], shape) > 0.2).astype(jnp.float32)
    batch = {"inputs": inputs, "targets": targets, "weights": weights}
    if packed:
        # Every row has two documents, the first of 3 tokens.
        index = jnp.broadcast_to(jnp.arange(shape[1])[None], shape)
        batch["segments"] = (index >= 3).astype(jnp.int32)
        batch["positions"] = jnp.where(index >= 3, index - 3, index)
    return batch


def leaves(tree: Any) -> dict[str, Any]:
    """Returns the arrays of a tree by path."""
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }


def largest_error(actual: Any, expected: Any) -> dict[str, float]:
    """Returns, for each array, the largest difference over the largest value."""
    errors = jax.tree.map(
        lambda a, b: float(np.max(np.abs(a - b)) / np.max(np.abs(b))), actual, expected
    )
    return leaves(errors)
