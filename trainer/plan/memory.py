"""Bytes on a device at the moments of a step when most is alive.

A step holds the state throughout. Beside it there are moments that can be the peak:

  head      the forward pass is done: what every block keeps, logits and their gradient
  backward  the first block goes backward: what blocks keep, gradients of all blocks,
            which the loop over blocks has room for from its start, and what one block
            recomputes and differentiates
  update    gradients in float32 beside the state, which is updated in place

Weights are cast to the type of computing once, before the loop over blocks: the
compiler takes the cast out of the loop. They are gathered one block at a time, unless
without remat, where a gathered weight is kept as any operand is. A pipeline gathers
its stage's and the outside weights once and sums gradients of all microbatches whole,
beside those of the microbatch at hand; it keeps what waits in its slots.
"""

import dataclasses
import math

from ..program.hardware import CARRIES_GATHERS
from .arrays import Values, Weights, of_each, total_bytes
from .cutting import FLOAT32
from .scenario import Case, axes_of, more_cut

# Seen with 4 devices, and no longer with 8.
UNROLLED = 4
# Arrays up to this size were in a chip's fast memory, of 128 MiB, larger ones not.
FAST = 2**26


@dataclasses.dataclass(frozen=True)
class Part:
    """Something that takes memory at a moment; `detail` says which arrays in words."""

    name: str
    bytes: int
    detail: str = ""
    arrays: tuple[Weights | Values, ...] = ()


def part(case: Case, name: str, detail: str, *arrays: Weights | Values) -> Part:
    return Part(name, total_bytes(case, arrays), detail, arrays)


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes on one device.

    Attributes:
      state: what stays from step to step.
      moments: by name, what there is beside it.
    """

    state: tuple[Part, ...]
    moments: dict[str, tuple[Part, ...]]

    @property
    def peak_moment(self) -> str:
        return max(self.moments, key=lambda name: _total(self.moments[name]))

    @property
    def parts(self) -> tuple[Part, ...]:
        """All that makes up the peak."""
        return (*self.state, *self.moments[self.peak_moment])

    @property
    def arguments(self) -> int:
        return _total(self.state)

    @property
    def temporaries(self) -> int:
        return _total(self.moments[self.peak_moment])

    @property
    def peak(self) -> int:
        return self.arguments + self.temporaries


def memory(case: Case) -> Memory:
    moments = _pipeline_moments(case) if case.pipeline else _moments(case)
    if case.target.device.platform == "gpu":
        from .gpu import on_gpu  # which needs Part

        moments = on_gpu(case, moments)
    return Memory(state_parts(case), moments)


def state_parts(case: Case) -> tuple[Part, ...]:
    """What stays from step to step; neither remat nor microbatches change it."""
    return (
        part(case, "parameters", "", Weights("params")),
        part(case, "optimizer state", "", Weights("opt_state")),
        Part("batch", _batch_bytes(case)),
    )


def _moments(case: Case) -> dict[str, tuple[Part, ...]]:
    costs = case.costs
    gradients = Weights("gradients", itemsize=FLOAT32)
    head = Weights("compute", costs.head.weight, case.itemsize)
    residual = Values(costs.residual, 3)
    kept, sums = _kept(case), ()
    if case.num_microbatches > 1:
        sums = (part(case, "gradient sums", "of microbatches", gradients),)
    common = (*sums, _cast(case), *kept)
    return {
        "head": (
            *common,
            _logits(case),
            part(case, "weights, gathered", "of the head", head),
            part(case, "residual stream", "before and after the last norm", residual),
        ),
        "backward": (
            *common,
            *_gradients(case),
            _gathered_block(case),
            _stream(case),
            *_late_head(case),
            _working(case),
        ),
        "update": (*sums, part(case, "gradients", "of all", gradients)),
    }


def _pipeline_moments(case: Case) -> dict[str, tuple[Part, ...]]:
    assert case.pipeline is not None
    costs, residual = case.costs, case.costs.residual
    slots, R = case.pipeline.schedule.num_slots, case.pipeline.schedule.num_chunks
    layers = case.layers // R
    if costs.keeps_weights:
        # Every microbatch in flight has all that its layers keep, and their result.
        in_flight = part(
            case,
            "in flight",
            f"{slots} microbatches' values",
            *of_each(costs.kept, slots * layers),
            *of_each((*costs.kept_once, residual), slots),
        )
        chunk = ()
    else:
        words = f"{slots} inputs of chunks"
        in_flight = part(case, "in flight", words, Values(residual, slots))
        kept = of_each(costs.kept, layers)
        chunk = (part(case, "kept", "of one microbatch", *kept),)
    late = case.config.pipeline.gather == "microbatch"
    common = (
        _gradient_sums(case, late),
        in_flight,
        part(
            case,
            "residual stream",
            "between stages",
            Values(residual, 4 + _waiting(case)),
        ),
    )
    # Gathered once a microbatch, weights travel as they are computed with, one layer at
    # a time, and so do their gradients. Otherwise those outside the blocks, and of one
    # chunk of several, are cast before they are added.
    outside = outside_gradients(case, case.itemsize if late else FLOAT32)
    itemsize = case.itemsize if late or R == 1 else FLOAT32
    stage = Weights("compute", "blocks", itemsize, 1 / (case.layers if late else R))
    logits = Values(costs.logits, 1 / case.num_stages)
    gradients = Weights("gradients", itemsize=FLOAT32)
    return {
        "head": (
            _stage_weights(case, "outside" if late else "all"),
            *common,
            part(case, "logits", "of a stage's part", logits),
            part(case, "gradients", "outside the blocks, of one microbatch", *outside),
        ),
        "backward": (
            _stage_weights(case, "blocks" if late else "all"),
            *common,
            *chunk,
            part(case, "gradients", "of one microbatch", stage),
            _working(case),
        ),
        "update": (part(case, "gradients", "of all", gradients),),
    }


def outside_gradients(case: Case, itemsize: int) -> list[Weights]:
    """Of weights outside the blocks, for one microbatch."""
    found = [Weights("compute", "outside", itemsize)]
    if case.costs.is_tied:
        # Of the look-up and of the head, before they are added.
        found.append(Weights("compute", case.costs.table, itemsize))
    return found


def _stage_weights(case: Case, which: str) -> Part:
    """Weights that a stage has gathered: "all" for the step, or those at hand."""
    assert case.pipeline is not None
    R = case.pipeline.schedule.num_chunks
    outside = Weights("compute", "outside", case.itemsize, tiled_as=FLOAT32)
    # Of several chunks the one at hand is copied out, for the loop over its layers.
    times, words = (1 + 1 / R if R > 1 else 1), "of the stage and outside"
    if which != "all":
        num = 1 if case.layers == R else 2
        times, words = num / case.layers, f"of {num} layer{'s' * (num > 1)}"
    blocks = Weights("compute", "blocks", case.itemsize, times, tiled_as=FLOAT32)
    found = {"all": (blocks, outside), "blocks": (blocks,), "outside": (outside,)}
    words = "outside the blocks" if which == "outside" else words
    return part(case, "weights, gathered", words, *found[which])


def _gradient_sums(case: Case, late: bool) -> Part:
    tree = "gradients" if late else "compute"
    sums = Weights(tree, itemsize=FLOAT32)
    return part(case, "gradient sums", "of the stage and outside", sums)


def _kept(case: Case) -> list[Part]:
    found = []
    for array in case.costs.kept:
        words = f"{array.name} of {case.layers} blocks"
        found.append(part(case, "kept", words, Values(array, case.layers)))
    if case.costs.keeps_weights:
        weights = Weights("compute", "matrices", case.itemsize)
        kept = part(case, "kept", "gathered weights of all blocks", weights)
        found += [kept] if kept.bytes else []
    return found


def _waiting(case: Case) -> int:
    """Arrays of the stream that wait while a block of a stage goes backward.

    Where heads are cut over devices: sums over devices and what was normed of them,
    which are stored then. Counted in compiled programs.
    """
    return 4 if _cuts_heads(case) and case.costs.repeats_sums else 0


def _stream(case: Case) -> Part:
    """The stream while a block goes backward, of which heads may be cut over devices.

    Of a block that is done again the normed inputs of attention and MLP wait for the
    gradients of their weights: gathered whole, where the stream is cut by position
    (`sequence`). Otherwise the chip's fast memory holds them if they are small.
    """
    stream, words = case.costs.residual, "input, gradient, sum"
    arrays = [Values(stream, 3)]
    if _cuts_heads(case) and case.costs.repeats_sums:
        whole = case.costs.gathered
        if case.bytes(whole) > case.bytes(stream) or case.bytes(whole) > FAST:
            arrays.append(Values(whole, 2))
            words += "; normed inputs"
    return part(case, "residual stream", words, *arrays)


def _late_head(case: Case) -> tuple[Part, ...]:
    """Logits and the head's input, where the head's gradient follows all blocks'.

    The compiler puts it there if heads are cut and blocks are done again; with
    `sequence` only on v5e, or if its ring is no loop. Found in live ranges of programs.
    """
    costs = case.costs
    if not _cuts_heads(case) or not costs.repeats_sums or _head_waits(case):
        return ()
    whole = case.costs.gathered
    if case.bytes(whole) == case.bytes(costs.residual):
        return (part(case, "logits", "for the head's gradient", Values(costs.logits)),)
    axes = _scattered(case)
    unrolled = case.scatters_in_ring(axes) and not _is_loop(case, axes)
    if case.target.device.name != CARRIES_GATHERS and not unrolled:
        return ()
    arrays = Values(costs.logits), Values(whole)
    return (part(case, "logits", "and the head's input, for its gradient", *arrays),)


def _cuts_heads(case: Case) -> bool:
    first = next((p for p in case.costs.products if p.summed), None)
    return first is not None and bool(axes_of(case, first, first.summed))


def _working(case: Case) -> Part:
    """What is alive in one block's backward pass: attention's part or the MLP's."""
    split = _cuts_heads(case)
    parts = [
        part(
            case,
            "working",
            f"{phase.name} of one block",
            *of_each(phase.arrays + (phase.if_split if split else ())),
        )
        for phase in case.costs.working
    ]
    return max(parts, key=lambda found: found.bytes)


def _logits(case: Case) -> Part:
    """Logits, and their gradient where the compiler does not fuse it into its uses.

    A ring of the head's gradient is a loop, and what a loop reads must be stored; up to
    UNROLLED devices it is no loop. Where a device has one example only, its products
    are plain ones and take stored operands, and so do a GPU's. Over several slices the
    head's gradient comes later, from the logits.
    """
    is_loop = _is_loop(case, _scattered(case))
    one_row = case.rows == case.ways(("batch",), (case.rows,))
    if not _head_waits(case) and (is_loop or one_row or not case.target.device.torus):
        return part(case, "logits", "and their gradient", Values(case.costs.logits, 2))
    return part(case, "logits", "", Values(case.costs.logits))


def _scattered(case: Case) -> tuple[str, ...]:
    """The axes over which the gradient of the head is scattered."""
    head = case.costs.head.weight
    stored, whole = (
        next(a for a in tree.arrays if a.path == head)
        for tree in (case.gradients, case.compute)
    )
    return more_cut(stored, whole)


def _is_loop(case: Case, axes: tuple[str, ...]) -> bool:
    size = math.prod(case.sizes[axis] for axis in axes)
    return case.scatters_in_ring(axes) and size > UNROLLED


def _head_waits(case: Case) -> bool:
    """Whether the head's gradient comes after those of all blocks."""
    return bool(case.target.device.torus) and case.target.num_slices > 1


def _gradients(case: Case) -> tuple[Part, ...]:
    """Gradients there are when blocks go backward.

    Over several slices the head's comes after those of all blocks: logits wait for it.
    """
    blocks = Weights("gradients", "blocks", FLOAT32)
    if not _head_waits(case):
        head = Weights("gradients", case.costs.head.weight, FLOAT32)
        return (part(case, "gradients", "of blocks and head", blocks, head),)
    logits = Values(case.costs.logits)
    return (
        part(case, "gradients", "of blocks", blocks),
        part(case, "logits", "for the head's gradient", logits),
    )


def _cast(case: Case) -> Part:
    """Of stored block matrices, where they are stored in another type."""
    is_same = all(a.itemsize == case.itemsize for a in case.params.arrays)
    arrays = () if is_same else (Weights("params", "matrices", case.itemsize),)
    return part(case, "weights, cast", "of all blocks, as stored", *arrays)


def _gathered_block(case: Case) -> Part:
    """Its matrices; vectors are small and stay as they are."""
    block = Weights("compute", "matrices", case.itemsize, 1 / case.layers)
    return part(case, "weights, gathered", "of one block", block)


def _batch_bytes(case: Case) -> int:
    """Inputs, targets and weights; where documents are kept apart, two more."""
    num = 5 if getattr(case.config.data, "separate_documents", False) else 3
    shape = (case.config.batch_size, case.length)
    ways = case.ways(("batch", "length"), shape)
    return num * FLOAT32 * case.config.batch_size * case.length // ways


def _total(parts: tuple[Part, ...]) -> int:
    return sum(part.bytes for part in parts)
