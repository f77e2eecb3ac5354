"""The programs that pipeline.py compares: gradients with and without a pipeline."""

import argparse
import dataclasses
import functools
import json
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from meshloom.models import transformer
from meshloom.models.remat import Remat
from meshloom.sharding import MeshSpec, Rules, Sharder, audit, hlo, parse_plan, resolve
from meshloom.sharding.pipeline import (
    Pipeline,
    Schedule,
    Simulation,
    layer_order,
    make,
    reorder,
    simulate,
)
from meshloom.sharding.pipeline.schedule import NAMES
from meshloom.sharding.pipeline.simulate import BACKWARD_COST, GATHERS, Gather
from meshloom.trainer.program.state import placed

PLAN = "data+fsdp+tensor"


@dataclasses.dataclass(frozen=True)
class Case:
    """A schedule, its remat policy, and when weights are gathered."""

    schedule: str
    remat: Remat = "save-named"
    gather: Gather = "step"

    @classmethod
    def parse(cls, text: str) -> "Case":
        """Parses "1f1b", "1f1b:none" or "interleaved:full:microbatch"."""
        schedule, *options = text.split(":")
        settings: dict[str, Any] = {}
        for word in options:
            name = "gather" if word in GATHERS else "remat"
            if word not in (*GATHERS, *BACKWARD_COST) or name in settings:
                raise ValueError(
                    f"case {text!r}: {word!r} is unknown or given twice. Expected "
                    f"SCHEDULE[:REMAT][:GATHER] with REMAT one of "
                    f"{', '.join(BACKWARD_COST)} and GATHER one of "
                    f"{', '.join(GATHERS)}."
                )
            settings[name] = word
        if schedule not in NAMES:
            raise ValueError(
                f"case {text!r}: schedule {schedule!r} is unknown; expected one of "
                f"{', '.join(NAMES)}"
            )
        return cls(schedule, **settings)

    def __str__(self) -> str:
        parts = (self.remat, Case.remat), (self.gather, Case.gather)
        return ":".join([self.schedule, *(x for x, default in parts if x != default)])


@dataclasses.dataclass(frozen=True)
class Bench:
    """A model on a mesh, and the size of a microbatch.

    Attributes:
      model: the config of the model.
      mesh: the mesh, including the pipe axis.
      rows: the examples of a microbatch per batch shard.
      num_chunks: the chunks per stage of the interleaved schedule.
      options: XLA compiler options.
    """

    model: transformer.Config
    mesh: Mesh
    rows: int
    num_chunks: int
    options: dict[str, Any]

    @classmethod
    def of(cls, args: argparse.Namespace, devices: Any, dtype: Any) -> "Bench":
        model = transformer.Config(
            vocab_size=args.vocab,
            num_layers=args.layers,
            d_model=args.width,
            num_heads=max(1, args.width // 64),
            d_ff=4 * args.width,
            max_length=args.length,
            mlp="gelu",
            compute_dtype=dtype,
        )
        mesh = MeshSpec.parse(args.mesh).make(devices)
        for word in args.compiler:
            if "=" not in word:
                raise ValueError(f"--compiler {word!r}: expected NAME=VALUE")
        options = dict(word.partition("=")[::2] for word in args.compiler)
        return cls(model, mesh, args.rows, args.chunks, options)

    @property
    def ways(self) -> int:
        """The number of batch shards."""
        sizes = self.mesh.shape
        return math.prod(sizes[a] for a in ("replica", "data", "fsdp", "expert"))

    def simulate(self, case: Case, num_microbatches: int) -> Simulation:
        return simulate(
            self._schedule(case, num_microbatches), remat=case.remat, gather=case.gather
        )

    def staged(self, case: Case, num_microbatches: int) -> "Program":
        """Returns the program of the gradients under a schedule."""
        model = dataclasses.replace(self.model, remat=case.remat)
        schedule = self._schedule(case, num_microbatches)
        rules, axes = parse_plan(f"{PLAN}+pipeline"), model.axes()
        pipeline = Pipeline(
            model.stack(),
            schedule,
            self.mesh,
            rules,
            axes,
            model.batch_axes(),
            gather=case.gather,
        )
        order = layer_order(model.num_layers, schedule.num_stages, schedule.num_chunks)
        return Program(
            pipeline.value_and_grad,
            self.mesh,
            _place(model, rules, self.mesh, self._batch(num_microbatches)),
            order,
            self.options,
        )

    def unpipelined(self, num_microbatches: int) -> "Program":
        """Returns the same gradients, the batch sharded over the stages' devices."""
        model, sizes = self.model, dict(self.mesh.shape)
        sizes["data"], sizes["pipe"] = sizes["data"] * sizes["pipe"], 1
        mesh = MeshSpec(**sizes).make(self.mesh.devices.ravel())
        rules = parse_plan(PLAN)
        shard = Sharder(mesh, rules)

        def loss(params, batch):
            total, weight, others = model.loss(params, batch, shard)
            return total, {"loss": total, "weight": weight, **others}

        def value_and_grad(params, batch):
            grads, sums = jax.grad(loss, has_aux=True)(params, batch)
            return sums, grads

        return Program(
            value_and_grad,
            mesh,
            _place(model, rules, mesh, self._batch(num_microbatches)),
            np.arange(model.num_layers),
            self.options,
        )

    def simulated_flops(self, case: Case, num_microbatches: int) -> float:
        """Returns the FLOPs per device by the simulator, including the head."""
        forward, head = self._unit_flops
        cost = self.simulate(case, num_microbatches).cost
        share = self.mesh.shape["pipe"] * self.mesh.shape["tensor"]
        return (cost * forward + num_microbatches * head) / share

    @functools.cached_property
    def _unit_flops(self) -> tuple[float, float]:
        """FLOPs per microbatch and device of blocks, and of the head's gradients."""
        stack = dataclasses.replace(self.model, remat="none").stack()
        params = jax.eval_shape(self.model.init, jax.random.key(0))
        outside = {k: v for k, v in params.items() if k != stack.blocks}
        block = jax.tree.map(
            lambda w: jax.ShapeDtypeStruct(w.shape[1:], w.dtype), params[stack.blocks]
        )
        shape = (self.rows, self.model.max_length, self.model.d_model)
        x = jax.ShapeDtypeStruct(shape, self.model.compute_dtype)
        shard = Sharder()
        batch = jax.eval_shape(
            lambda batch: stack.complete(batch, shard),
            batch_shapes(self.rows, self.model.max_length),
        )

        def head(outside, x, batch):
            return stack.head(outside, x, batch, shard)[0]

        def forward(block, x, batch):
            return stack.block(block, x, batch, shard)

        heads = jax.grad(head, argnums=(0, 1))
        return (
            self.model.num_layers * _flops(forward, block, x, batch),
            _flops(heads, outside, x, batch),
        )

    def _schedule(self, case: Case, num_microbatches: int) -> Schedule:
        chunks = self.num_chunks if case.schedule == "interleaved" else None
        num_stages = self.mesh.shape["pipe"]
        return make(case.schedule, num_stages, num_microbatches, chunks)

    def _batch(self, num_microbatches: int) -> dict[str, jax.ShapeDtypeStruct]:
        num_rows = self.rows * self.ways * num_microbatches
        return batch_shapes(num_rows, self.model.max_length)


@dataclasses.dataclass(frozen=True)
class Program:
    """A function of (params, batch), and the shardings of both.

    Attributes:
      function: the function to compile.
      mesh: the mesh that it runs on.
      placed: the abstract params and batch, with shardings.
      order: the layer at each position of the stack.
      options: XLA compiler options.
    """

    function: Any
    mesh: Mesh
    placed: Any
    order: np.ndarray
    options: dict[str, Any]

    def inputs(self, model: transformer.Config) -> tuple[Any, Any]:
        """Returns inputs, the same for every program of the same shapes."""
        params, batch = self.placed
        weights = jax.device_get(jax.jit(model.init)(jax.random.key(0)))
        weights = reorder(weights, model.axes(), self.order)
        random = np.random.default_rng(0)
        values = {
            name: random.integers(0, model.vocab_size, x.shape).astype(x.dtype)
            for name, x in batch.items()
        }
        values["weights"] = np.ones_like(values["weights"])
        shardings = jax.tree.map(lambda x: x.sharding, (params, batch))
        return jax.device_put((weights, values), shardings)

    @functools.cached_property
    def compiled(self) -> jax.stages.Compiled:
        return jax.jit(self.function).lower(*self.placed).compile(self.options or None)

    def figures(self) -> dict[str, Any]:
        """Returns FLOPs, temporary memory and collectives per device."""
        text = self.compiled.as_text()
        memory: Any = self.compiled.memory_analysis()
        document = json.loads(audit(self.compiled, self.mesh).to_json())
        return {
            "flops": hlo.flops(text or ""),
            "temporaries": memory.temp_size_in_bytes,
            "collectives": document["totals"],
        }


def batch_shapes(num_rows: int, length: int) -> dict[str, jax.ShapeDtypeStruct]:
    types = {"inputs": jnp.int32, "targets": jnp.int32, "weights": jnp.float32}
    return {k: jax.ShapeDtypeStruct((num_rows, length), t) for k, t in types.items()}


def _place(
    model: transformer.Config, rules: Rules, mesh: Mesh, batch: dict[str, Any]
) -> tuple[Any, Any]:
    """Returns abstract params and batch, with shardings."""
    params = jax.eval_shape(model.init, jax.random.key(0))
    names = {name: model.batch_axes()[name] for name in batch}
    trees = (params, model.axes(), "param"), (batch, names, "compute")
    return tuple(  # type: ignore
        placed(tree, resolve(tree, rules, mesh, axes=axes, role=role).shardings(mesh))
        for tree, axes, role in trees
    )


def _flops(function: Any, *shapes: Any) -> float:
    text = jax.jit(function).lower(*shapes).compile().as_text()
    return hlo.flops(text or "")
