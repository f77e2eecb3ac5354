"""The state of an engine as JSON, and back.

An engine that is put back goes on like the one that has seen all events. Everything
that its parts remember is in the snapshot, whatever attributes they have.
"""

from typing import Any

from .encoding import get_fields, set_fields
from .engine import Engine
from .events import Contributed
from .independent import Group
from .state import Member

CLASSES = {cls.__name__: cls for cls in (Member, Group, Contributed)}
# What the constructors set, and the decisions of the last event.
OTHERS = {
    *("policy", "num_learners", "num_rounds", "decisions"),
    *("_leases", "_lags", "_state"),
}


def take(engine: Engine) -> dict[str, Any]:
    """Returns the state of an engine between two events."""
    parts = _parts(engine).items()
    return {name: get_fields(part, _names(part), CLASSES) for name, part in parts}


def put_back(engine: Engine, data: dict[str, Any]) -> None:
    """Gives the state to an engine that was made with the same arguments."""
    for name, part in _parts(engine).items():
        set_fields(part, data.get(name, {}), _names(part), CLASSES)


def _parts(engine: Engine) -> dict[str, object]:
    state = engine._state
    return {
        "state": state,
        "rule": engine._rule,
        "leases": state._leases,
        "lags": state._lags,
    }


def _names(part: object) -> set[str]:
    return set(vars(part)) - OTHERS
