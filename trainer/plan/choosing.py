"""What a config leaves open, chosen for the devices: rules, schedule, microbatches.

`plan="auto"`, `pipeline.schedule="auto"`, `pipeline.gather="auto"` and numbers that are
None are open. Every way to fill them is planned by the closed form, and of those that
fit

  sequence      goes with a tensor axis that divides the positions: least memory, and
                most of its gathers run beside products, as no sum over devices does
  microbatches  are as few as fit; in a pipeline the number belongs to the schedule
  the others    are those of least memory within CLOSE of the fastest, and of those as
                lean the fastest. A config with full remat pays time for memory: there
                they may cost PRICE

What is set in the config is never changed. Only published figures of the devices count,
nothing measured, so that all processes of a job choose the same. Where these are not
known, and on CPUs, whose devices share cores and memory, the plain settings are taken.
"""

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ...sharding.plans import AUTO, STANDARD, WITH_SEQUENCE
from ...sharding.text import human_bytes
from ..program import contract
from ..program.computation import Chosen, plain
from ..program.hardware import CPU, Target
from ..program.pipelining import Pipelining
from .local_target import published_target
from .predict import Plan
from .scenario import Case, make_case
from .searching.candidates import divisors, gathers_on
from .text import seconds_text

if TYPE_CHECKING:
    from ..run.train import Config

# The closed form of memory is up to a tenth off; differences of 2 % in time are none.
ROOM, AS_LEAN, CLOSE = 0.9, 1.1, 1.02
# Full remat computes a quarter to a third more; half of that is memory worth to it.
PRICE = 1.15
# In a pipeline with more microbatches than this for each stage the bubble is small.
MOST_FOR_EACH_STAGE = 16


def choose(
    config: "Config", sizes: Mapping[str, int], target: Target | None, reason: str = ""
) -> Chosen:
    """Fills what a config leaves open.

    Args:
      sizes: of the axes of its mesh.
      target: the devices of the mesh; None where their figures are not known, for
        `reason`.
    """
    if not _open(config, sizes):
        return Chosen(config, plain(config))
    if target is None or target.device.platform == CPU:
        why = reason or "on CPUs nothing is compared"
        return _plainly(config, sizes, f"the plain settings, {why}")
    if not hasattr(config.model, "costs"):
        name = type(config.model).__name__
        return _plainly(
            config, sizes, f"the plain settings, {name} has no method `costs`"
        )
    try:
        found = list(_candidates(config, target, sizes))
    except Exception as error:  # of a user's `costs` too: no choice is worth a run
        first = str(error).split("\n")[0].split(". ")[0]
        return _plainly(config, sizes, f"the plain settings: {first}")
    if not found:  # the run itself will say what is wrong
        return Chosen(config, plain(config))
    best, why = _best(found, target, getattr(config.model, "remat", None))
    words = _words(config, best.config, sizes)
    step = seconds_text(best.roofline.step)
    figures = f"{human_bytes(best.memory.peak)} of a device and {step} a step"
    line = f"Chosen: {words}: {figures} by the closed form, {why}"
    return Chosen(config, best.config, line if words else "")


def choose_here(
    config: "Config", sizes: Mapping[str, int], devices: Sequence[Any]
) -> Chosen:
    """Fills what the config leaves open, by what is known of the devices."""
    try:
        target = published_target(devices)
        if target.num_devices != math.prod(sizes.values()):
            raise ValueError(f"the mesh is not that of the {len(devices)} devices here")
    except ValueError as error:
        is_cpu = devices[0].platform == "cpu"
        return choose(config, sizes, None, "" if is_cpu else str(error))
    return choose(config, sizes, target)


def _plainly(config: "Config", sizes: Mapping[str, int], why: str) -> Chosen:
    found = plain(config)
    # Where the mesh has one device along these, there is nothing that could be other.
    if sizes["tensor"] == 1 and sizes["pipe"] == 1:
        return Chosen(config, found)
    return Chosen(config, found, f"Chosen: {_words(config, found, sizes)}: {why}")


def _open(config: "Config", sizes: Mapping[str, int]) -> bool:
    """Whether anything that matters on this mesh is left to be chosen."""
    pipeline = config.pipeline
    staged = AUTO in (pipeline.schedule, pipeline.gather) or (
        pipeline.schedule == "interleaved" and pipeline.num_chunks is None
    )
    return (
        config.num_microbatches is None
        or (config.plan == AUTO and sizes["tensor"] > 1)
        or (sizes["pipe"] > 1 and staged)
    )


def _candidates(
    config: "Config", target: Target, sizes: Mapping[str, int]
) -> Iterator[Plan]:
    """Every way to fill what is open that the model and the mesh allow."""
    plans = [config.plan]
    if config.plan == AUTO:
        plans = [WITH_SEQUENCE, STANDARD] if sizes["tensor"] > 1 else [STANDARD]
    for name in plans:
        config = dataclasses.replace(config, plan=name)
        try:
            whole = dataclasses.replace(
                plain(config), num_microbatches=config.num_microbatches or 1
            )
            case = make_case(whole, target)
        except ValueError:  # such as a length that the tensor axis does not divide
            continue
        each = config.batch_size // case.ways(("batch",), (config.batch_size,))
        if case.pipeline is None:
            yield from _in_parts(config, target, each)
        else:
            yield from _staged(config, target, each, case)
        return


def _in_parts(config: "Config", target: Target, each: int) -> Iterator[Plan]:
    """Without a pipeline: in as few parts as fit, or all where none does."""
    for num in _counts(config, each):
        found = Plan(make_case(_with(plain(config), num), target))
        yield found
        if _has_room(found):
            return


def _staged(config: "Config", target: Target, each: int, case: Case) -> Iterator[Plan]:
    counts = _counts(config, each, MOST_FOR_EACH_STAGE * case.num_stages)
    gathers = gathers_on(target, config.pipeline)
    for pipeline in _pipelines(config.pipeline, case.layers, gathers):
        for num in counts:
            changed = dataclasses.replace(_with(config, num), pipeline=pipeline)
            yield Plan(make_case(changed, target))


def _pipelines(
    given: Pipelining, layers: int, gathers: Sequence[str]
) -> list[Pipelining]:
    """The settings that are open, in every way; gpipe is never better than 1f1b."""
    chunks: list[int | None] = [n for n in divisors(layers) if n > 1]
    if given.num_chunks is not None:
        chunks = [given.num_chunks] if given.num_chunks > 1 else []
    schedules: list[tuple[str, int | None]] = [("interleaved", n) for n in chunks]
    if given.schedule not in ("interleaved", AUTO):
        schedules = [(given.schedule, given.num_chunks)]
    elif given.schedule == AUTO and given.num_chunks in (None, 1):
        schedules.insert(0, ("1f1b", None))
    return [
        Pipelining(schedule=name, num_chunks=num, gather=gather)
        for gather in gathers
        for name, num in schedules
    ]


def _counts(config: "Config", each: int, most: int | None = None) -> list[int]:
    if config.num_microbatches is not None:
        return [config.num_microbatches]
    if contract.has_variables(config.model):
        return [1]  # a batch norm computes something else by microbatch
    return [n for n in divisors(each) if most is None or n <= most]


def _with(config: "Config", num_microbatches: int) -> "Config":
    return dataclasses.replace(config, num_microbatches=num_microbatches)


def _has_room(plan: Plan) -> bool:
    return _peak(plan) <= ROOM * plan.target.device.usable


def _best(found: list[Plan], target: Target, remat: Any) -> tuple[Plan, str]:
    """The plan to take, and why; equal ones by the order in which they were found."""
    share = f"{ROOM:.0%} of {human_bytes(target.device.usable)}"
    fitting = [plan for plan in found if _has_room(plan)]
    if not fitting:
        return min(found, key=_peak), (
            f"the leanest of {len(found)}: none takes less than {share}"
        )
    fastest = min(fitting, key=_seconds)
    price = PRICE if remat == "full" else CLOSE
    paid = [p for p in fitting if _seconds(p) <= price * _seconds(fastest)]
    lean = [p for p in paid if _peak(p) <= AS_LEAN * min(map(_peak, paid))]
    best = min(lean, key=_seconds)
    many = f"{len(fitting)} within {share}"
    if len(fitting) == 1:
        return best, f"within {share}"
    if best is fastest:
        return best, f"the fastest of {many}"
    why = ", since remat is full" if _seconds(best) > CLOSE * _seconds(fastest) else ""
    return best, (
        f"{_seconds(best) / _seconds(fastest) - 1:.0%} slower than the fastest of "
        f"{many} and {human_bytes(_peak(fastest) - _peak(best))} less{why}"
    )


def _seconds(plan: Plan) -> float:
    return plan.roofline.step


def _peak(plan: Plan) -> int:
    return plan.memory.peak


def _words(config: "Config", chosen: "Config", sizes: Mapping[str, int]) -> str:
    """What of the chosen values was open, as far as it matters on the mesh."""
    words = []
    given, found = config.pipeline, chosen.pipeline
    if config.plan == AUTO:
        words.append(f"plan {chosen.plan}")
    if sizes["pipe"] > 1:
        if (given.schedule, given.num_chunks) != (found.schedule, found.num_chunks):
            chunks = f" of {found.num_chunks} chunks" if found.num_chunks else ""
            words.append(f"{found.schedule}{chunks}")
        if given.gather == AUTO:
            words.append(f"weights gathered once a {found.gather}")
    num = chosen.num_microbatches
    if config.num_microbatches is None and num is not None:
        if num > 1 or sizes["pipe"] > 1:
            words.append(f"{num} microbatches")
    if sizes["tensor"] == 1 and sizes["pipe"] == 1 and num in (None, 1):
        return ""
    return ", ".join(words)
