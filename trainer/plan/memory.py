"""Bytes on a device at the moments of a step when most is alive.

A step holds the state throughout. Beside it, there are moments that can be the peak:

  head      the forward pass is done: what every block keeps, logits and their gradient
  backward  the first block runs backward: what blocks keep, the gradients of all
            blocks, for which the loop over blocks allocates from its start, and what
            one block recomputes and differentiates
  update    gradients in float32 beside the state, which is updated in place

Weights are cast to the compute dtype once, before the loop over blocks: the compiler
hoists the cast. They are gathered one block at a time, except without remat, where a
gathered weight is kept like any operand. A pipeline gathers the weights of its stage
and those outside the blocks once, and sums the gradients of all microbatches, beside
those of the current one; it keeps what waits in its slots.
"""

import dataclasses
import functools
import math

from .arrays import Values, Weights, of_each, total_bytes
from .scenario import Case, axes_of
from .sharded import FLOAT32

HEAD = "head"  # the moment


@dataclasses.dataclass(frozen=True)
class Part:
    """Something that takes memory at a moment; `detail` names its arrays."""

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
      moments: by name, what is alive beside it.
    """

    state: tuple[Part, ...]
    moments: dict[str, tuple[Part, ...]]

    @functools.cached_property
    def at(self) -> dict[str, int]:
        """Bytes in use at each moment, with the state."""
        totals = {
            name: sum(p.bytes for p in self.moments[name]) for name in self.moments
        }
        return {name: self.arguments + total for name, total in totals.items()}

    @property
    def peak_moment(self) -> str:
        return max(self.at, key=lambda name: self.at[name])

    @property
    def parts(self) -> tuple[Part, ...]:
        """Everything that makes up the peak."""
        return (*self.state, *self.moments[self.peak_moment])

    @property
    def arguments(self) -> int:
        return sum(part.bytes for part in self.state)

    @property
    def temporaries(self) -> int:
        return self.peak - self.arguments

    @property
    def peak(self) -> int:
        return max(self.at.values())


def memory(case: Case) -> Memory:
    if case.target.device.platform == "gpu":
        from .gpu import GpuMoments as kind  # which needs Moments
    else:
        kind = Moments
    found = kind(case)
    moments = found.pipelined() if case.pipeline else found.scanned()
    return Memory(state_parts(case), moments)


def state_parts(case: Case) -> tuple[Part, ...]:
    """Returns what stays from step to step, whatever remat and microbatches are."""
    variables = part(case, "variables", "not trained", Weights("variables"))
    return (
        part(case, "parameters", "", Weights("params")),
        part(case, "optimizer state", "", Weights("opt_state")),
        *((variables,) if variables.bytes else ()),
        Part("batch", _batch_bytes(case)),
    )


class Moments:
    """What is alive beside the state; on a TPU, and as far as is known on a CPU."""

    def __init__(self, case: Case):
        self.case, self.costs, self.fitted = case, case.costs, case.fitted
        self.part = functools.partial(part, case)
        self.late = case.config.pipeline.gather == "microbatch"
        # Whether a block's products are split over devices, and recomputed.
        first = next((p for p in case.costs.products if p.summed), None)
        self.is_split = bool(first and axes_of(case, first, first.summed))
        self.repeats_split = self.is_split and case.costs.repeats_sums
        # Whether the head's gradient comes after those of all blocks.
        self.head_last = bool(case.target.device.torus) and case.target.num_slices > 1
        self.head_axes = case.sharded.weights[self.costs.head.weight].scattered

    def scanned(self) -> dict[str, tuple[Part, ...]]:
        """Returns the moments of a loop over blocks."""
        common = (*self.sums(), self.cast(), *self.kept())
        return {
            HEAD: (*common, *self.head()),
            "backward": (
                *common,
                *self.gradients(),
                self.gathered_block(),
                self.block_stream(),
                *self.late_head(),
                self.working(),
            ),
            "update": (*self.sums(), self.all_gradients()),
        }

    def pipelined(self) -> dict[str, tuple[Part, ...]]:
        """Returns the moments of a stage."""
        case, (in_flight, chunk) = self.case, self.in_flight()
        assert case.pipeline is not None
        R = case.pipeline.schedule.num_chunks
        streams = self.fitted.stage_streams
        streams += self.fitted.split_streams if self.repeats_split else 0
        stream = Values(self.costs.residual, streams)
        sums = Weights("gradients" if self.late else "compute", itemsize=FLOAT32)
        common = (
            self.part("gradient sums", "of the stage and outside", sums),
            in_flight,
            self.part("residual stream", "between stages", stream),
        )
        # Gathered once a microbatch, weights travel in the compute dtype, one layer at
        # a time, and so do their gradients. Otherwise those outside the blocks, and of
        # one chunk of several, are cast before they are added.
        outside = self.outside_gradients(case.itemsize if self.late else FLOAT32)
        size = case.itemsize if self.late or R == 1 else FLOAT32
        share = 1 / (case.layers if self.late else R)
        stage = Weights("compute", "blocks", size, share)
        logits = Values(self.costs.logits, 1 / case.num_stages)
        head = (self.part("logits", "of a stage's part", logits),)
        if case.head_blocks > 1:
            head = self.block_of_logits()
        words = "outside the blocks, of one microbatch"
        return {
            HEAD: (
                self.stage_weights("outside" if self.late else "all"),
                *common,
                *head,
                self.part("gradients", words, *outside),
            ),
            "backward": (
                self.stage_weights("blocks" if self.late else "all"),
                *common,
                *chunk,
                self.part("gradients", "of one microbatch", stage),
                self.working(),
            ),
            "update": (self.all_gradients(),),
        }

    def in_flight(self) -> tuple[Part, tuple[Part, ...]]:
        """Returns what waits in the slots of a stage, and what one microbatch keeps."""
        case, costs = self.case, self.costs
        assert case.pipeline is not None
        slots, layers = case.pipeline.schedule.num_slots, case.chunk_layers
        if not costs.keeps_weights:
            inputs = Values(costs.residual, slots)
            kept = of_each(costs.kept, layers)
            return (
                self.part("in flight", f"{slots} inputs of chunks", inputs),
                (self.part("kept", "of one microbatch", *kept),),
            )
        # Each microbatch in flight has all that its layers keep, and their result.
        values = of_each(costs.kept, slots * layers)
        values += of_each((*costs.kept_once, costs.residual), slots)
        return self.part("in flight", f"{slots} microbatches' values", *values), ()

    def outside_gradients(self, itemsize: int) -> list[Weights]:
        """Returns those of weights outside the blocks, for one microbatch."""
        found = [Weights("compute", "outside", itemsize)]
        if self.costs.is_tied:
            # Of the look-up and of the head, before they are added.
            found.append(Weights("compute", self.costs.table, itemsize))
        return found

    def stage_weights(self, which: str) -> Part:
        """Returns the gathered weights: "all" for the step, or those in use."""
        case = self.case
        assert case.pipeline is not None
        R = case.pipeline.schedule.num_chunks
        size = case.itemsize
        outside = Weights("compute", "outside", size, tiled_as=FLOAT32)
        # Of several chunks the current one is copied out, for the loop over its layers.
        times, words = (1 + 1 / R if R > 1 else 1), "of the stage and outside"
        if which != "all":
            num = 1 if case.layers == R else 2
            times, words = num / case.layers, f"of {num} layer{'s' * (num > 1)}"
        blocks = Weights("compute", "blocks", size, times, tiled_as=FLOAT32)
        found = {"all": (blocks, outside), "blocks": (blocks,), "outside": (outside,)}
        words = "outside the blocks" if which == "outside" else words
        return self.part("weights, gathered", words, *found[which])

    def sums(self) -> tuple[Part, ...]:
        if self.case.num_microbatches == 1:
            return ()
        gradients = Weights("gradients", itemsize=FLOAT32)
        return (self.part("gradient sums", "of microbatches", gradients),)

    def all_gradients(self) -> Part:
        return self.part("gradients", "of all", Weights("gradients", itemsize=FLOAT32))

    def kept(self) -> list[Part]:
        layers = self.case.layers
        found = [
            self.part("kept", f"{a.name} of {layers} blocks", Values(a, layers))
            for a in self.costs.kept
        ]
        if self.costs.keeps_weights:
            weights = Weights("compute", "matrices", self.case.itemsize)
            kept = self.part("kept", "gathered weights of all blocks", weights)
            found += [kept] if kept.bytes else []
        return found

    def head_stream(self) -> Part:
        stream = Values(self.costs.residual, self.fitted.head_streams)
        return self.part("residual stream", "before and after the last norm", stream)

    def block_stream(self) -> Part:
        """Returns the stream while a block runs backward.

        Where heads are sharded and the block is recomputed, the normed inputs of its
        phases, with all positions, wait for the gradients of their weights.
        """
        stream, words = self.costs.residual, "input, gradient, sum"
        arrays = [Values(stream, self.fitted.block_streams)]
        if self.repeats_split:
            arrays.append(Values(self.costs.gathered, 2))
            words += "; normed inputs"
        return self.part("residual stream", words, *arrays)

    def late_head(self) -> tuple[Part, ...]:
        """Returns what the head's gradient needs, where it follows all blocks'.

        The compiler puts it there if heads are sharded and blocks are recomputed; with
        `sequence` only where gathers overlap, or if the head's ring is not a loop.
        """
        case, logits = self.case, Values(self.costs.logits)
        if not self.repeats_split or self.head_last or case.head_blocks > 1:
            return ()
        if case.bytes(self.costs.gathered) == case.bytes(self.costs.residual):
            return (self.part("logits", "for the head's gradient", logits),)
        unrolled = case.scatters_in_ring(self.head_axes) and not self.head_loops()
        if not self.fitted.overlaps_gathers(case.target.device.name) and not unrolled:
            return ()
        words = "and the head's input, for its gradient"
        return (self.part("logits", words, logits, Values(self.costs.gathered)),)

    def head(self) -> tuple[Part, ...]:
        """Returns what the head needs beside what blocks keep."""
        weight, stream = self.gathered_head(), self.head_stream()
        if self.case.head_blocks == 1:
            return (self.logits(), weight, stream)
        return (*self.block_of_logits(), weight, stream)

    def block_of_logits(self) -> tuple[Part, ...]:
        """Returns what a head in blocks has alive: one block, and gradients."""
        case, costs = self.case, self.costs
        num = self.fitted.block_logits / case.head_blocks / case.num_stages
        logits = Values(costs.logits, num)
        gradient = Weights("compute", costs.head.weight, FLOAT32)
        stream = Values(costs.gathered, 1 / case.num_stages)
        return (
            self.part("logits", "and their gradient, of one block", logits),
            self.part("gradients", "of the head, on one device", gradient),
            self.part("residual stream", "gradient of the head's input", stream),
        )

    def working(self) -> Part:
        """Returns what the largest phase of one block's backward pass has alive."""
        parts = [
            self.part(
                "working",
                f"{phase.name} of one block",
                *of_each(phase.arrays + (phase.if_split if self.is_split else ())),
            )
            for phase in self.costs.working
        ]
        return max(parts, key=lambda found: found.bytes)

    def logits(self) -> Part:
        """Returns logits, and their gradient where it is not fused into its uses.

        If the ring of the head's gradient is a loop, what it reads must be stored. With
        one example per device the products are plain ones, whose operands are stored,
        and so are a GPU's. Over several slices the gradient comes later.
        """
        case = self.case
        one_row = case.rows == case.ways(("batch",), (case.rows,))
        stored = self.head_loops() or one_row or not case.target.device.torus
        if stored and not self.head_last:
            both = Values(self.costs.logits, 2)
            return self.part("logits", "and their gradient", both)
        return self.part("logits", "", Values(self.costs.logits))

    def head_loops(self) -> bool:
        """Returns whether the head's gradient is scattered in a ring that is a loop."""
        size = math.prod(self.case.sizes[axis] for axis in self.head_axes)
        is_ring = self.case.scatters_in_ring(self.head_axes)
        return is_ring and size > self.fitted.loop_devices

    def gradients(self) -> tuple[Part, ...]:
        """Returns the gradients that exist when blocks run backward.

        Over several slices the head's comes last, and logits wait for it.
        """
        blocks = Weights("gradients", "blocks", FLOAT32)
        if not self.head_last or self.case.head_blocks > 1:
            head = Weights("gradients", self.costs.head.weight, FLOAT32)
            return (self.part("gradients", "of blocks and head", blocks, head),)
        logits = Values(self.costs.logits)
        return (
            self.part("gradients", "of blocks", blocks),
            self.part("logits", "for the head's gradient", logits),
        )

    def cast(self) -> Part:
        """Returns the cast block matrices, if they are stored in another dtype."""
        size = self.case.itemsize
        params = self.case.sharded.trees["params"].arrays
        is_same = all(array.itemsize == size for array in params)
        arrays = () if is_same else (Weights("params", "matrices", size),)
        return self.part("weights, cast", "of all blocks, as stored", *arrays)

    def gathered_block(self) -> Part:
        """Returns the matrices of a block; vectors are small and not gathered."""
        case = self.case
        block = Weights("compute", "matrices", case.itemsize, 1 / case.layers)
        return self.part("weights, gathered", "of one block", block)

    def gathered_head(self) -> Part:
        head = Weights("compute", self.costs.head.weight, self.case.itemsize)
        return self.part("weights, gathered", "of the head", head)


def _batch_bytes(case: Case) -> int:
    """Returns inputs, targets and weights, and two more for separate documents."""
    num = 5 if getattr(case.config.data, "separate_documents", False) else 3
    shape = (case.config.batch_size, case.length)
    ways = case.ways(("batch", "length"), shape)
    return num * FLOAT32 * math.prod(shape) // ways
