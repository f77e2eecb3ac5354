"""Walks a config: a tree of frozen dataclasses, tuples, lists and dicts.

A path names a value in the tree: `model.num_layers`, `hooks.0.every`. A flat config
maps each path to a plain (JSON) value; a dataclass is represented by its class name.
"""

import dataclasses
import enum
import hashlib
import json
import math
import os
import pathlib
import types
from collections.abc import Iterable, Iterator, Mapping
from typing import Any


class _Absent:
    def __repr__(self) -> str:
        return "(absent)"


ABSENT = _Absent()


@dataclasses.dataclass(frozen=True)
class Change:
    """A path at which two flat configs differ; a missing value is ABSENT."""

    path: str
    old: Any
    new: Any


def is_node(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def label(thing: Any) -> str:
    """Returns the short name of a class or function: `transformer.Config`."""
    if not hasattr(thing, "__qualname__"):
        return str(thing)
    module = thing.__module__.rpartition(".")[2].replace("builtins", "")
    return join(module, thing.__qualname__)


def join(path: str, name: Any) -> str:
    return f"{path}.{name}" if path else str(name)


def init_fields(node: Any) -> list[dataclasses.Field]:
    """Returns the fields that are arguments, not those that `__post_init__` derives."""
    return [field for field in dataclasses.fields(node) if field.init]


def children(value: Any) -> list[tuple[str, Any]]:
    """Returns the named parts of a node, or of a container with a node inside."""
    if is_node(value):
        return [
            (field.name, getattr(value, field.name)) for field in init_fields(value)
        ]
    if isinstance(value, Mapping):
        items = [(str(key), item) for key, item in value.items()]
    elif isinstance(value, list | tuple):
        items = [(str(i), item) for i, item in enumerate(value)]
    else:
        return []
    return items if any(is_node(x) or children(x) for _, x in items) else []


def walk(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yields (path, value) of everything below the root, parents first."""
    for name, child in children(value):
        yield join(path, name), child
        yield from walk(child, join(path, name))


def flatten(config: Any) -> dict[str, Any]:
    """Returns {path: plain value}; a dataclass is represented by its class name."""
    flat = {}
    for path, value in walk(config):
        if is_node(value):
            flat[path] = label(type(value))
        elif not children(value):
            flat[path] = plain(value, path)
    return flat


def at_default(config: Any, path: str = "") -> set[str]:
    """Returns the paths of fields that have the default of their class."""
    paths = set()
    for field in init_fields(config) if is_node(config) else ():
        value, here = getattr(config, field.name), join(path, field.name)
        default = field.default
        if field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        if value == default:
            paths |= {here, *(below for below, _ in walk(value, here))}
        else:
            paths |= at_default(value, here)
    return paths


def plain(value: Any, path: str) -> Any:
    """Converts `value` to a JSON value that is the same in every process."""
    if isinstance(value, enum.Enum):
        return f"{type(value).__name__}.{value.name}"
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else repr(value)
    if isinstance(value, list | tuple):
        return [plain(item, path) for item in value]
    if isinstance(value, set | frozenset):
        return sorted((plain(item, path) for item in value), key=json.dumps)
    if isinstance(value, Mapping):
        return {str(key): plain(item, path) for key, item in value.items()}
    if isinstance(value, type | types.FunctionType | types.BuiltinFunctionType):
        return f"{value.__module__}.{value.__qualname__}"
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if " at 0x" in repr(value):
        raise ValueError(
            f"{path} is of type {label(type(value))}, which prints as a memory address"
            " and cannot be recorded; make it a dataclass or give it a __repr__"
        )
    return repr(value)


def is_below(path: str, names: Iterable[str]) -> bool:
    """Returns whether a path is one of these names, or inside one of them."""
    return any(path == name or path.startswith(f"{name}.") for name in names)


def _canonical(value: Any) -> str:
    def same_number(x: Any) -> Any:
        if isinstance(x, float) and x.is_integer():
            return int(x)
        if isinstance(x, list):
            return [same_number(item) for item in x]
        if isinstance(x, dict):
            return {key: same_number(item) for key, item in x.items()}
        return x

    return json.dumps(same_number(value), sort_keys=True, separators=(",", ":"))


def digest(config: Any) -> str:
    """Returns the SHA-256 of all values, independent of their origin and order."""
    return digest_of(flatten(config))


def digest_of(values: Mapping[str, Any]) -> str:
    """Returns the SHA-256 of a flat config, independent of the order of its values."""
    return hashlib.sha256(_canonical(values).encode()).hexdigest()


def origin_of(path: str, origins: Mapping[str, str]) -> str:
    """Returns the origin of `path`, or of its nearest parent that has one."""
    while path and path not in origins:
        path = path.rpartition(".")[0]
    return origins.get(path, "default")


def to_json(config: Any, origins: Mapping[str, str]) -> dict[str, Any]:
    """Returns the contents of `config.json` in a run folder."""
    values = {
        path: {"value": value, "origin": origin_of(path, origins)}
        for path, value in flatten(config).items()
    }
    return {"digest": digest(config), "values": values}


def read_run(folder: str | os.PathLike) -> dict[str, Any]:
    """Returns the flat config recorded in the `config.json` of a run folder."""
    path = pathlib.Path(folder) / "config.json"
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))["values"]
        return {name: entry["value"] for name, entry in entries.items()}
    except OSError as error:
        raise ValueError(
            f"{path} cannot be read ({error.strerror}); expected a folder written by"
            " `meshloom train`; name another folder"
        ) from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f'{path} is not a recorded config; expected JSON with "values", each with'
            ' a "value"; name another run folder'
        ) from error


def diff(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[Change]:
    """Returns the paths at which two flat configs differ, in the order of `old`."""
    changes = []
    for path in dict.fromkeys([*old, *new]):
        a, b = old.get(path, ABSENT), new.get(path, ABSENT)
        if a is ABSENT or b is ABSENT or _canonical(a) != _canonical(b):
            changes.append(Change(path, a, b))
    return changes


def format_diff(changes: Iterable[Change]) -> str:
    """Formats changes as aligned lines: `path  old -> new`."""
    changes = list(changes)
    width = max((len(change.path) for change in changes), default=0)
    return "\n".join(f"{c.path:<{width}}  {c.old!r} -> {c.new!r}" for c in changes)


def show(config: Any, origins: Mapping[str, str]) -> str:
    """Formats the complete config as aligned lines: `path = value  # origin`."""
    nodes = {path for path, value in walk(config) if is_node(value)}
    rows = [
        (path, value if path in nodes else repr(value), origin_of(path, origins))
        for path, value in flatten(config).items()
    ]
    left = max((len(path) for path, _, _ in rows), default=0)
    # One very long value must not push all origins out of view.
    right = max((len(value) for _, value, _ in rows if len(value) <= 40), default=0)
    return "\n".join(f"{p:<{left}} = {v:<{right}}  # {o}" for p, v, o in rows)
