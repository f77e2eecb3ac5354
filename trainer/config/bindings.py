"""Bindings: each sets one parameter of a class (or function), in a scope.

In a value, a Ref stands for an object to create (`@scope/module.Class()`) and a Macro
for a named value (`%name`). A binding applies to an object if its scope is a prefix of
the object's scope; the longest one wins.
"""

import dataclasses
import difflib
import inspect
import re
import typing
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from . import tree as config_tree
from .tree import join, label

Scope = tuple[str, ...]
# Prefix of the private scope of one object, made for a `--set` by path. No gin name
# starts with it.
_PRIVATE = "."


class ConfigError(ValueError):
    """An error in a config file or on the command line, as one line."""

    def __init__(self, message: str):
        super().__init__(re.sub(r"\s*\n\s*", " ", message.strip()))


@dataclasses.dataclass(frozen=True, eq=False)
class Ref:
    """A reference to a class or function, and whether it is called."""

    target: Callable
    scope: Scope
    call: bool

    def __repr__(self) -> str:
        name = "/".join([*_public(self.scope), label(self.target)])
        return f"@{name}()" if self.call else f"@{name}"


@dataclasses.dataclass(frozen=True, eq=False)
class Macro:
    """A reference to a named value."""

    name: str

    @property
    def scope(self) -> Scope:
        """The scope of the references in the macro's value, as in gin."""
        return tuple(self.name.split("/"))

    @property
    def is_required(self) -> bool:
        """Whether this is gin's marker for a value that another binding must set."""
        return self.name == "gin.REQUIRED"

    def __repr__(self) -> str:
        return f"%{self.name}"


@dataclasses.dataclass(frozen=True, eq=False)
class Binding:
    """A value for a parameter; for a macro the target is None and the name is there."""

    scope: Scope
    target: Callable | None
    parameter: str
    value: Any
    origin: str

    @property
    def key(self) -> tuple[Scope, Callable | None, str]:
        return self.scope, self.target, self.parameter

    def applies_to(self, target: Callable, scope: Scope) -> bool:
        return self.target is target and scope[: len(self.scope)] == self.scope

    def __str__(self) -> str:
        if self.target is None:
            return f"macro {self.parameter!r}"
        name = f"{label(self.target)}.{self.parameter}"
        return "/".join([*_public(self.scope), name])


def _public(scope: Scope) -> list[str]:
    """Returns the parts of a scope that the user has written."""
    return [part for part in scope if not part.startswith(_PRIVATE)]


class Parameter(NamedTuple):
    annotation: Any
    required: bool


def parameters(target: Callable) -> dict[str, Parameter]:
    """Returns the parameters of a class or function that a binding can set."""
    annotated = target
    if isinstance(target, type) and not is_node_class(target):
        annotated = target.__init__
    try:
        hints = typing.get_type_hints(annotated, include_extras=True)
    except (NameError, TypeError) as error:
        raise ConfigError(
            f"{label(target)} has an annotation that cannot be resolved ({error});"
            " import the name it uses in its module"
        ) from error
    return {
        name: Parameter(hints.get(name, Any), parameter.default is parameter.empty)
        for name, parameter in inspect.signature(target).parameters.items()
        if parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    }


def require_parameter(target: Callable, name: str, where: str) -> None:
    known = parameters(target)
    if name not in known:
        tail = nearest(name, known)
        raise ConfigError(f"{where}: {label(target)} has no parameter {name!r}; {tail}")


def is_node_class(target: Any) -> bool:
    return isinstance(target, type) and dataclasses.is_dataclass(target)


def nearest(name: str, names: Iterable[str]) -> str:
    """Returns the end of a message: the nearest of `names`, or all of them."""
    names = sorted(set(names))
    close = difflib.get_close_matches(name, names, n=1)
    if close:
        return f"did you mean {close[0]!r}?"
    return f"expected one of: {', '.join(names) or '(none)'}"


def map_items(value: Any, change: Callable[[Any, str], Any], path: str = "") -> Any:
    """Applies `change(item, path)` to the items of nested lists, tuples and dicts."""
    if isinstance(value, list | tuple):
        items = (map_items(x, change, join(path, i)) for i, x in enumerate(value))
        return type(value)(items)
    if isinstance(value, dict):
        return {k: map_items(x, change, join(path, k)) for k, x in value.items()}
    return change(value, path)


class Bindings:
    """All bindings in the order they were added; the last one of a key wins."""

    def __init__(self):
        self.all: list[Binding] = []
        self.current: dict[tuple, Binding] = {}
        self.replaced: list[tuple[Binding, Binding]] = []
        self.kept: set[Binding] = set()

    def add(
        self, new: Binding, *, old: Binding | None = None, keep: bool = False
    ) -> None:
        """Adds a binding.

        Args:
          old: the binding it replaces, if not the one with the same key.
          keep: whether it only repeats the old binding in another scope.
        """
        old = old or self.current.get(new.key)
        if old and keep:
            self.kept.add(old)
        elif old:
            self.replaced.append((old, new))
        self.all.append(new)
        self.current[new.key] = new

    def of(self, target: Callable, scope: Scope) -> dict[str, Binding]:
        """Returns {parameter: binding} for a target called in a scope."""
        applicable: dict[str, Binding] = {}
        for binding in self.current.values():
            if binding.applies_to(target, scope):
                best = applicable.get(binding.parameter)
                if best is None or len(best.scope) < len(binding.scope):
                    applicable[binding.parameter] = binding
        return applicable

    def macros(self) -> list[str]:
        return [name for _, target, name in self.current if target is None]

    def macro(self, name: str, origin: str) -> Binding:
        binding = self.current.get(((), None, name))
        if binding is None:
            tail = nearest(name, self.macros())
            raise ConfigError(f"{origin}: macro %{name} is not defined; {tail}")
        return binding


class Places:
    """Finds the object at a path, to bind a parameter of this object alone.

    Paths are resolved before any object is created, so that several `--set` flags may
    set values that are valid only together.
    """

    def __init__(self, bindings: Bindings, root: type):
        self._bindings, self._root = bindings, root

    def bind(self, path: str, value: Any, origin: str) -> None:
        """Binds the parameter at `path`, but not that of other objects of the class."""
        target, scope, parts, done = self._root, (), path.split("."), ""
        while True:
            name = parts[0]
            require_parameter(target, name, origin)
            done = join(done, name)
            old = self._bindings.of(target, scope).get(name)
            if len(parts) == 1:
                new = Binding(scope, target, name, value, origin)
                return self._bindings.add(new, old=old)
            current = old.value if old else _default(target, name)
            value_here, node, parts = self._enter(
                current, scope, parts[1:], done, origin
            )
            source = old.origin if old else "default"
            new = Binding(scope, target, name, value_here, source)
            self._bindings.add(new, old=old, keep=True)
            target, scope = node.target, node.scope
            done = path.removesuffix("." + ".".join(parts))

    def _enter(self, value: Any, scope: Scope, rest: list[str], path: str, origin: str):
        """Gives the object in `value` a private scope.

        Returns:
          The new value, the Ref of the object, and the rest of the path.
        """
        seen = []
        while isinstance(value, Macro) and not value.is_required:
            binding = self._bindings.macro(value.name, origin)
            if binding in seen:
                raise ConfigError(f"{binding.origin}: {binding} refers to itself")
            seen.append(binding)
            self._bindings.kept.add(binding)
            scope = value.scope
            value = map_items(binding.value, lambda x, _, s=scope: _in_scope(x, s))
        if isinstance(value, Ref) and value.call:
            own = value.scope or scope
            own = own if own[-1:] == (_PRIVATE + path,) else (*own, _PRIVATE + path)
            node = Ref(value.target, own, True)
            return node, node, rest
        if config_tree.is_node(value) and not isinstance(value, Ref | Macro):
            node = Ref(type(value), (*scope, _PRIVATE + path), True)
            for name, item in config_tree.children(value):
                require_parameter(node.target, name, origin)
                new = Binding(node.scope, node.target, name, item, "default")
                self._bindings.add(new)
            return node, node, rest
        items: dict = {}
        if isinstance(value, list | tuple | dict):
            items = dict(value if isinstance(value, dict) else enumerate(value))
        keys = {str(key): key for key in items}
        if rest[0] not in keys or len(rest) == 1:
            raise ConfigError(
                f"{origin}: {path} is {value!r}, in which {'.'.join(rest)!r} is not a"
                f" field of an object; set {path} itself"
            )
        key, inner = keys[rest[0]], join(path, rest[0])
        items[key], node, rest = self._enter(items[key], scope, rest[1:], inner, origin)
        if isinstance(value, list | tuple):
            return type(value)(items.values()), node, rest
        return items, node, rest


def _in_scope(value: Any, scope: Scope) -> Any:
    if isinstance(value, Ref) and not value.scope:
        return Ref(value.target, scope, value.call)
    return value


def _default(target: Any, name: str) -> Any:
    for field in dataclasses.fields(target) if is_node_class(target) else ():
        if field.name == name and field.default_factory is not dataclasses.MISSING:
            return field.default_factory()
        if field.name == name and field.default is not dataclasses.MISSING:
            return field.default
    return None
