"""What a device exchanges with others in one step, by collective and mesh axis.

Bytes are payloads as sharding/audit.py counts them: in one run, the array that the
group holds together.

  weights    each matrix is gathered in the compute dtype where it is used, and again in
             the backward pass unless it was kept. A table that is larger than what is
             looked up stays sharded: an all-to-all moves the result
  gradients  a matrix's gradient is scattered as its parameter is sharded, in the
             compute dtype. For TPUs the compiler makes a ring of the product and the
             scatter where it can: n + 1 sends of 1/n. For a look-up, an all-to-all
             moves the gradient of the activations instead
  sums       a product over a sharded dimension gives partial sums: one all-reduce of
             the residual stream forward, one backward
  exchanges  where devices share the positions of a sequence, what attention sends
  experts    a block with experts sends its tokens to them and the results back
  pipeline   every tick sends one activation each way; table and head are shared by
             all-to-alls; weights are gathered, and gradients summed in float32, once a
             step
"""

import collections
import dataclasses
import itertools
import math
from collections.abc import Iterable, Iterator
from typing import Any

from .links import PERMUTE
from .scenario import Case, axes_of
from .sharded import FLOAT32, Weight


@dataclasses.dataclass(frozen=True)
class Transfer:
    kind: str
    axes: tuple[str, ...]
    bytes: int
    what: str


def traffic(case: Case) -> tuple[Transfer, ...]:
    parts = [_sums(case), _exchanges(case), _to_experts(case)]
    parts += [_pipeline(case)] if case.pipeline else [_weights(case), _gradients(case)]
    found = sum_by(
        ((t.kind, tuple(a for a in case.sizes if a in t.axes), t.what), t.bytes)
        for t in itertools.chain(*parts)
    )
    return tuple(
        Transfer(kind, axes, round(count), what)
        for (kind, axes, what), count in found.items()
        if axes and count
    )


def by_axes(transfers: Iterable[Transfer]) -> dict[tuple[str, ...], int]:
    return sum_by((transfer.axes, transfer.bytes) for transfer in transfers)


def sum_by(counts: Iterable[tuple[Any, int]]) -> dict[Any, int]:
    """Returns the sum of the counts of each key, in the order of their first."""
    found = collections.Counter()
    for key, count in counts:
        found[key] += count
    return dict(found)


def _weights(case: Case) -> Iterator[Transfer]:
    each = case.num_microbatches
    for path, weight in case.sharded.weights.items():
        if path == case.costs.table and _stays(case):
            # Looked up where it is sharded; the results are sent to their examples.
            moved = each * case.bytes(case.costs.residual)
            yield Transfer("all-to-all", weight.gathered, moved, "weights")
            continue
        uses = 1
        if case.is_block(path) and not case.costs.keeps_weights:
            uses = 2
        elif path == case.costs.head.weight:
            # GPUs gather a tied table for the look-up and for the head, TPUs once.
            uses = 1 + (case.costs.is_tied and case.target.device.platform == "gpu")
        size = each * uses * weight.elements * case.itemsize
        yield Transfer("all-gather", weight.gathered, size, "weights")


def _stays(case: Case) -> bool:
    """Returns whether a look-up leaves its table sharded (models/lookup.py)."""
    if case.costs.is_tied:
        return False
    table = case.sharded.weights[case.costs.table].stored
    shape = (case.rows, case.length)
    return math.prod(shape) // case.ways(("batch", "length"), shape) < table.shape[0]


def _gradients(case: Case) -> Iterator[Transfer]:
    each = case.num_microbatches
    products = {p.weight for p in (*case.costs.products, case.costs.head)}
    for path, weight in case.sharded.weights.items():
        is_product = path in products
        itemsize = case.itemsize if is_product else weight.whole.itemsize
        size = each * weight.elements * itemsize
        if is_product:
            in_loop = path == case.costs.head.weight and case.head_blocks > 1
            yield _scatter(case, weight.scattered, size, is_product=not in_loop)
        yield _rest(case, weight, size)
    if not case.costs.table:
        return
    # The gradient of look-ups is summed where their tables live; it moves once for all.
    table = case.sharded.weights[case.costs.table]
    if case.costs.is_tied:  # its gradient as a head was summed above
        yield _rest(case, table, each * table.elements * FLOAT32)
    moved = each * case.bytes(case.costs.residual)
    yield Transfer("all-to-all", table.scattered, moved, "gradients")


def _rest(case: Case, weight: Weight, size: int) -> Transfer:
    """Returns the sum of a scattered gradient over the other axes of the batch."""
    axes = weight.scattered
    rest = tuple(a for a in case.token_axes if a not in (*axes, *weight.used))
    share = math.prod(case.sizes[axis] for axis in axes)
    return Transfer("all-reduce", rest, size // share, "gradients")


def _scatter(
    case: Case, axes: tuple[str, ...], size: int, *, is_product: bool
) -> Transfer:
    """Returns the sum of a gradient over the devices that hold shards of it.

    Args:
      is_product: whether a product gives it, with which the sum may become a ring.
    """
    if axes and is_product and case.scatters_in_ring(axes):
        n = math.prod(case.sizes[axis] for axis in axes)
        return Transfer(PERMUTE, axes, size * (n + 1) // n, "gradients")
    kind = "all-reduce" if axes and case.takes_slice(axes) else "reduce-scatter"
    return Transfer(kind, axes, size, "gradients")


def _sums(case: Case) -> Iterator[Transfer]:
    """Yields sums over the axes that shard the products themselves, such as tensor."""
    costs, times = case.costs, case.ticks
    layers = case.chunk_layers
    # Forwards that a backward begins with.
    starts = times.backwards if case.pipeline and not costs.keeps_weights else 0
    residual = case.bytes(costs.gathered)
    streams = set(case.mesh_axes(costs.residual.axes, costs.residual.shape))
    for product in costs.products:
        again = times.backwards if product.name in costs.recomputed else 0
        is_needed = layers > 1 or product is not costs.products[-1]
        runs = {
            product.summed: times.forwards + (starts if is_needed else 0) + again,
            product.spread: times.backwards,
        }
        for name, count in runs.items():
            axes = axes_of(case, product, name)
            yield from _summed(axes, layers * count * residual, streams)
    if case.pipeline is None and not costs.keeps_weights:
        yield from _gathered_again(case, layers * times.backwards * residual, streams)
    axes = axes_of(case, costs.head, costs.head.spread)
    # Backward of the head, and forward of a look-up in a table that is sharded alike.
    share = times.heads * residual / case.num_stages
    yield from _summed(axes, round(2 * share), set())


def _exchanges(case: Case) -> Iterator[Transfer]:
    """Yields what devices send each other for attention over all positions."""
    axes, times = case.mesh_axes(("length",), (case.length,)), case.ticks
    starts = times.backwards if case.pipeline and not case.costs.keeps_weights else 0
    for one in case.costs.exchanges:
        runs = (times.forwards + starts) * one.forward + times.backwards * one.backward
        size = round(case.chunk_layers * runs * case.bytes(one.array))
        yield Transfer(one.kind, axes, size, "exchanges")


def _gathered_again(case: Case, size: int, streams: set[str]) -> Iterator[Transfer]:
    """Yields gathers of the normed inputs, for the gradients of their weights.

    They are sharded by position and gathered again in the backward pass; where sums are
    recomputed, the last of them is among these already.
    """
    products = [p for p in case.costs.products if p.spread]
    axes = axes_of(case, products[0], products[0].spread)
    num = len(products) - case.costs.repeats_sums
    if set(axes) & streams:
        yield Transfer("all-gather", axes, num * size, "sums")


def _summed(axes: tuple[str, ...], size: int, streams: set[str]) -> Iterator[Transfer]:
    if set(axes) & streams:  # the stream is sharded along them: scatter, gather later
        yield Transfer("reduce-scatter", axes, size, "sums")
        yield Transfer("all-gather", axes, size, "sums")
    else:
        yield Transfer("all-reduce", axes, size, "sums")


def _to_experts(case: Case) -> Iterator[Transfer]:
    """Yields what blocks exchange along an axis of their own, such as experts."""
    costs, times = case.costs, case.ticks
    name, size = costs.exchanged_along
    if not costs.exchanged:
        return
    axes = case.mesh_axes((name,), (size,))
    layers = case.chunk_layers * times.forwards * costs.exchanged_share
    for array in costs.exchanged:
        moved = round(layers * case.bytes(array))
        yield Transfer("all-to-all", axes, moved, array.name)


def _pipeline(case: Case) -> Iterator[Transfer]:
    assert case.pipeline is not None
    times, residual = case.ticks, case.bytes(case.costs.residual)
    yield Transfer(
        PERMUTE,
        ("pipe",),
        (times.forwards + times.backwards) * residual,
        "stages",
    )
    yield Transfer("all-to-all", ("pipe",), times.exchanges * residual, "outside")
    late = case.config.pipeline.gather == "microbatch"
    batch = case.token_axes
    summed = case.itemsize if late else FLOAT32
    for path, weight in case.sharded.weights.items():
        gathers, scatters = _uses(case, path)
        for kind, axes, runs, itemsize in (
            ("all-gather", weight.gathered, gathers, case.itemsize),
            ("reduce-scatter", weight.scattered, scatters, summed),
        ):
            # One axis after the other, the major one last when gathering.
            size = weight.elements * itemsize
            for axis in axes:
                times_run = runs if axis in batch and late else 1
                yield Transfer(kind, (axis,), round(times_run * size), "weights")
                size //= case.sizes[axis]
            if kind == "reduce-scatter":
                rest = [a for a in batch if a not in (*axes, *weight.used)]
                rest += [] if case.is_block(path) or "pipe" in axes else ["pipe"]
                yield Transfer("all-reduce", tuple(rest), size, "gradients")


def _uses(case: Case, path: str) -> tuple[float, float]:
    """Returns how often a pipeline uses a weight, and its gradient."""
    assert case.pipeline is not None
    times, found = case.ticks, case.pipeline.simulation
    if case.is_block(path):
        return found.weight_gathers, found.weight_scatters
    is_head = path == case.costs.head.weight
    is_table = not is_head or case.costs.is_tied
    heads = times.heads * is_head
    return (
        heads + times.embeds * is_table,
        heads + times.embed_backwards * is_table,
    )
