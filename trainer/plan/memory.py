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

from .case import FLOAT32, Case, more_cut

# Seen with 4 devices, and no longer with 8.
UNROLLED = 4


@dataclasses.dataclass(frozen=True)
class Part:
    """Something that takes memory at a moment; `detail` says which arrays."""

    name: str
    bytes: int
    detail: str = ""


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
    state = (
        Part("parameters", sum(case.resident(case.params).values())),
        Part("optimizer state", sum(case.resident(case.opt_state).values())),
        Part("batch", _batch_bytes(case)),
    )
    moments = _pipeline_moments(case) if case.pipeline else _moments(case)
    if not case.target.device.torus:
        from .gpu import on_gpu  # which needs Part

        moments = on_gpu(case, moments)
    return Memory(state, moments)


def _moments(case: Case) -> dict[str, tuple[Part, ...]]:
    costs = case.costs
    blocks, outside = _gradients(case)
    kept = _kept(case, case.layers)
    common = []
    if case.num_microbatches > 1:
        common.append(Part("gradient sums", blocks + outside, "of microbatches"))
    common.append(Part("weights, cast", _cast(case), "of all blocks, as stored"))
    head = case.resident(case.compute, case.itemsize)[costs.head.weight]
    residual = case.bytes(costs.residual)
    return {
        "head": (
            *common,
            *kept,
            _logits(case),
            Part("weights, gathered", head, "of the head"),
            Part("residual stream", 3 * residual, "before and after the last norm"),
        ),
        "backward": (
            *common,
            *kept,
            *_head_or_logits(case, blocks),
            _gathered_block(case),
            Part("residual stream", 3 * residual, "input, gradient, sum"),
            _working(case),
        ),
        "update": (*common[:-1], Part("gradients", blocks + outside, "of all")),
    }


def _pipeline_moments(case: Case) -> dict[str, tuple[Part, ...]]:
    assert case.pipeline is not None
    costs, S = case.costs, case.num_stages
    slots, R = case.pipeline.schedule.num_slots, case.pipeline.schedule.num_chunks
    whole = case.resident(case.compute, FLOAT32)
    stage = sum(b for path, b in whole.items() if case.is_block(path))
    outside = sum(b for path, b in whole.items() if not case.is_block(path))
    ratio = case.itemsize / FLOAT32
    residual = case.bytes(costs.residual)
    stored, stored_outside = _gradients(case)
    # Of several chunks the one at hand is copied out, for the loop over its layers.
    chunk_copy = stage / R if R > 1 else 0
    if case.config.pipeline.gather == "step":
        weights = Part(
            "weights, gathered",
            round(ratio * (stage + chunk_copy + outside)),
            "of the stage and outside",
        )
        sums = Part("gradient sums", stage + outside, "of the stage and outside")
    else:
        layer = round(stage / case.layers)
        weights = Part("weights, gathered", round(ratio * (2 * layer + outside)), "")
        sums = Part("gradient sums", stored + stored_outside + layer, "as stored")
    kept = case.layers // R * _sum(case, costs.kept)
    chunk: tuple[Part, ...] = ()
    if costs.keeps_weights:
        # Every microbatch in flight has all that its layers keep, and their result.
        each = kept + _sum(case, costs.kept_once) + residual
        in_flight = Part("in flight", slots * each, f"{slots} microbatches' values")
    else:
        in_flight = Part("in flight", slots * residual, f"{slots} inputs of chunks")
        chunk = (Part("kept", kept, "of one microbatch"),)
    common = (
        weights,
        sums,
        in_flight,
        Part("residual stream", 4 * residual, "between stages"),
    )
    return {
        "head": (
            *common,
            Part("logits", case.bytes(costs.logits, share=1 / S), "of a stage's part"),
            Part("gradients", outside, "outside the blocks, of one microbatch"),
        ),
        "backward": (
            *common,
            *chunk,
            Part("gradients", round(stage / R), "of one microbatch"),
            _working(case),
        ),
        "update": (Part("gradients", stored + stored_outside, "of all"),),
    }


def _kept(case: Case, layers: int) -> list[Part]:
    parts = [
        Part("kept", layers * case.bytes(array), f"{array.name} of {layers} blocks")
        for array in case.costs.kept
    ]
    if case.costs.keeps_weights:
        gathered = case.resident(case.compute, case.itemsize)
        blocks = sum(b for path, b in gathered.items() if _is_gathered(case, path))
        if blocks:
            parts.append(Part("kept", blocks, "gathered weights of all blocks"))
    return parts


def _working(case: Case) -> Part:
    """What is alive in one block's backward pass: attention's part or the MLP's."""
    costs = case.costs
    scores = next(p for p in costs.products if p.name == "scores")
    heads = scores.axes.index("heads")
    is_cut = case.cuts(("heads",), (scores.shape[heads],))
    attention = costs.attention + (costs.attention_cut if is_cut else ())
    by_part = {"attention": _sum(case, attention), "mlp": _sum(case, costs.mlp)}
    name = max(by_part, key=lambda name: by_part[name])
    return Part("working", by_part[name], f"{name} of one block")


def _logits(case: Case) -> Part:
    """Logits, and their gradient where the compiler does not fuse it into its uses.

    A ring of the head's gradient is a loop, and what a loop reads must be stored; up to
    UNROLLED devices it is no loop. A GPU's products take stored operands only.
    """
    size = case.bytes(case.costs.logits)
    head = case.costs.head.weight
    stored, whole = (
        next(a for a in tree.arrays if a.path == head)
        for tree in (case.gradients, case.compute)
    )
    axes = more_cut(stored, whole)
    is_loop = case.scatters_in_ring(axes) and (
        math.prod(case.sizes[axis] for axis in axes) > UNROLLED
    )
    if is_loop or not case.target.device.torus:
        return Part("logits", 2 * size, "and their gradient")
    return Part("logits", size)


def _head_or_logits(case: Case, blocks: int) -> tuple[Part, ...]:
    """Gradients there are when blocks go backward.

    Over several slices the head's comes after those of all blocks: logits wait for it.
    """
    if not case.target.device.torus or case.target.num_slices == 1:
        total = blocks + _head_gradient(case)
        return (Part("gradients", total, "of blocks and head"),)
    return (
        Part("gradients", blocks, "of blocks"),
        Part("logits", case.bytes(case.costs.logits), "for the head's gradient"),
    )


def _sum(case: Case, arrays) -> int:
    return sum(case.bytes(array) for array in arrays)


def _gradients(case: Case) -> tuple[int, int]:
    """(of the blocks, outside) as stored, in float32."""
    found = case.resident(case.gradients, FLOAT32)
    blocks = sum(b for path, b in found.items() if case.is_block(path))
    return blocks, sum(found.values()) - blocks


def _head_gradient(case: Case) -> int:
    """It waits for the update: scattered, or whole where the sum is an all-reduce."""
    head = case.costs.head.weight
    stored, whole = (
        next(a for a in tree.arrays if a.path == head)
        for tree in (case.gradients, case.compute)
    )
    if case.takes_slice(more_cut(stored, whole)):
        return case.resident(case.compute, case.itemsize)[head]
    return case.resident(case.gradients, FLOAT32)[head]


def _cast(case: Case) -> int:
    """Of stored block weights, where they are stored in another type."""
    stored = case.params.arrays
    if all(a.itemsize == case.itemsize for a in stored):
        return 0
    found = case.resident(case.params, case.itemsize)
    return sum(b for path, b in found.items() if _is_gathered(case, path))


def _gathered_block(case: Case) -> Part:
    found = case.resident(case.compute, case.itemsize)
    total = sum(b for path, b in found.items() if _is_gathered(case, path))
    return Part("weights, gathered", total // case.layers, "of one block")


def _is_gathered(case: Case, path: str) -> bool:
    """Whether it is a block's matrix; vectors are small and stay as they are."""
    return path in {p.weight for p in case.costs.products}


def _batch_bytes(case: Case) -> int:
    """Inputs, targets and weights; where documents are kept apart, two more."""
    num = 5 if getattr(case.config.data, "separate_documents", False) else 3
    shape = (case.config.batch_size, case.length)
    ways = case.ways(("batch", "length"), shape)
    return num * FLOAT32 * case.config.batch_size * case.length // ways


def _total(parts: tuple[Part, ...]) -> int:
    return sum(part.bytes for part in parts)
