"""Chooses what a config leaves open: sharding plan, schedule, microbatches.

`plan="auto"`, `pipeline.schedule="auto"`, `pipeline.gather="auto"` and numbers that are
None are open. Every way to fill them is forecast by the closed form. Of those that fit:

  sequence      goes with a tensor axis that divides the positions: it takes the least
                memory, and most of its gathers overlap with products, as sums over
                devices do not
  head          in blocks of tokens is compared where its logits are the peak
  microbatches  are as few as fit; in a pipeline the number belongs to the schedule
  the others    take the least memory within CLOSE of the fastest, and of those that
                are AS_LEAN the fastest wins. A config with full remat trades time for
                memory: there they may cost PRICE

What the config sets is never changed. Only published figures of the devices count,
nothing measured, so all processes of a job choose the same. On devices without such
figures, and on CPUs, whose devices share cores and memory, the plain settings are used.
"""

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ...sharding.pipeline.simulate import GATHERS
from ...sharding.plans import AUTO
from ...sharding.text import human_bytes, seconds_text
from ..program import contract
from ..program.computation import Chosen, plain
from ..program.hardware import CPU, Target
from .local_target import published_target
from .predict import Forecast
from .scenario import Case, make_case
from .searching.candidates import (
    Choice,
    choices_on,
    first_divided,
    in_blocks,
    is_head_open,
)

if TYPE_CHECKING:
    from ..run.train import Config

# The closed form of memory is up to 10 % off; 2 % of a step's time is not a difference.
ROOM, AS_LEAN, CLOSE = 0.9, 1.1, 1.02
# Full remat adds 25 to 33 % of compute; half of that may be spent on memory again.
PRICE = 1.15
# With this many microbatches for each stage of a pipeline the bubble is small.
MOST_FOR_EACH_STAGE = 16


def choose(
    config: "Config", sizes: Mapping[str, int], target: Target | None, reason: str = ""
) -> Chosen:
    """Fills what a config leaves open.

    Args:
      sizes: of the axes of its mesh.
      target: the devices of the mesh; None where their figures are not known, and
        `reason` says why.
    """
    if not _open(config, sizes):
        return Chosen(config, plain(config))
    if target is None or target.device.platform == CPU:
        return _plainly(config, sizes, f", {reason or 'on CPUs nothing is compared'}")
    if not hasattr(config.model, "costs"):
        name = type(config.model).__name__
        return _plainly(config, sizes, f", {name} has no method `costs`")
    try:
        found = list(_candidates(config, target))
    except Exception as error:  # also from a user's `costs`: a run must go on
        return _plainly(config, sizes, f": {first_sentence(error)}")
    if not found:  # the run itself reports what is wrong
        return Chosen(config, plain(config))
    best, why = _best(found, target, getattr(config.model, "remat", None))
    if not (words := _words(config, best.config, sizes)):
        return Chosen(config, best.config)
    memory, step = human_bytes(best.memory.peak), seconds_text(best.roofline.step)
    figures = f"{memory} of a device and {step} a step by the closed form"
    return Chosen(config, best.config, f"Chosen: {words}: {figures}, {why}")


def choose_here(
    config: "Config", sizes: Mapping[str, int], devices: Sequence[Any]
) -> Chosen:
    """Fills what the config leaves open, by what is known of the devices."""
    try:
        target = published_target(devices)
        if target.num_devices != math.prod(sizes.values()):
            raise ValueError(f"the mesh does not have the {len(devices)} devices here")
    except ValueError as error:
        is_cpu = devices[0].platform == "cpu"
        return choose(config, sizes, None, "" if is_cpu else str(error))
    return choose(config, sizes, target)


def first_sentence(error: Exception) -> str:
    return str(error).split("\n")[0].split(". ")[0]


def _plainly(config: "Config", sizes: Mapping[str, int], why: str) -> Chosen:
    found = plain(config)
    # With one device along both axes there is nothing to choose.
    if sizes["tensor"] == 1 and sizes["pipe"] == 1:
        return Chosen(config, found)
    if not (words := _words(config, found, sizes)):
        return Chosen(config, found)
    return Chosen(config, found, f"Chosen: {words}: the plain settings{why}")


def _open(config: "Config", sizes: Mapping[str, int]) -> bool:
    """Returns whether anything that matters on this mesh is open."""
    pipeline = config.pipeline
    staged = AUTO in (pipeline.schedule, pipeline.gather) or (
        pipeline.schedule == "interleaved" and pipeline.num_chunks is None
    )
    return (
        config.num_microbatches is None
        or is_head_open(config)
        or (config.plan == AUTO and sizes["tensor"] > 1)
        or (sizes["pipe"] > 1 and staged)
    )


def _candidates(config: "Config", target: Target) -> Iterator[Forecast]:
    """Yields every way to fill what is open that the model and the mesh allow."""
    whole = dataclasses.replace(
        plain(config), plan=config.plan, num_microbatches=config.num_microbatches or 1
    )
    # A ValueError: for instance, a length that the tensor axis does not divide.
    case = first_divided(whole, target, ValueError)
    if case is None:
        return
    for choice in _choices(config, case):
        found = Forecast(make_case(choice.of(case.config), target))
        blocks = in_blocks(choice, found)
        each = [found, *(forecast for _, forecast in blocks)]
        yield from each
        if case.pipeline is None and any(map(_has_room, each)):
            return  # as few microbatches as fit, or all where none does


def _choices(config: "Config", case: Case) -> list[Choice]:
    """Returns the choices of a search that keep what the config sets."""
    given, num = config.pipeline, config.num_microbatches
    # gpipe never beats 1f1b, and a batch norm depends on the size of a microbatch.
    schedules = ("", "1f1b", "interleaved")
    if given.schedule != AUTO and case.pipeline is not None:
        schedules = (given.schedule,)
    most = MOST_FOR_EACH_STAGE * case.num_stages if case.pipeline else math.inf
    most = 1 if contract.has_variables(config.model) else most
    found = [
        choice
        for choice in choices_on(config, case)
        if choice.remat == getattr(config.model, "remat", None)
        and choice.schedule in schedules
        and (case.pipeline is None or given.num_chunks in (None, choice.num_chunks))
        and (num or choice.num_microbatches) == choice.num_microbatches
        and (num is not None or choice.num_microbatches <= most)
    ]
    return sorted(found, key=lambda choice: GATHERS.index(choice.gather))


def _has_room(found: Forecast) -> bool:
    return _peak(found) <= ROOM * found.target.device.usable


def _best(found: list[Forecast], target: Target, remat: Any) -> tuple[Forecast, str]:
    """Returns the one to take, and why; of equal ones the first that was found."""
    share = f"{ROOM:.0%} of {human_bytes(target.device.usable)}"
    fitting = [one for one in found if _has_room(one)]
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


def _seconds(found: Forecast) -> float:
    return found.roofline.step


def _peak(found: Forecast) -> int:
    return found.memory.peak


def _words(config: "Config", chosen: "Config", sizes: Mapping[str, int]) -> str:
    """Names the chosen values that were open, as far as they matter on the mesh."""
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
    block: int | None = getattr(chosen.model, "head_block", None)
    if is_head_open(config) and block:
        words.append(f"logits of {block} tokens at a time")
    elif sizes["tensor"] == 1 and sizes["pipe"] == 1 and num in (None, 1):
        return ""
    return ", ".join(words)
