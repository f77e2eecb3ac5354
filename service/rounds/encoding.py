"""Python values as JSON, and back: for what is kept of an engine and of its job.

A list stays a list. Everything else that JSON does not have is an object with one
field, which names its type: {"tuple": [...]}, {"dict": [[key, value], ...]},
{"float": "nan"}, or the name of a dataclass with its fields. Nothing is ever executed,
unlike with pickle.

Long lists of numbers, such as those of all commits, are written as runs of numbers with
the same distance: {"runs": [[first, distance, count], ...]}.
"""

import collections
import dataclasses
import math
from collections.abc import Iterable, Mapping
from typing import Any

LONG = 16  # a list of more numbers than this is written as runs
Classes = Mapping[str, type]


def encode(value: Any, classes: Classes) -> Any:
    """Returns what `json.dumps` takes.

    Args:
      classes: the dataclasses that may occur, by name.
    """
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": repr(value)}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if dataclasses.is_dataclass(value) and type(value).__name__ in classes:
        fields = dataclasses.fields(value)
        rows = {f.name: encode(getattr(value, f.name), classes) for f in fields}
        return {type(value).__name__: rows}
    if isinstance(value, Mapping):
        kind = "Counter" if isinstance(value, collections.Counter) else "dict"
        return {kind: [[encode(x, classes) for x in pair] for pair in value.items()]}
    if isinstance(value, list):
        if len(value) > LONG and all(type(item) is int for item in value):
            return {"runs": _runs(value)}
        return [encode(item, classes) for item in value]
    if isinstance(value, collections.deque):
        return {"deque": [value.maxlen, [encode(item, classes) for item in value]]}
    if isinstance(value, tuple):
        return {"tuple": [encode(item, classes) for item in value]}
    if isinstance(value, set):
        return {"set": [encode(item, classes) for item in sorted(value)]}
    raise TypeError(f"{type(value).__name__} cannot be encoded: {value!r}")


def decode(data: Any, classes: Classes) -> Any:
    """Returns the value that `encode` was given; a ValueError for anything else."""
    if isinstance(data, list):
        return [decode(item, classes) for item in data]
    if not isinstance(data, dict):
        return data
    if len(data) != 1:
        raise ValueError(f"expected an object with one field, got {sorted(data)}")
    ((kind, body),) = data.items()
    if kind in classes:
        return _dataclass(classes[kind], body, classes)
    if kind == "runs":
        return [first + i * step for first, step, count in body for i in range(count)]
    if kind == "deque":
        maxlen, items = body
        return collections.deque(decode(items, classes), maxlen)
    if kind == "float":
        return float(body)
    if kind not in ("dict", "Counter", "tuple", "set"):
        raise ValueError(f"{kind!r} is of no known type")
    items = decode(body, classes)
    if kind in ("dict", "Counter"):
        found = {key: value for key, value in items}
        return found if kind == "dict" else collections.Counter(found)
    return tuple(items) if kind == "tuple" else set(items)


def get_fields(
    target: object, names: Iterable[str], classes: Classes
) -> dict[str, Any]:
    """Returns attributes of an object, encoded."""
    return {name: encode(getattr(target, name), classes) for name in names}


def set_fields(
    target: object, data: Mapping[str, Any], names: Iterable[str], classes: Classes
) -> None:
    """Sets the attributes that `get_fields` returned; refuses others."""
    _check(type(target), set(names), data)
    for name, value in data.items():
        setattr(target, name, decode(value, classes))


def _dataclass(cls: type, body: Mapping[str, Any], classes: Classes) -> Any:
    assert dataclasses.is_dataclass(cls), cls
    _check(cls, {field.name for field in dataclasses.fields(cls)}, body)
    return cls(**{name: decode(value, classes) for name, value in body.items()})


def _check(cls: type, names: set[str], data: Mapping[str, Any]) -> None:
    if wrong := names ^ set(data):
        raise ValueError(
            f"{cls.__name__}: {sorted(wrong)} are missing or unknown. Was this written "
            "by another version of meshloom?"
        )


def _runs(numbers: list[int]) -> list[list[int]]:
    runs: list[list[int]] = []  # first, distance, count
    for number in numbers:
        if runs:
            first, distance, count = runs[-1]
            if count == 1:
                runs[-1] = [first, number - first, 2]
                continue
            if number == first + distance * count:
                runs[-1][2] += 1
                continue
        runs.append([number, 0, 1])
    return runs
