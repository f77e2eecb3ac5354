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
# Of each part, what constructors set, and the decisions of the last event. By part, so
# that an attribute of another part is not left out because it has the same name.
OTHERS = {
    "state": {
        *("policy", "num_learners", "num_rounds", "decisions", "_leases", "_lags")
    },
    "rule": {"_state"},
    "leases": set(),
    "lags": set(),
}


def take(engine: Engine) -> dict[str, Any]:
    """Returns the state of an engine between two events."""
    parts = _parts(engine).items()
    return {name: get_fields(part, _names(name, part), CLASSES) for name, part in parts}


def put_back(engine: Engine, data: dict[str, Any]) -> None:
    """Gives the state to an engine that was made with the same arguments."""
    for name, part in _parts(engine).items():
        set_fields(part, data.get(name, {}), _names(name, part), CLASSES)


def _parts(engine: Engine) -> dict[str, object]:
    state = engine._state
    return {
        "state": state,
        "rule": engine._rule,
        "leases": state._leases,
        "lags": state._lags,
    }


def _names(name: str, part: object) -> set[str]:
    return set(vars(part)) - OTHERS[name]
