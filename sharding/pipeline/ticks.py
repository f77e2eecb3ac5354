"""The per-tick program of one stage.

At a tick, all stages do the same kinds of work, each on its own microbatch from the
rows of the schedule. A stage without a microbatch computes too, and its result is
discarded. Activations go around the ring of stages, gradients the other way.

The stages share embedding, head and loss: each takes 1/S of a microbatch. One
all-to-all each way exchanges these parts with the first and last stage, which need the
full microbatch. It carries embedding and head together.
"""

import functools
from collections.abc import Collection
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ..sharder import Sharder
from .chunks import Chunks
from .loops import Kind, Loop, TickWork
from .schedule import IDLE, Schedule
from .stack import Batch, Stack, Sums
from .weights import keep_sharded

PIPE = "pipe"
Carry = dict[str, Any]


class Ticks:
    """The program of one stage.

    Args:
      outside: the parameters outside the blocks.
      layouts: a WeightLayout for each of them.
      batch: this device's rows, [microbatches, microbatch size, ...].
      flat: names of batch arrays that are sharded along rows only.
      training: whether there are backwards.
      bubble: for tests, a value that replaces every input without a microbatch. It must
        not change any result.
    """

    def __init__(
        self,
        stack: Stack,
        schedule: Schedule,
        chunks: Chunks,
        outside: Any,
        layouts: Any,
        batch: Batch,
        shard: Sharder,
        *,
        flat: Collection[str],
        training: bool,
        bubble: float | None = None,
    ):
        self._stack, self._chunks, self._shard = stack, chunks, shard
        self._outside, self._layouts = outside, layouts
        self._batch, self._flat = batch, flat
        self._schedule, self._training, self._bubble = schedule, training, bubble
        self._stage = lax.axis_index(PIPE)
        self._num = S = schedule.num_stages
        self._down = [(s, (s + 1) % S) for s in range(S)]
        self._up = [(s, (s - 1) % S) for s in range(S)]

    def start(self) -> Carry:
        """Returns the initial carry of the ticks, all zeros.

        Its activations and their gradients:

          fed: the embedding of the next microbatch, for stage 0
          arrived: the output of the previous stage
          returned: the gradient of this stage's output, from the next stage
          left: the gradient of this stage's input
        """

        def shapes():
            batch = self._part(0)
            part = self._embed(self._outside, batch)
            x = jnp.concatenate([part] * self._num, axis=self._stack.split_dim)
            _, sums, kept = self._chunks.forward(0, x, self._microbatch(0))
            return x, sums | self._head(self._outside, part, batch)[1], kept

        x, sums, kept = jax.tree.map(
            lambda s: jnp.zeros(s.shape, s.dtype), jax.eval_shape(shapes)
        )
        carry = {"fed": x, "arrived": x, "sums": sums}
        if self._training:
            num = self._schedule.num_slots
            carry |= {
                "kept": jax.tree.map(lambda k: jnp.stack([k] * num), kept),
                "returned": x,
                "left": x,
                "blocks": self._chunks.zeros(),
                "outside": jax.tree.map(
                    lambda w: jnp.zeros(w.shape, jnp.float32), self._outside
                ),
            }
        return carry

    def loop(self, loop: Loop, carry: Carry, rows: TickWork) -> Carry:
        def once(carry, rows):
            start = 0
            for kind, length in loop.runs:
                part = jax.tree.map(lambda x: x[start : start + length], rows)  # noqa: B023
                tick = functools.partial(self._tick, kind)
                carry = lax.scan(tick, carry, part)[0]
                start += length
            return carry, None

        if loop.times == 1:
            return once(carry, rows)[0]
        nested = jax.tree.map(lambda x: x.reshape(loop.times, -1, *x.shape[1:]), rows)
        return lax.scan(once, carry, nested)[0]

    def _tick(self, kind: Kind, carry: Carry, row: TickWork) -> tuple[Carry, None]:
        carry, stage, last = dict(carry), self._stage, self._num - 1
        y = pull = None
        if kind.forward:
            m, chunk, slot = row.forward[stage]
            begins = (stage == 0) & (chunk == 0)
            x = jnp.where(begins, carry["fed"], carry["arrived"])
            y, sums, kept = self._chunks.forward(
                chunk, self._mark(x, m), self._microbatch(m)
            )
            carry["sums"] = _add_some(carry["sums"], sums, m != IDLE)
            carry["arrived"] = lax.ppermute(y, PIPE, self._down)
            if self._training:
                carry["kept"] = _write(carry["kept"], kept, slot, m != IDLE)
        if kind.backward:
            m, chunk, slot = row.backward[stage]
            kept = jax.tree.map(lambda k: self._mark(k[slot], m), carry["kept"])
            y, pull = self._chunks.backward(chunk, kept, self._microbatch(m))
        carry, gradient = self._outside_work(kind, carry, y, row)
        if pull is not None:
            ends = (stage == last) & (chunk == self._schedule.num_chunks - 1)
            returned = carry["returned"]
            if gradient is not None:
                returned = jnp.where(ends, gradient, returned)
            grad, carry["left"] = pull(self._mark(returned, m))
            carry["blocks"] = self._chunks.add(carry["blocks"], chunk, grad, m != IDLE)
            carry["returned"] = lax.ppermute(carry["left"], PIPE, self._up)
        return carry, None

    def _outside_work(self, kind: Kind, carry: Carry, y, row: TickWork):
        """Runs embedding, head and loss.

        Returns the carry, and the gradient for the last stage or None.
        """
        last = self._num - 1
        inputs, results = {}, {}  # by stage
        if kind.embed_backward:
            inputs[0] = carry["left"]
        if kind.head:
            inputs[last] = y
        parts = self._scatter(inputs) if inputs else {}
        if kind.embed_backward:
            m = row.embed_backward
            batch = self._part(m)
            _, pull = jax.vjp(lambda w: self._embed(w, batch), self._outside)
            (grad,) = pull(self._mark(parts[0], m))
            carry["outside"] = _add(carry["outside"], grad, m != IDLE)
        if kind.head:
            m, y = row.head, self._mark(parts[last], row.head)
            head = functools.partial(self._head, batch=self._part(m))
            if self._training:
                grad = jax.grad(head, argnums=(0, 1), has_aux=True)
                (grad, results[last]), sums = grad(self._outside, y)
                carry["outside"] = _add(carry["outside"], grad, m != IDLE)
            else:
                sums = head(self._outside, y)[1]
            carry["sums"] = _add_some(carry["sums"], sums, m != IDLE)
        if kind.embed:
            x = self._embed(self._outside, self._part(row.embed))
            results[0] = self._mark(x, row.embed)
        gathered = self._gather(results) if results else None
        if kind.embed:
            carry["fed"] = gathered
        return carry, gathered if last in results else None

    def _embed(self, outside: Any, batch: Batch) -> jax.Array:
        return self._stack.embed(self._late(outside), batch, self._shard)

    def _head(self, outside: Any, x: jax.Array, batch: Batch):
        total, weight, others = self._stack.head(
            self._late(outside), x, batch, self._shard
        )
        return total, {"loss": total, "weight": weight, **others}

    def _late(self, outside: Any) -> Any:
        return jax.tree.map(
            lambda layout, w: layout.gather(w, late=True), self._layouts, outside
        )

    def _microbatch(self, m) -> Batch:
        """Returns microbatch m, or an arbitrary one if m is IDLE."""
        index = jnp.maximum(m, 0)

        def one(name: str, x: jax.Array) -> jax.Array:
            # Flattened to one row per microbatch: from [microbatch, row, position], XLA
            # for TPU makes a copy of all microbatches with rows padded to 128.
            rows = x.reshape(len(x), -1) if name in self._flat else x
            row = lax.dynamic_index_in_dim(rows, index, 0, keepdims=False)
            return self._mark(row.reshape(x.shape[1:]), m)

        return {name: one(name, x) for name, x in self._batch.items()}

    def _part(self, m) -> Batch:
        """Returns this stage's part of a microbatch."""
        dim = self._stack.split_dim + 1

        def one(x):
            return lax.dynamic_index_in_dim(
                self._divide(x), self._stage, dim, keepdims=False
            )

        return jax.tree.map(one, self._microbatch(m))

    def _divide(self, x: jax.Array) -> jax.Array:
        """Reshapes [..., N, ...] to [..., N / S, S, ...]; part s has s, s + S, ...

        With this order, a dimension that is sharded over other mesh axes is divided
        without moving data between devices.
        """
        dim, S = self._stack.split_dim, self._num
        return x.reshape(*x.shape[:dim], x.shape[dim] // S, S, *x.shape[dim + 1 :])

    def _scatter(self, inputs: dict[int, jax.Array]) -> dict[int, jax.Array]:
        """Returns this stage's part of each input; keys are the stages that have it."""
        stages, arrays = zip(*inputs.items(), strict=True)
        x = arrays[0]
        if len(arrays) == 2:
            x = jnp.where(self._stage == stages[0], *arrays)
        parts = self._exchange(self._divide(x))
        dim = self._stack.split_dim + 1
        return {s: lax.index_in_dim(parts, s, dim, keepdims=False) for s in stages}

    def _gather(self, parts: dict[int, jax.Array]) -> jax.Array:
        """Joins the parts of all stages on the stages that are keys of `parts`."""
        zeros = jnp.zeros_like(next(iter(parts.values())))
        dim = self._stack.split_dim
        sent = [parts.get(s, zeros) for s in range(self._num)]
        x = self._exchange(jnp.stack(sent, axis=dim + 1))
        shape = (*x.shape[:dim], x.shape[dim] * self._num, *x.shape[dim + 2 :])
        return x.reshape(shape)

    def _exchange(self, x: jax.Array) -> jax.Array:
        dim, axes = self._stack.split_dim + 1, self._stack.axes

        def exchange(x):
            return lax.all_to_all(x, PIPE, split_axis=dim, concat_axis=dim, tiled=True)

        rest = self._shard.spec(x.shape, (*axes[:dim], None, *axes[dim:]))
        return keep_sharded(exchange, x, rest, moved=[dim])

    def _mark(self, x: jax.Array, m) -> jax.Array:
        if self._bubble is None or not jnp.issubdtype(x.dtype, jnp.inexact):
            return x
        return jnp.where(m == IDLE, jnp.asarray(self._bubble, x.dtype), x)


def _write(kept: Any, new: Any, slot, is_real) -> Any:
    """Returns `kept` with `new` in its slot, or unchanged without a microbatch."""
    slot = jnp.maximum(slot, 0)

    def one(all_kept, x):
        x = jnp.where(is_real, x, all_kept[slot])
        return lax.dynamic_update_index_in_dim(all_kept, x, slot, 0)

    return jax.tree.map(one, kept, new)


def _add(total: Any, new: Any, is_real) -> Any:
    return jax.tree.map(
        lambda a, b: a + jnp.where(is_real, b.astype(jnp.float32), 0.0), total, new
    )


def _add_some(totals: Sums, new: Sums, is_real) -> Sums:
    """Adds to those of the totals that `new` has."""
    return totals | _add({name: totals[name] for name in new}, new, is_real)
