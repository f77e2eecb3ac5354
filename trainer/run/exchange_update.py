"""The trainer's own optimizers as the servers run them, sent by name and values.

A server never imports what a learner names: it knows the optimizers and schedules of
this package, and refuses any other by name.
"""

import dataclasses
from typing import Any

from ...service.server.update import OptaxUpdate, Update
from ..program import optimizers, schedules
from ..program.schedules import make_rate

OPTIMIZERS = {
    kind.__name__: kind
    for kind in (
        optimizers.AdamW,
        optimizers.Lion,
        optimizers.Adafactor,
        optimizers.Muon,
    )
}
SCHEDULES = {
    kind.__name__: kind
    for kind in (
        schedules.Constant,
        schedules.WarmupCosine,
        schedules.WarmupStableDecay,
    )
}


def update_spec(config: Any) -> dict[str, Any]:
    """Returns what the servers of a job compute, as JSON.

    Args:
      config: of the run; its exchange decides who runs the optimizer.
    """
    if config.exchange.policy.outer is not None:
        return {"kind": "outer"}
    return {
        "kind": "optimizer",
        "optimizer": _to_json(config.optimizer, OPTIMIZERS, "optimizer"),
        "schedule": _to_json(config.schedule, SCHEDULES, "schedule"),
        "num_steps": config.num_steps,
    }


def make_update(spec: dict[str, Any]) -> Update:
    """Returns the update that `update_spec` describes."""
    optimizer = _from_json(spec["optimizer"], OPTIMIZERS, "optimizer")
    schedule = _from_json(spec["schedule"], SCHEDULES, "schedule")
    rate = make_rate(schedule, spec["num_steps"])
    return OptaxUpdate(optimizer.make, rate)  # type: ignore


def _to_json(node: Any, known: dict[str, type], what: str) -> dict[str, Any]:
    name = type(node).__name__
    if known.get(name) is not type(node):
        raise ValueError(
            f"{what} {name} cannot run on the servers, which know "
            f"{', '.join(known)}. Choose one of these, or a mode in which learners run "
            "their own, such as diloco."
        )
    return {"name": name, **dataclasses.asdict(node)}


def _from_json(data: dict[str, Any], known: dict[str, type], what: str) -> Any:
    values = dict(data)
    name = values.pop("name", None)
    if name not in known:
        raise ValueError(
            f"{what} {name!r} is not one that this server knows: {', '.join(known)}"
        )
    return known[name](**values)
