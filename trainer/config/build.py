"""Creates the config from its bindings, and finds bindings that nothing uses.

Gin could create the objects too, but it records no origins, checks no types and does
not notice unused bindings. So the bindings are followed from the root here.
"""

import re
from collections.abc import Callable, Mapping
from typing import Any

from . import tree as config_tree
from . import types as config_types
from .bindings import (
    Binding,
    Bindings,
    ConfigError,
    Macro,
    Ref,
    Scope,
    is_node_class,
    map_items,
    parameters,
)
from .tree import join, label


class _Required(Exception):
    """No binding has set a required value; the message is the line that requires it."""


class Builder:
    """Follows the bindings from the root, and records origins and used bindings."""

    def __init__(self, bindings: Bindings):
        self.origins: dict[str, str] = {}
        self.used: set[Binding] = set()
        self._bindings = bindings
        self._open: list[Any] = []

    def build(self, root: type) -> Any:
        config = self._call(Ref(root, (), True), (), "", "")
        for path, value in [("", config), *config_tree.walk(config)]:
            if config_tree.is_node(value):
                self._check_node(path, value)
        return config

    def _call(self, ref: Ref, scope: Scope, path: str | None, origin: str) -> Any:
        """Creates an object; its path is None if it is not part of the config tree."""
        target: Any = ref.target
        scope = ref.scope or scope
        where = f"{origin}: " if origin else ""
        if (target, scope) in self._open:
            raise ConfigError(
                f"{where}{label(target)} contains itself; remove the cycle"
            )
        self._open.append((target, scope))
        known, bound = parameters(target), self._bindings.of(target, scope)
        # Only the fields of a dataclass are part of the tree.
        in_tree = path is not None and is_node_class(target)
        places = {name: join(path or "", name) if in_tree else None for name in known}
        self.origins |= {place: "default" for place in places.values() if place}
        arguments = {}
        for name, binding in bound.items():
            self.used.add(binding)
            place = places[name]
            try:
                value, source = self._evaluate(
                    binding.value, scope, place, binding.origin
                )
            except _Required as required:
                message = _missing(target, name, place, f"{required}: ")
                raise ConfigError(message) from None
            if place:
                self.origins[place] = source
            annotation = known[name].annotation
            arguments[name] = conform(value, annotation, target, name, source)
        for name, parameter in known.items():
            if parameter.required and name not in arguments:
                raise ConfigError(_missing(target, name, places[name], where))
        self._open.pop()
        try:
            return target(**arguments)
        except (ValueError, TypeError) as error:
            raise ConfigError(_explain(error, target, bound, where)) from error

    def _evaluate(
        self, value: Any, scope: Scope, path: str | None, origin: str
    ) -> tuple[Any, str]:
        """Returns the value that a binding stands for, and its origin."""
        if isinstance(value, Macro):
            if value.is_required:
                raise _Required(origin)
            macro = self._bindings.macro(value.name, origin)
            if macro in self._open:
                raise ConfigError(f"{macro.origin}: {macro} refers to itself")
            self.used.add(macro)
            self._open.append(macro)
            result = self._evaluate(macro.value, value.scope, path, macro.origin)
            self._open.pop()
            return result

        def evaluate(item: Any, inner: str) -> Any:
            place = path if path is None or not inner else join(path, inner)
            if isinstance(item, Macro):
                return self._evaluate(item, scope, place, origin)[0]
            if isinstance(item, Ref):
                call = item.call
                return self._call(item, scope, place, origin) if call else item.target
            return item

        return map_items(value, evaluate), origin

    def _check_node(self, path: str, node: Any) -> None:
        """Checks the fields, which a function or a `__post_init__` may have set."""
        known = parameters(type(node))
        for field in config_tree.init_fields(node):
            name = field.name
            origin = config_tree.origin_of(join(path, name), self.origins)
            annotation = known[name].annotation if name in known else Any
            conform(getattr(node, name), annotation, type(node), name, origin)


def conform(
    value: Any, annotation: Any, target: Callable, name: str, origin: str
) -> Any:
    """Returns `value` converted to the type of the parameter `name` of `target`."""
    try:
        return config_types.conform(value, annotation)
    except TypeError:
        expected = config_types.describe(annotation)
    actual, remedy = f"{type(value).__name__} {value!r}", ""
    if value is None:
        actual = "None"
    elif isinstance(value, type):
        actual = f"the class {label(value)}"
        remedy = f"; write @{label(value)}(), with parentheses, for an object of it"
    elif config_tree.is_node(value):
        actual = label(type(value))
        required = (
            config_types.members(annotation) if isinstance(annotation, type) else ()
        )
        if missing := [name for name in sorted(required) if not hasattr(value, name)]:
            remedy = f", which has no {missing[0]!r}; define it"
    elif expected == "str" and isinstance(value, bool | int | float):
        remedy = "; put it in quotes"
    raise ConfigError(
        f"{origin}: {label(target)}.{name} must be {expected}, got {actual}{remedy}"
    ) from None


def _missing(target: Callable, name: str, path: str | None, where: str) -> str:
    expected = config_types.describe(parameters(target)[name].annotation)
    setting = f", or pass --set {path}=..." if path else ""
    return (
        f"{where}{label(target)}.{name} has no value, expected {expected}; add the line"
        f" `{label(target)}.{name} = ...` to a config file{setting}"
    )


def _explain(
    error: Exception, target: Callable, bound: Mapping[str, Binding], where: str
) -> str:
    """Returns the error of a class about its arguments, with their origins."""
    named = {k: b for k, b in bound.items() if re.search(rf"\b{k}\b", str(error))}
    origins = [f"{name} from {b.origin}" for name, b in (named or bound).items()]
    tail = f" ({', '.join(origins)})" if origins else ""
    return f"{where}{label(target)}: {error}{tail}"


def check_unused(bindings: Bindings, used: set[Binding], config: Any) -> list[str]:
    """Raises for a binding that nothing uses; returns those that were dropped.

    When a later binding replaces an object, the bindings of the old object in the files
    are dropped with it. Otherwise a shipped config could not get another optimizer.
    """
    dropped = []
    settled = used | bindings.kept | {old for old, _ in bindings.replaced}
    for binding in bindings.all:
        # The fields of a default object are bound by us, not by the user.
        if binding in settled or binding.origin == "default":
            continue
        new = _replacement(bindings, binding)
        if new is None or binding.origin.startswith("--set"):
            raise ConfigError(_unused_message(bindings, binding, new, config))
        dropped.append(
            f"{binding.origin}: {binding} has no effect; {new.origin} replaces {new}"
        )
    return dropped


def _replacement(bindings: Bindings, binding: Binding) -> Binding | None:
    order = bindings.all.index(binding)
    for old, new in bindings.replaced:
        if order < bindings.all.index(new) and binding in _reach(bindings, old):
            return new
    return None


def _reach(bindings: Bindings, start: Binding) -> set[Binding]:
    """Returns all bindings that the value of `start` could use."""
    reached: set[Binding] = set()
    todo = [(start.value, start.scope)]

    def visit(item: Any, scope: Scope) -> None:
        hits = []
        if isinstance(item, Macro):
            scope = item.scope
            hits = [b for b in bindings.all if b.key == ((), None, item.name)]
        elif isinstance(item, Ref):
            scope = item.scope or scope
            hits = [b for b in bindings.all if b.applies_to(item.target, scope)]
        todo.extend((b.value, scope) for b in hits if b not in reached)
        reached.update(hits)

    while todo:
        value, scope = todo.pop()
        map_items(value, lambda item, _, scope=scope: visit(item, scope))
    return reached


def _unused_message(
    bindings: Bindings, binding: Binding, new: Binding | None, config: Any
) -> str:
    start = f"{binding.origin}: {binding} is never used"
    target = binding.target
    if target is None:
        return f"{start}; refer to it as %{binding.parameter}, or remove it"
    if new is not None:
        return f"{start}, because {new.origin} replaces {new}; remove one of them"
    name = "/".join([*binding.scope, label(target)])
    existing = [p for p, value in config_tree.walk(config) if type(value) is target]
    if not existing:
        return (
            f"{start}: no @{name}() is in the config; refer to it, or remove the"
            " binding"
        )
    place = join(existing[0], binding.parameter)
    if any(b.target is target for b in bindings.all if b is not binding):
        return (
            f"{start}: each {label(target)} has its own value or another scope;"
            f" set {place}, or remove the binding"
        )
    return (
        f"{start}: the object at {existing[0]} is a default, not @{name}(); set"
        f" {place} instead"
    )
