"""The spec of a job: what every learner of it must agree on.

The first learner opens the job with its spec, and every other one must bring the same.
"""

import dataclasses
import json
import re
from collections.abc import Mapping
from typing import Any

from ..blocks.layout import Layout
from ..blocks.tables import Table
from ..rounds.plateau import StopRule
from ..rounds.policy import Policy
from ..wire.errors import Refused

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
FIELDS = (
    *("job", "policy", "num_learners", "num_rounds", "layout", "update"),
    *("max_grad_norm", "skip_grad_norm", "compression", "copies", "data", "stop"),
    *("config_digest", "version"),
)


@dataclasses.dataclass(frozen=True)
class JobSpec:
    """A spec that was checked; `message` is the JSON object it was made from."""

    job: str
    policy: Policy
    num_learners: int
    num_rounds: int
    layout: Layout
    copies: int
    max_grad_norm: float | None
    skip_grad_norm: float | None
    stop: StopRule | None
    message: dict[str, Any]
    tables: tuple[Table, ...] = ()


def parse_spec(message: Mapping[str, Any], version: str) -> JobSpec:
    """Checks a spec that a learner sent.

    Args:
      version: of this service; the versions of all parts must be equal.
    """
    if missing := [name for name in FIELDS if name not in message]:
        raise Refused(
            f"the spec of the job has no {missing[0]!r}; expected the fields "
            f"{', '.join(FIELDS)}"
        )
    name = message["job"]
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise Refused(
            f"job name {name!r}: expected letters, digits, '.', '_' and '-', because "
            "it is also the name of a folder"
        )
    if message["version"] != version:
        raise Refused(
            f"job {name!r}: the learner runs meshloom {message['version']}, the "
            f"service {version}. Install the same version on both."
        )
    for field in ("num_learners", "num_rounds"):
        if not _is_count(message[field]):
            raise Refused(
                f"job {name!r}: {field} is {message[field]!r}, expected a whole "
                "number >= 1"
            )
    if message["copies"] not in (1, 2) or isinstance(message["copies"], bool):
        raise Refused(f"job {name!r}: copies is {message['copies']!r}, expected 1 or 2")
    if message["copies"] > 1 and message.get("tables"):
        raise Refused(
            f"job {name!r}: copies is {message['copies']}, and the job has tables, "
            "whose rows have one copy each. Set copies to 1"
        )
    return JobSpec(
        job=name,
        policy=_policy(name, message),
        num_learners=message["num_learners"],
        num_rounds=message["num_rounds"],
        layout=_layout(name, message),
        copies=message["copies"],
        max_grad_norm=message["max_grad_norm"],
        skip_grad_norm=message["skip_grad_norm"],
        stop=_stop(name, message),
        message={field: message[field] for field in FIELDS}
        | {"tables": message.get("tables", [])},
        tables=_tables(name, message),
    )


def check_same(spec: JobSpec, other: JobSpec) -> None:
    """Refuses the spec `other` if it differs from the one that opened the job."""
    job = f"job {spec.job!r}"
    ours, theirs = _leaves(spec.layout), _leaves(other.layout)
    for path in [*ours, *theirs]:
        if ours.get(path) != theirs.get(path):
            raise Refused(
                f"{job} has another model: {path} is {theirs.get(path, 'missing')} at "
                f"this learner, {ours.get(path, 'missing')} in the job. Use the same "
                "model, or another job name."
            )
    for field in (*FIELDS, "tables"):
        first, second = spec.message[field], other.message[field]
        if first != second:
            where, first, second = _first_difference(field, first, second)
            raise Refused(
                f"{job} has another {_NOUNS.get(field, field)}: {where} is "
                f"{_short(second)} at this learner, {_short(first)} in the job. Use "
                "the same settings, or another job name."
            )


_NOUNS = {
    "config_digest": "config",
    "layout": "block layout",
    "stop": "rule for stopping early",
}


def _policy(name: str, message: Mapping[str, Any]) -> Policy:
    try:
        policy = Policy.from_json(message["policy"])
        policy.check_learners(message["num_learners"])
    except ValueError as error:
        raise Refused(f"job {name!r}: {error}") from error
    return policy


def _stop(name: str, message: Mapping[str, Any]) -> StopRule | None:
    if message["stop"] is None:
        return None
    if not isinstance(message["stop"], Mapping):
        raise Refused(f"job {name!r}: stop is {message['stop']!r}, expected an object")
    try:
        return StopRule.from_json(message["stop"])
    except ValueError as error:
        raise Refused(f"job {name!r}: {error}") from error


def _layout(name: str, message: Mapping[str, Any]) -> Layout:
    try:
        return Layout.from_json(message["layout"])
    except ValueError as error:
        raise Refused(f"job {name!r}: {error}") from error


def _tables(name: str, message: Mapping[str, Any]) -> tuple[Table, ...]:
    try:
        tables = tuple(map(Table.from_json, message.get("tables", ())))
    except (TypeError, ValueError) as error:
        raise Refused(f"job {name!r}: {error}") from error
    names = [table.name for table in tables]
    paths = [leaf[0] for leaf in message["layout"]["leaves"]]
    if twice := [n for n in names if [*names, *paths].count(n) > 1]:
        raise Refused(f"job {name!r}: two arrays have the name {twice[0]!r}")
    return tables


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _leaves(layout: Layout) -> dict[str, str]:
    return {leaf.path: f"{leaf.dtype}{list(leaf.shape)}" for leaf in layout.leaves}


def _first_difference(where: str, first: Any, second: Any) -> tuple[str, Any, Any]:
    """Descends into objects to the first field that differs."""
    if isinstance(first, dict) and isinstance(second, dict):
        for key in dict.fromkeys([*first, *second]):
            if first.get(key) != second.get(key):
                name = f"{where}.{key}"
                return _first_difference(name, first.get(key), second.get(key))
    return where, first, second


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
