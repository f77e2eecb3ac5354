"""The sharding rules of a config, and errors in terms of its settings."""

import contextlib
import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from ...sharding import Rules, parse_plan
from ...sharding.logical_axes import UnknownState
from ...sharding.resolve import Indivisible, NoRule

if TYPE_CHECKING:
    from .computation import Computation


def make_rules(plan: str, own: Mapping[str, Any]) -> Rules:
    """Returns the rules of a plan, followed by the config's own."""
    result = parse_plan(plan)
    for name, value in own.items():
        by_role = value if isinstance(value, Mapping) else {None: value}
        for role, candidates in by_role.items():
            result += Rules.of({name: candidates}, role=role, plan="config")
    return result


@contextlib.contextmanager
def name_settings(config: "Computation") -> Iterator[None]:
    """Rewrites errors of the sharding library to name the settings to change."""
    try:
        yield
    except NoRule as error:
        raise NoRule(
            f"{error.what}: no rule for logical axis {error.axis!r}. Add one to the "
            f"config: rules={{'{error.axis}': 'tensor'}} shards it over the mesh axis "
            f"tensor, rules={{'{error.axis}': None}} replicates it.",
            what=error.what,
            axis=error.axis,
        ) from None
    except UnknownState as error:
        name = type(config.optimizer).__name__
        raise ValueError(
            f"{error.problem}. Name its dimensions: give {name} an attribute "
            f"state_axes = {error.pattern}, which replicates it."
        ) from None
    except Indivisible as error:
        raise Indivisible(
            _indivisible(config, error),
            what=error.what,
            axis=error.axis,
            size=error.size,
            mesh_axes=error.mesh_axes,
        ) from None


def _indivisible(config: "Computation", error: Indivisible) -> str:
    axes = ",".join(f"{axis}={size}" for axis, size in error.mesh_axes.items())
    problem = f"cannot be sharded {error.ways} ways ({axes})"
    if error.axis in ("batch", "lookup_batch") and config.batch_size % error.size == 0:
        # Of a learner, error.size is a part of its share of the batch.
        learners = getattr(getattr(config, "exchange", None), "learners", 1)
        whole = config.batch_size // learners
        num = max(whole // error.size, config.num_microbatches or 1)
        parts = f" of {learners} learners" if learners > 1 else ""
        parts += f" in {num} microbatches" if num > 1 else ""
        choices = multiples(config.batch_size, error.ways * num * learners)
        fewer = ", change num_microbatches" if num > 1 else ""
        return (
            f"batch_size {config.batch_size}{parts} {problem}. Set batch_size to "
            f"{choices}{fewer}, or change the mesh."
        )
    setting = _setting(config, error)
    row = f"rules={{'{error.axis}': {[*error.mesh_axes][:1] + [None]}}}"
    if len(error.mesh_axes) > 1:
        row = f"rules={{'{error.axis}': {[tuple(error.mesh_axes), None]}}}"
    mesh = f"a mesh whose {' x '.join(error.mesh_axes)} divides {error.size}"
    return (
        f"{error.what}: dimension {error.axis!r} of size {error.size} {problem}. "
        f"{f'{setting}, use' if setting else 'Use'} {mesh}, or set {row} to replicate "
        "it if it is not divisible."
    )


def _setting(config: "Computation", error: Indivisible) -> str:
    """Returns what to do about the setting that determines the dimension's size."""
    model: Any = config.model
    name = getattr(model, "axis_settings", {}).get(error.axis)
    owner, node = "model", model
    if (
        name is None
        and error.axis.endswith("length")
        and hasattr(config.data, "length")
    ):
        owner, node, name = "data", config.data, "length"
    if name is None:
        return ""
    value = getattr(node, name)
    if value == error.size:
        return f"Set {owner}.{name} to {multiples(value, error.ways)}"
    if isinstance(value, int) and error.size % value == 0:  # it is padded to this size
        return f"Set {owner}.{name} to {math.lcm(value, error.ways)}"
    return f"Change {owner}.{name}"


def multiples(size: int, of: int) -> str:
    """Returns the nearest multiples below and above a size, as in "30 or 36"."""
    below = size // of * of
    return " or ".join(str(n) for n in (below, below + of) if n)
