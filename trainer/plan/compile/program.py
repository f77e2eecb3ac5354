"""The walk: what does this compiled program cost, by its optimized HLO text alone?

It checks the closed form (predict.py), which answers for configs that nobody compiled.
The scheduled program is walked in order, loops times their trip counts. An operation
takes as long as its products at the device's peak or its bytes through HBM, whichever
is longer. A collective takes its bytes over the links of its mesh axes. A synchronous
one blocks the rest. An asynchronous one overlaps with what stands between its start and
its done, and only the remainder is waited for. Prefetched copies go through HBM in the
same way, beside operations that leave it free.

This ranks programs and does not predict measured times: peaks are never reached, and
latencies, vector units and the scheduling inside kernels are not modelled.
"""

import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Any

from ....sharding import hlo
from ....sharding.hlo import text as hlo_text
from ...program.hardware import Target
from .walk import Walk


@dataclasses.dataclass(frozen=True)
class Exchange:
    """A collective of the program, over all its runs in a step.

    Attributes:
      seconds: for which its links are busy.
      exposed: for which the device waits.
    """

    kind: str
    axes: tuple[str, ...]
    source: str
    count: int
    bytes: int
    asynchronous: bool
    seconds: float
    exposed: float


@dataclasses.dataclass(frozen=True)
class Operation:
    """An instruction that takes time, over all its runs in a step."""

    name: str
    part: str
    count: int
    seconds: float
    flops: float
    bytes: int
    source: str


@dataclasses.dataclass(frozen=True)
class Modelled:
    """A step of one device.

    Attributes:
      parts: seconds bound by compute, by memory, and waiting for each set of axes; they
        add up to `seconds`.
      operations: the most expensive first, collectives included.
      unknown_kernels: kernels whose products the text does not say; their bytes count.
    """

    seconds: float
    flops: float
    parts: dict[str, float]
    exchanges: tuple[Exchange, ...]
    operations: tuple[Operation, ...]
    unknown_kernels: tuple[str, ...]

    def summary(self) -> dict[str, Any]:
        """Returns the figures without the lists, for JSON."""
        done, total, hidden = self.asynchronous()
        return {
            "seconds": self.seconds,
            "parts": self.parts,
            "collectives": total,
            "asynchronous": done,
            "hidden": hidden,
            "flops": self.flops,
        }

    @property
    def network(self) -> float:
        """Seconds of all collectives, one after the other."""
        return sum(exchange.seconds for exchange in self.exchanges)

    @property
    def exposed(self) -> float:
        return sum(exchange.exposed for exchange in self.exchanges)

    def asynchronous(self) -> tuple[int, int, float]:
        """Returns (asynchronous collectives of a step, all of them, seconds hidden)."""
        some = [e for e in self.exchanges if e.asynchronous]
        total = sum(e.count for e in self.exchanges)
        return sum(e.count for e in some), total, self.network - self.exposed


def model_program(
    text: str,
    target: Target,
    sizes: dict[str, int],
    *,
    dcn: Mapping[str, int] | None = None,
) -> Modelled:
    """Models the time of a program.

    Args:
      text: optimized, scheduled HLO text.
      sizes: of the axes of its mesh, the slowest network first, in the order in which
        the program numbers its devices.
      dcn: the part of each axis that crosses slices.
    """
    module = hlo.parse(text)
    devices = module.num_partitions * module.replica_count
    if math.prod(sizes.values()) != devices:
        raise ValueError(
            f"the program is for {devices} devices, but mesh {sizes} has "
            f"{math.prod(sizes.values())}; give the mesh that it was compiled for"
        )
    if "is_scheduled=true" not in module.header:
        raise ValueError(
            "the program is not scheduled, so the order of its instructions means "
            "nothing; pass the text after all optimizations"
        )
    walk = Walk(module, target, sizes, dcn)
    run = walk.run(module.entry)
    walk.check()
    operations = sorted(_operations(module, walk), key=lambda o: -o.seconds)
    return Modelled(
        seconds=run.seconds,
        flops=sum(operation.flops for operation in operations),
        parts=run.parts,
        exchanges=tuple(_exchanges(walk)),
        operations=tuple(operations),
        unknown_kernels=tuple(sorted(walk.reader.unknown_kernels)),
    )


def _operations(module: hlo_text.Module, walk: Walk) -> Iterator[Operation]:
    for (owner, name), cost in walk.costs.items():
        times = walk.times[owner]
        instruction = module.computations[owner].instructions[name]
        yield Operation(
            name,
            cost.part,
            times,
            times * cost.seconds,
            times * cost.work.flops,
            times * cost.work.bytes,
            module.source(instruction) or instruction.op_name(),
        )


def _exchanges(walk: Walk) -> Iterator[Exchange]:
    for key, some in walk.placed.items():
        times, cost = walk.times.get(key[0], 0), walk.costs.get(key)
        for one in some:
            taken = walk.take(one.op)
            if not taken.axes or not times:
                continue
            yield Exchange(
                one.op.kind,
                taken.axes,
                one.op.source or one.op.op_name,
                times,
                times * sum(array.num_bytes for array in one.op.payload),
                bool(one.done),
                times * taken.seconds,
                times * cost.seconds / len(some) if cost else 0.0,
            )
