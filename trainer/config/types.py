"""Checks config values against the annotations of their fields."""

import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from .tree import label


def conform(value: Any, annotation: Any) -> Any:
    """Returns `value` converted to `annotation`, or raises TypeError.

    An int is converted to a float, and a list to a tuple. Nothing else is converted: a
    bool is not an int.
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
    # An alternative that accepts the value as it is wins over one that converts it.
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
    """Returns the attributes that an object needs to satisfy a Protocol."""
    names = set()
    for base in protocol.__mro__:
        if getattr(base, "_is_protocol", False) and base is not typing.Protocol:
            names |= {*vars(base), *base.__dict__.get("__annotations__", {})}
    return {x for x in names if x == "__call__" or not x.startswith("_")}


def describe(annotation: Any) -> str:
    """Formats an annotation for a message: `int or None`."""
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
