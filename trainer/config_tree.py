"""Walks a config: a tree of frozen dataclasses, tuples, lists and dicts.

A path names a place in the tree: `model.num_layers`, `hooks.0.every`. A flat config
maps each path to a plain (JSON) value; a dataclass stands in it as its class name.
"""

import collections
import dataclasses
import enum
import hashlib
import json
import math
import os
import pathlib
import re
import sys
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any


class _Absent:
    def __repr__(self) -> str:
        return "(absent)"


ABSENT = _Absent()


@dataclasses.dataclass(frozen=True)
class Change:
    """One path at which two flat configs differ; a missing side is ABSENT."""

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
    """Fields that are arguments; what `__post_init__` derives is not configuration."""
    return [field for field in dataclasses.fields(node) if field.init]


def children(value: Any) -> list[tuple[str, Any]]:
    """Named parts of a node, or of a container that holds a node somewhere."""
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
    """Yields (path, value) of every place below the root, parents first."""
    for name, child in children(value):
        yield join(path, name), child
        yield from walk(child, join(path, name))


def flatten(config: Any) -> dict[str, Any]:
    """Returns {path: plain value}; a dataclass appears as its class name."""
    flat = {}
    for path, value in walk(config):
        if is_node(value):
            flat[path] = label(type(value))
        elif not children(value):
            flat[path] = plain(value, path)
    return flat


def plain(value: Any, path: str) -> Any:
    """Returns `value` as JSON can hold it, the same in every process."""
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
            f"{path} holds {label(type(value))}, which prints as a memory address and"
            " cannot be recorded; make it a dataclass or give it a __repr__"
        )
    return repr(value)


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
    """Returns the sha256 of all values, whatever their origin or order."""
    return hashlib.sha256(_canonical(flatten(config)).encode()).hexdigest()


def origin_of(path: str, origins: Mapping[str, str]) -> str:
    """Returns the origin of `path`, or of the nearest place that it is a part of."""
    while path and path not in origins:
        path = path.rpartition(".")[0]
    return origins.get(path, "default")


def to_json(config: Any, origins: Mapping[str, str]) -> dict[str, Any]:
    """Returns what `config.json` of a run folder holds."""
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
            f"{path} cannot be read ({error.strerror}); expected a folder that"
            " `meshloom train` has written; name another folder"
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
    """Returns one aligned line a change: `path  old -> new`."""
    changes = list(changes)
    width = max((len(change.path) for change in changes), default=0)
    return "\n".join(f"{c.path:<{width}}  {c.old!r} -> {c.new!r}" for c in changes)


def show(config: Any, origins: Mapping[str, str]) -> str:
    """Returns aligned lines `path = value  # origin` of the complete config."""
    nodes = {path for path, value in walk(config) if is_node(value)}
    rows = [
        (path, value if path in nodes else repr(value), origin_of(path, origins))
        for path, value in flatten(config).items()
    ]
    left = max((len(path) for path, _, _ in rows), default=0)
    # One very long value must not push every origin out of sight.
    right = max((len(value) for _, value, _ in rows if len(value) <= 40), default=0)
    return "\n".join(f"{p:<{left}} = {v:<{right}}  # {o}" for p, v, o in rows)


def conform(value: Any, annotation: Any) -> Any:
    """Returns `value` as `annotation` wants it, or raises TypeError.

    An int is made a float where a float is wanted, and a list a tuple. Nothing else
    is converted: a bool is not an int.
    """
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if annotation in (Any, object) or isinstance(annotation, typing.TypeVar):
        return value
    if annotation is None or annotation is type(None):
        return _require(value, value is None)
    if isinstance(annotation, typing.NewType):
        return conform(value, annotation.__supertype__)
    if origin is typing.Annotated:
        return conform(value, args[0])
    if origin in (typing.Union, types.UnionType):
        return _conform_union(value, args)
    if origin is typing.Literal:
        same = (type(value) is type(arg) and value == arg for arg in args)
        return _require(value, any(same))
    kind = origin or annotation
    if kind is Callable:
        return _require(value, callable(value))
    if kind is type:
        return _require(value, isinstance(value, type))
    if isinstance(value, type):
        raise TypeError
    if kind is tuple:
        return _conform_tuple(value, args)
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if getattr(kind, "_is_protocol", False):
        return _require(value, all(hasattr(value, x) for x in members(kind)))
    _require(value, isinstance(value, kind))
    _require(value, not (isinstance(value, bool) and kind is int))
    if isinstance(value, Mapping) and len(args) == 2:
        pairs = ((conform(k, args[0]), conform(v, args[1])) for k, v in value.items())
        return dict(pairs) if type(value) is dict else value
    if isinstance(value, str):
        return _require(value, kind is not Sequence)
    if isinstance(value, list | tuple) and len(args) == 1:
        return type(value)(conform(item, args[0]) for item in value)
    return value


def _require(value: Any, fits: bool) -> Any:
    if not fits:
        raise TypeError
    return value


def _conform_union(value: Any, alternatives: Sequence[Any]) -> Any:
    fits = []
    for alternative in alternatives:
        try:
            fits.append(conform(value, alternative))
        except TypeError:
            continue
    _require(value, bool(fits))
    # An alternative that takes the value as it is goes before one that converts it.
    return next((fit for fit in fits if type(fit) is type(value)), fits[0])


def _conform_tuple(value: Any, args: tuple[Any, ...]) -> tuple:
    _require(value, isinstance(value, list | tuple))
    if not args:
        return tuple(value)
    if len(args) == 2 and args[1] is Ellipsis:
        return tuple(conform(item, args[0]) for item in value)
    _require(value, len(args) == len(value))
    return tuple(conform(*pair) for pair in zip(value, args, strict=True))


def members(protocol: type) -> set[str]:
    """Returns the names that an object needs to fit a Protocol."""
    names = set()
    for base in protocol.__mro__:
        if getattr(base, "_is_protocol", False) and base is not typing.Protocol:
            names |= {*vars(base), *base.__dict__.get("__annotations__", {})}
    return {x for x in names if x == "__call__" or not x.startswith("_")}


def describe(annotation: Any) -> str:
    """Returns an annotation in words for a message: `int or None`."""
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if annotation is None or annotation is type(None):
        return "None"
    if annotation is Ellipsis:
        return "..."
    if origin is typing.Annotated:
        return describe(args[0])
    if origin in (typing.Union, types.UnionType):
        return " or ".join(describe(arg) for arg in args)
    if origin is typing.Literal:
        return " or ".join(repr(arg) for arg in args)
    if origin is Callable:
        return "a callable"
    if args and isinstance(origin, type):
        return f"{origin.__name__}[{', '.join(describe(arg) for arg in args)}]"
    abstract = getattr(annotation, "__module__", "") in ("collections.abc", "typing")
    return annotation.__name__ if abstract else label(annotation)


class GinText:
    """Gin bindings that rebuild a config, each with its origin as a comment.

    All fields are written, defaults too, so that the text means the same run after a
    default has changed. `gaps` are the paths whose value gin has no syntax for.
    """

    def __init__(self, config: Any, origins: Mapping[str, str]):
        nodes = [("", config), *(item for item in walk(config) if is_node(item[1]))]
        count = collections.Counter(type(node) for _, node in nodes)
        self.gaps: list[str] = []
        self._imports: dict[str, str] = {}
        self._scopes: dict[str, str] = {}
        for path, node in nodes:
            # The same class twice needs two scopes, or both would share bindings.
            if path and count[type(node)] > 1:
                scope = "at_" + re.sub(r"\W", "_", path)
                while scope in self._scopes.values():
                    scope += "_"
                self._scopes[path] = scope
        self._lines = []
        for path, node in nodes:
            self._write_node(path, node, origins)

    def __str__(self) -> str:
        imports = []
        for module, name in sorted(self._imports.items()):
            package, _, last = module.rpartition(".")
            line = f"from {package} import {last}" if package else f"import {last}"
            imports.append(line if name == last else f"{line} as {name}")
        head = ["from __gin__ import dynamic_registration", *imports]
        return "\n".join([*head, *self._lines, ""])

    def _write_node(self, path: str, node: Any, origins: Mapping[str, str]) -> None:
        self._lines.append("")
        name = self._node(path, node)
        for field in init_fields(node):
            place, value = join(path, field.name), getattr(node, field.name)
            text = self._value(place, value)
            origin = origin_of(place, origins)
            if name is None or text is None:
                self.gaps.append(place)
                line = f"# {place} = {value!r}: gin cannot express this value"
                self._lines.append(" ".join(f"{line}  # {origin}".splitlines()))
            else:
                self._lines.append(f"{name}.{field.name} = {text}  # {origin}")

    def _node(self, path: str, node: Any) -> str | None:
        name, scope = self._name(type(node)), self._scopes.get(path)
        return f"{scope}/{name}" if scope and name else name

    def _value(self, path: str, value: Any) -> str | None:
        if is_node(value):
            name = self._node(path, value)
            return name and f"@{name}()"
        if isinstance(value, type | types.FunctionType | types.BuiltinFunctionType):
            name = self._name(value)
            return name and f"@{name}"
        if type(value) in (list, tuple, dict):
            return self._container(path, value)
        if type(value) is float and not math.isfinite(value):
            # A literal too large for a float reads as infinity; nan has none.
            return {math.inf: "1e999", -math.inf: "-1e999"}.get(value)
        plain_types = (bool, int, float, str, bytes, type(None))
        return repr(value) if type(value) in plain_types else None

    def _container(self, path: str, value: Any) -> str | None:
        pairs = value.items() if isinstance(value, dict) else enumerate(value)
        items = {key: self._value(join(path, key), item) for key, item in pairs}
        keys = [self._value(path, key) for key in items]
        if None in items.values() or None in keys:
            return None
        texts = [str(item) for item in items.values()]
        if isinstance(value, dict):
            inner = (f"{k}: {text}" for k, text in zip(keys, texts, strict=True))
            return "{" + ", ".join(inner) + "}"
        if isinstance(value, list):
            return "[" + ", ".join(texts) + "]"
        return f"({texts[0]},)" if len(texts) == 1 else "(" + ", ".join(texts) + ")"

    def _name(self, thing: Any) -> str | None:
        """Imports the module of a class or function; None if it has no such place."""
        found: Any = sys.modules.get(thing.__module__)
        for part in thing.__qualname__.split("."):
            found = getattr(found, part, None)
        if found is not thing:
            return None
        if thing.__module__ not in self._imports:
            name = base = thing.__module__.rpartition(".")[2]
            taken = {"gin", *self._imports.values()}
            number = 2
            while name in taken:
                name, number = f"{base}_{number}", number + 1
            self._imports[thing.__module__] = name
        return f"{self._imports[thing.__module__]}.{thing.__qualname__}"
