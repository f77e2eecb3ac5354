"""What the stages do at a tick, seen from one of them.

At a tick all stages do the same kinds of work on microbatches of their own, as the
schedule's rows say. A stage that has none computes all the same, and its result is not
used. Activations go round the ring of stages, gradients the other way.

Embedding, head and loss are divided among the stages: each takes 1/S of a microbatch.
The stage at an end of the ring that has the whole, and the stages that have the parts,
exchange them by one all-to-all each way, which carries embedding and head together.
"""

import functools
from collections.abc import Collection
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ..sharder import Sharder
from .chunks import Chunks
from .loops import Kind, Loop, Rows
from .schedule import IDLE, Schedule
from .stack import Batch, Stack
from .weights import in_pieces

PIPE = "pipe"
Carry = dict[str, Any]


class Ticks:
    """The program of one stage.

    Args:
      outside: parameters outside the blocks, and `plans` a Weight for each.
      batch: this device's rows, [microbatches, microbatch size, ...].
      flat: names of its arrays that no other axis of the mesh cuts.
      training: whether there are backwards.
      bubble: a value put in place of every input that is no microbatch's. It must not
        change any result; for tests.
    """

    def __init__(
        self,
        stack: Stack,
        schedule: Schedule,
        chunks: Chunks,
        outside: Any,
        plans: Any,
        batch: Batch,
        shard: Sharder,
        *,
        flat: Collection[str],
        training: bool,
        bubble: float | None = None,
    ):
        self._stack, self._chunks, self._shard = stack, chunks, shard
        self._outside, self._plans = outside, plans
        self._batch, self._flat = batch, flat
        self._schedule, self._training, self._bubble = schedule, training, bubble
        self._stage = lax.axis_index(PIPE)
        self._num = S = schedule.num_stages
        self._down = [(s, (s + 1) % S) for s in range(S)]
        self._up = [(s, (s - 1) % S) for s in range(S)]

    def start(self) -> Carry:
        """What goes from tick to tick, all zero.

        fed: the embedding that stage 0 takes next
        arrived: what the stage before computed
        returned: the gradient that the stage after computed
        left: the gradient of this stage's own input
        """

        def shapes():
            batch = self._part(0)
            part = self._embed(self._outside, batch)
            x = jnp.concatenate([part] * self._num, axis=self._stack.cut)
            kept = self._chunks.forward(0, x, self._microbatch(0))[1]
            return x, self._head(self._outside, part, batch)[1], kept

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

    def loop(self, loop: Loop, carry: Carry, rows: Rows) -> Carry:
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

    def _tick(self, kind: Kind, carry: Carry, row: Rows) -> tuple[Carry, None]:
        carry, stage, last = dict(carry), self._stage, self._num - 1
        y = pull = None
        if kind.forward:
            m, chunk, slot = row.forward[stage]
            begins = (stage == 0) & (chunk == 0)
            x = jnp.where(begins, carry["fed"], carry["arrived"])
            y, kept = self._chunks.forward(chunk, self._mark(x, m), self._microbatch(m))
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

    def _outside_work(self, kind: Kind, carry: Carry, y, row: Rows):
        """(carry, gradient for the last stage or None): embedding, head and loss."""
        last = self._num - 1
        whole = {}
        if kind.embed_backward:
            whole[0] = carry["left"]
        if kind.head:
            whole[last] = y
        parts = self._scatter(whole) if whole else {}
        answers = {}
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
                (grad, answers[last]), sums = grad(self._outside, y)
                carry["outside"] = _add(carry["outside"], grad, m != IDLE)
            else:
                sums = head(self._outside, y)[1]
            carry["sums"] = _add(carry["sums"], sums, m != IDLE)
        if kind.embed:
            x = self._embed(self._outside, self._part(row.embed))
            answers[0] = self._mark(x, row.embed)
        gathered = self._gather(answers) if answers else None
        if kind.embed:
            carry["fed"] = gathered
        return carry, gathered if last in answers else None

    def _embed(self, outside: Any, batch: Batch) -> jax.Array:
        return self._stack.embed(self._late(outside), batch, self._shard)

    def _head(self, outside: Any, x: jax.Array, batch: Batch):
        total, weight, others = self._stack.head(
            self._late(outside), x, batch, self._shard
        )
        return total, {"loss": total, "weight": weight, **others}

    def _late(self, outside: Any) -> Any:
        return jax.tree.map(
            lambda plan, w: plan.gather(w, late=True), self._plans, outside
        )

    def _microbatch(self, m) -> Batch:
        """Microbatch m, or any where m is IDLE."""
        at = jnp.maximum(m, 0)

        def one(name: str, x: jax.Array) -> jax.Array:
            # As one row each: of [microbatch, row, place] the compiler for TPUs makes a
            # copy with rows padded to 128, of all microbatches at once.
            rows = x.reshape(len(x), -1) if name in self._flat else x
            row = lax.dynamic_index_in_dim(rows, at, 0, keepdims=False)
            return self._mark(row.reshape(x.shape[1:]), m)

        return {name: one(name, x) for name, x in self._batch.items()}

    def _part(self, m) -> Batch:
        """This stage's part of a microbatch."""
        dim = self._stack.cut + 1

        def one(x):
            return lax.dynamic_index_in_dim(
                self._divide(x), self._stage, dim, keepdims=False
            )

        return jax.tree.map(one, self._microbatch(m))

    def _divide(self, x: jax.Array) -> jax.Array:
        """[..., N, ...] as [..., N / S, S, ...]: part s takes places s, s + S, ...

        So a dimension that is cut over other axes of the mesh is divided without
        moving between devices.
        """
        cut, S = self._stack.cut, self._num
        return x.reshape(*x.shape[:cut], x.shape[cut] // S, S, *x.shape[cut + 1 :])

    def _scatter(self, whole: dict[int, jax.Array]) -> dict[int, jax.Array]:
        """Gives each stage its part of what the named stages have."""
        stages, arrays = zip(*whole.items(), strict=True)
        x = arrays[0]
        if len(arrays) == 2:
            x = jnp.where(self._stage == stages[0], *arrays)
        parts = self._exchange(self._divide(x))
        dim = self._stack.cut + 1
        return {s: lax.index_in_dim(parts, s, dim, keepdims=False) for s in stages}

    def _gather(self, parts: dict[int, jax.Array]) -> jax.Array:
        """Gives each named stage the whole of the parts meant for it."""
        nothing = jnp.zeros_like(next(iter(parts.values())))
        cut = self._stack.cut
        sent = [parts.get(s, nothing) for s in range(self._num)]
        x = self._exchange(jnp.stack(sent, axis=cut + 1))
        shape = (*x.shape[:cut], x.shape[cut] * self._num, *x.shape[cut + 2 :])
        return x.reshape(shape)

    def _exchange(self, x: jax.Array) -> jax.Array:
        dim, axes = self._stack.cut + 1, self._stack.axes

        def exchange(x):
            return lax.all_to_all(x, PIPE, split_axis=dim, concat_axis=dim, tiled=True)

        rest = self._shard.spec(x.shape, (*axes[:dim], None, *axes[dim:]))
        return in_pieces(exchange, x, rest, moved=[dim])

    def _mark(self, x: jax.Array, m) -> jax.Array:
        if self._bubble is None or not jnp.issubdtype(x.dtype, jnp.inexact):
            return x
        return jnp.where(m == IDLE, jnp.asarray(self._bubble, x.dtype), x)


def _write(kept: Any, new: Any, slot, is_real) -> Any:
    """Puts `new` into its slot; a stage without a microbatch leaves all as it was."""
    slot = jnp.maximum(slot, 0)

    def one(all_kept, x):
        x = jnp.where(is_real, x, all_kept[slot])
        return lax.dynamic_update_index_in_dim(all_kept, x, slot, 0)

    return jax.tree.map(one, kept, new)


def _add(total: Any, new: Any, is_real) -> Any:
    return jax.tree.map(
        lambda a, b: a + jnp.where(is_real, b.astype(jnp.float32), 0.0), total, new
    )
