"""Reads gin files and `--set` into a config, and knows where each value came from.

A binding gives one parameter of a class (or function) a value, in a scope. Gin parses
the files and, at the end, fills the classes; in between the bindings are followed from
the root here, because gin keeps no origins and notices no unused binding.
"""

import collections
import dataclasses
import difflib
import importlib
import importlib.resources
import inspect
import os
import pathlib
import pkgutil
import re
import sys
import tokenize
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import gin
from gin import config as gin_config
from gin import config_parser

from . import config_tree
from .config_tree import join, label

Scope = tuple[str, ...]
# Begins the scope of one place, made for a `--set` by path; no gin name starts so.
_OWN = "."


class ConfigError(ValueError):
    """A mistake in a config file or on the command line, told in one line."""

    def __init__(self, message: str):
        super().__init__(re.sub(r"\s*\n\s*", " ", message.strip()))


@dataclasses.dataclass(frozen=True)
class Loaded:
    """A complete config.

    Attributes:
      config: the instance of the root class.
      origins: path of each value -> "default.gin:12", "--set ..." or "default".
      text: gin bindings that give this config again, defaults written out.
      dropped: one line for each binding that went with a part replaced later.
    """

    config: Any
    origins: dict[str, str]
    text: str
    dropped: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True, eq=False)
class _Ref:
    target: Callable
    scope: Scope
    call: bool


@dataclasses.dataclass(frozen=True, eq=False)
class _Macro:
    name: str


@dataclasses.dataclass(frozen=True, eq=False)
class _Binding:
    """The target is None for a macro, whose name is the parameter."""

    scope: Scope
    target: Callable | None
    parameter: str
    value: Any
    origin: str

    @property
    def key(self) -> tuple[Scope, Callable | None, str]:
        return self.scope, self.target, self.parameter

    def __str__(self) -> str:
        if self.target is None:
            return f"macro {self.parameter!r}"
        scope = [part for part in self.scope if not part.startswith(_OWN)]
        return "/".join([*scope, f"{label(self.target)}.{self.parameter}"])


def nearest(name: str, names: Iterable[str]) -> str:
    """Returns the tail of a message: the nearest of `names`, or all of them."""
    names = sorted(set(names))
    close = difflib.get_close_matches(name, names, n=1)
    if close:
        return f"did you mean {close[0]!r}?"
    return f"expected one of: {', '.join(names) or '(none)'}"


def _map(value: Any, change: Callable[[Any, str], Any], path: str = "") -> Any:
    """Applies `change(item, path)` to the items of nested lists, tuples and dicts."""
    if isinstance(value, list | tuple):
        items = (_map(x, change, join(path, i)) for i, x in enumerate(value))
        return type(value)(items)
    if isinstance(value, dict):
        return {k: _map(x, change, join(path, k)) for k, x in value.items()}
    return change(value, path)


def _parameters(target: Callable) -> tuple[dict[str, tuple[Any, bool]], bool]:
    """Returns {name: (annotation, required)}, and whether any other name is taken."""
    annotated = target
    if isinstance(target, type) and not _is_node_class(target):
        annotated = target.__init__
    try:
        hints = typing.get_type_hints(annotated, include_extras=True)
    except (NameError, TypeError) as error:
        raise ConfigError(
            f"{label(target)} has an annotation that cannot be read ({error});"
            " import the name it uses in its module"
        ) from error
    found, open_ended = {}, False
    for name, parameter in inspect.signature(target).parameters.items():
        if parameter.kind == parameter.VAR_KEYWORD:
            open_ended = True
        elif parameter.kind != parameter.VAR_POSITIONAL:
            required = parameter.default is parameter.empty
            found[name] = (hints.get(name, Any), required)
    return found, open_ended


def _is_node_class(target: Any) -> bool:
    return isinstance(target, type) and dataclasses.is_dataclass(target)


def _require_parameter(target: Callable, name: str, where: str) -> None:
    known, open_ended = _parameters(target)
    if name not in known and not open_ended:
        tail = nearest(name, known)
        raise ConfigError(f"{where}: {label(target)} has no parameter {name!r}; {tail}")


class Bindings:
    """All bindings in the order they were made; the last of a key counts."""

    def __init__(self):
        self.all: list[_Binding] = []
        self.current: dict[tuple, _Binding] = {}
        self.replaced: list[tuple[_Binding, _Binding]] = []
        self.kept: set[_Binding] = set()

    def add(
        self, new: _Binding, *, old: _Binding | None = None, keep: bool = False
    ) -> None:
        """Adds a binding.

        Args:
          old: what it replaces, if that is not the binding with the same key.
          keep: the new binding says the same as the old one, in another scope.
        """
        old = old or self.current.get(new.key)
        if old and keep:
            self.kept.add(old)
        elif old:
            self.replaced.append((old, new))
        self.all.append(new)
        self.current[new.key] = new

    def of(self, target: Callable, scope: Scope) -> dict[str, _Binding]:
        """Returns {parameter: binding} for a target called in a scope."""
        found: dict[str, _Binding] = {}
        for binding in self.current.values():
            if (
                binding.target is target
                and scope[: len(binding.scope)] == binding.scope
            ):
                best = found.get(binding.parameter)
                if best is None or len(best.scope) < len(binding.scope):
                    found[binding.parameter] = binding
        return found

    def macros(self) -> list[str]:
        return [name for _, target, name in self.current if target is None]

    def macro(self, name: str, origin: str) -> _Binding:
        found = self.current.get(((), None, name))
        if found is None:
            tail = nearest(name, self.macros())
            raise ConfigError(f"{origin}: macro %{name} is not defined; {tail}")
        return found


class _Required:
    """Stands for `%gin.REQUIRED`: a value that another binding has to give."""


class Builder:
    """Follows the bindings from the root: makes the config, its origins, the uses."""

    def __init__(self, bindings: Bindings):
        self.origins: dict[str, str] = {}
        self.used: set[_Binding] = set()
        self._bindings = bindings
        self._calls: list[tuple[Callable, Scope]] = []

    def build(self, root: type) -> Any:
        config = self._call(_Ref(root, (), True), (), "", "")
        for path, value in [("", config), *config_tree.walk(config)]:
            if config_tree.is_node(value):
                self._check_node(path, value)
        return config

    def _call(self, ref: _Ref, scope: Scope, path: str | None, origin: str) -> Any:
        target: Any = ref.target
        scope = ref.scope or scope
        where = f"{origin}: " if origin else ""
        if (target, scope) in self._calls:
            raise ConfigError(
                f"{where}{label(target)} is a part of itself; cut the loop"
            )
        self._calls.append((target, scope))
        known, _ = _parameters(target)
        # Only the fields of a dataclass are places in the tree.
        tree = path if _is_node_class(target) else None
        bound, arguments = self._bindings.of(target, scope), {}
        if tree is not None:
            self.origins |= {join(tree, name): "default" for name in known}
        for name, binding in bound.items():
            place = None if tree is None else join(tree, name)
            value, source = self._bound_value(binding, scope, place)
            if value is _Required:
                raise ConfigError(_missing(target, name, place, f"{source}: "))
            if place is not None:
                self.origins[place] = source
            annotation = known[name][0] if name in known else Any
            arguments[name] = _conform(value, annotation, target, name, source)
        for name, (_, required) in known.items():
            if required and name not in arguments:
                place = None if tree is None else join(tree, name)
                raise ConfigError(_missing(target, name, place, where))
        self._calls.pop()
        try:
            return target(**arguments)
        except (ValueError, TypeError) as error:
            raise ConfigError(_explain(error, target, bound, where)) from error

    def _bound_value(self, binding: _Binding, scope: Scope, path: str | None):
        """Returns the value of a binding and the origin of that value."""
        seen = []
        self.used.add(binding)
        while isinstance(binding.value, _Macro) and binding not in seen:
            if binding.value.name == "gin.REQUIRED":
                return _Required, binding.origin
            seen.append(binding)
            scope = tuple(binding.value.name.split("/"))
            binding = self._bindings.macro(binding.value.name, binding.origin)
            self.used.add(binding)
        if binding in seen:
            raise ConfigError(f"{binding.origin}: {binding} is defined by itself")

        def evaluate(item: Any, inner: str) -> Any:
            place = path if path is None or not inner else join(path, inner)
            if isinstance(item, _Macro):
                step = _Binding(scope, None, inner, item, binding.origin)
                return self._bound_value(step, scope, place)[0]
            if isinstance(item, _Ref):
                if not item.call:
                    return item.target
                return self._call(item, scope, place, binding.origin)
            return item

        return _map(binding.value, evaluate), binding.origin

    def _check_node(self, path: str, node: Any) -> None:
        known, _ = _parameters(type(node))
        for field in config_tree.init_fields(node):
            place = join(path, field.name)
            origin = config_tree.origin_of(place, self.origins)
            annotation = known[field.name][0] if field.name in known else Any
            _conform(
                getattr(node, field.name), annotation, type(node), field.name, origin
            )


def _conform(value: Any, annotation: Any, target: Callable, name: str, origin: str):
    try:
        return config_tree.conform(value, annotation)
    except TypeError:
        expected = config_tree.describe(annotation)
    found, remedy = f"{type(value).__name__} {value!r}", ""
    if value is None:
        found = "None"
    elif isinstance(value, type):
        found = f"the class {label(value)}"
        remedy = f"; write @{label(value)}(), with parentheses, for an object of it"
    elif config_tree.is_node(value):
        found = label(type(value))
        wanted = config_tree.members(annotation) if isinstance(annotation, type) else ()
        if lacking := [name for name in sorted(wanted) if not hasattr(value, name)]:
            remedy = f", which has no {lacking[0]!r}; define it"
    elif expected == "str" and isinstance(value, bool | int | float):
        remedy = "; put it in quotes"
    raise ConfigError(
        f"{origin}: {label(target)}.{name} must be {expected}, got {found}{remedy}"
    ) from None


def _missing(target: Callable, name: str, path: str | None, where: str) -> str:
    known, _ = _parameters(target)
    expected = config_tree.describe(known[name][0] if name in known else Any)
    setting = f", or give --set {path}=..." if path else ""
    return (
        f"{where}{label(target)}.{name} has no value, expected {expected}; add the line"
        f" `{label(target)}.{name} = ...` to a config file{setting}"
    )


def _explain(
    error: Exception, target: Callable, bound: Mapping[str, _Binding], where: str
) -> str:
    """Returns what a class said of its arguments, with the origins of these."""
    named = {k: b for k, b in bound.items() if re.search(rf"\b{k}\b", str(error))}
    origins = [f"{name} from {b.origin}" for name, b in (named or bound).items()]
    tail = f" ({', '.join(origins)})" if origins else ""
    return f"{where}{label(target)}: {error}{tail}"


class Places:
    """Finds the object that stands at a path, to bind a parameter of it alone."""

    def __init__(self, bindings: Bindings, root: type):
        self._bindings, self._root = bindings, root

    def bind(self, path: str, value: Any, origin: str) -> None:
        """Binds what stands at `path`, and nothing else of the same class."""
        target, scope, parts, done = self._root, (), path.split("."), ""
        while True:
            name = parts[0]
            _require_parameter(target, name, origin)
            done = join(done, name)
            old = self._bindings.of(target, scope).get(name)
            if len(parts) == 1:
                new = _Binding(scope, target, name, value, origin)
                return self._bindings.add(new, old=old)
            standing = old.value if old else _default(target, name)
            own, node, rest = self._enter(standing, scope, parts[1:], done, origin)
            source = old.origin if old else "default"
            new = _Binding(scope, target, name, own, source)
            self._bindings.add(new, old=old, keep=True)
            (target, scope), done = node, path.removesuffix("." + ".".join(rest))
            parts = rest

    def _enter(self, value: Any, scope: Scope, rest: list[str], path: str, origin: str):
        """Gives the object in `value` a scope of its own.

        Returns the new value, the object as (target, scope), and the rest of the path.
        """
        while isinstance(value, _Macro):
            binding = self._bindings.macro(value.name, origin)
            self._bindings.kept.add(binding)
            scope = tuple(value.name.split("/"))
            value = _map(binding.value, lambda x, _, s=scope: _in_scope(x, s))
        if isinstance(value, _Ref) and value.call:
            own = value.scope or scope
            own = own if own[-1:] == (_OWN + path,) else (*own, _OWN + path)
            return _Ref(value.target, own, True), (value.target, own), rest
        if config_tree.is_node(value):
            own = (*scope, _OWN + path)
            for name, item in config_tree.children(value):
                self._bindings.add(_Binding(own, type(value), name, item, "default"))
            return _Ref(type(value), own, True), (type(value), own), rest
        items: dict = {}
        if isinstance(value, list | tuple | dict):
            items = dict(value if isinstance(value, dict) else enumerate(value))
        keys = {str(key): key for key in items}
        if rest[0] not in keys or len(rest) == 1:
            raise ConfigError(
                f"{origin}: {path} holds {value!r}, in which {'.'.join(rest)!r} is not"
                f" the field of an object; set {path} as a whole"
            )
        key, inner = keys[rest[0]], join(path, rest[0])
        new, node, rest = self._enter(items[key], scope, rest[1:], inner, origin)
        items[key] = new
        if isinstance(value, list | tuple):
            return type(value)(items.values()), node, rest
        return items, node, rest


def _in_scope(value: Any, scope: Scope) -> Any:
    if isinstance(value, _Ref) and not value.scope:
        return _Ref(value.target, scope, value.call)
    return value


def _default(target: Callable, name: str) -> Any:
    node: Any = target
    for field in dataclasses.fields(node) if _is_node_class(node) else ():
        if field.name == name and field.default_factory is not dataclasses.MISSING:
            return field.default_factory()
        if field.name == name and field.default is not dataclasses.MISSING:
            return field.default
    return None


def check_unused(
    bindings: Bindings, used: set[_Binding], config: Any
) -> tuple[str, ...]:
    """Raises for a binding that nothing uses; returns those that were replaced.

    A part that a later binding replaces takes the earlier bindings of its class in
    the files with it; otherwise no shipped config could get another optimizer.
    """
    dropped = []
    settled = used | bindings.kept | {old for old, _ in bindings.replaced}
    for binding in bindings.all:
        # Fields of a default object are written out by us, nobody asked for them.
        if binding in settled or binding.origin == "default":
            continue
        new = _replacement(bindings, binding)
        if new is None or binding.origin.startswith("--set"):
            raise ConfigError(_unused_message(bindings, binding, new, config))
        dropped.append(f"{binding.origin}: {binding} went with {new} ({new.origin})")
    return tuple(dropped)


def _replacement(bindings: Bindings, binding: _Binding) -> _Binding | None:
    order = bindings.all.index(binding)
    for old, new in bindings.replaced:
        if order < bindings.all.index(new) and binding in _reach(bindings, old):
            return new
    return None


def _reach(bindings: Bindings, start: _Binding) -> set[_Binding]:
    """Returns all bindings that the value of `start` could use."""
    found: set[_Binding] = set()
    todo = [(start.value, start.scope)]

    def visit(item: Any, scope: Scope) -> None:
        own = item.scope or scope if isinstance(item, _Ref) else ()
        for binding in bindings.all:
            if isinstance(item, _Macro):
                inner = tuple(item.name.split("/"))
                hit = binding.target is None and binding.parameter == item.name
            else:
                inner = own
                hit = isinstance(item, _Ref) and binding.target is item.target
                hit = hit and own[: len(binding.scope)] == binding.scope
            if hit and binding not in found:
                found.add(binding)
                todo.append((binding.value, inner))

    while todo:
        value, scope = todo.pop()
        _map(value, lambda item, _, scope=scope: visit(item, scope))
    return found


def _unused_message(
    bindings: Bindings, binding: _Binding, new: _Binding | None, config: Any
) -> str:
    start = f"{binding.origin}: {binding} is never used"
    if binding.target is None:
        return f"{start}; refer to it as %{binding.parameter}, or remove it"
    if new is not None:
        return f"{start}, because {new} was replaced by {new.origin}; give one of them"
    name = "/".join([*binding.scope, label(binding.target)])
    for path, value in config_tree.walk(config):
        if type(value) is binding.target:
            if any(
                b.target is binding.target for b in bindings.all if b is not binding
            ):
                return (
                    f"{start}: each {label(binding.target)} has a value of its own or"
                    f" another scope; set {join(path, binding.parameter)}, or remove it"
                )
            return (
                f"{start}: the object at {path} is a default, not @{name}(); set"
                f" {join(path, binding.parameter)} instead"
            )
    return f"{start}: no @{name}() is in the config; refer to it, or remove the binding"


class _Names(config_parser.ParserDelegate):
    """Leaves references as they are written, to be resolved where a line is known."""

    def configurable_reference(self, scoped_configurable_name, evaluate):
        return _Written(scoped_configurable_name, evaluate)

    def macro(self, macro_name):
        return _Macro(macro_name)


@dataclasses.dataclass(frozen=True, eq=False)
class _Written:
    name: str
    call: bool


def shipped() -> dict[str, Any]:
    """Returns {name: file} of the configs that come with the package."""
    files = importlib.resources.files("meshloom.configs").iterdir()
    return {f.name.removesuffix(".gin"): f for f in files if f.name.endswith(".gin")}


class Reader:
    """Collects the bindings of files and of `--set`."""

    def __init__(self, root: type):
        self.bindings = Bindings()
        self._root = root
        self._modules: dict[str, types.ModuleType] = {}
        self._open: list[str] = []

    def read(self, name: str, *, base: str = "", where: str = "") -> None:
        """Reads a shipped config or a file; `base` is the folder that includes it."""
        display, text = _open_config(name, base, where)
        if display in self._open:
            raise ConfigError(f"{where}: {display} includes itself; remove the include")
        self._open.append(display)
        own: dict[str, types.ModuleType] = {}
        # A name of the file itself goes before one that an earlier file imported.
        modules = collections.ChainMap(own, self._modules)
        for statement in _statements(display, text):
            line = f"{display}:{statement.location.line_num}"
            if isinstance(statement, config_parser.ImportStatement):
                found = _import(statement, line)
                own |= found
                self._modules |= found
            elif isinstance(statement, config_parser.IncludeStatement):
                base = os.path.dirname(display)
                self.read(statement.filename, base=base, where=line)
            elif isinstance(statement, config_parser.BlockDeclaration):
                _resolve(statement.selector, modules, line)
            else:
                self._bind(statement, modules, line)
        self._open.pop()

    def _bind(self, statement: Any, modules: Mapping[str, Any], line: str) -> None:
        scope = tuple(filter(None, statement.scope.split("/")))
        value = _resolve_value(statement.value, modules, line)
        if not statement.arg_name:
            name = "/".join([*scope, statement.selector])
            return self.bindings.add(_Binding((), None, name, value, line))
        target = _resolve(statement.selector, modules, line)
        _require_parameter(target, statement.arg_name, line)
        new = _Binding(scope, target, statement.arg_name, value, line)
        self.bindings.add(new)

    def set(self, text: str) -> None:
        """Takes NAME=VALUE; NAME is a macro, a class parameter, or a path."""
        name, equals, written = (part.strip() for part in text.partition("="))
        origin = f"--set {text}"
        if not equals or not re.fullmatch(r"(\w+/)*\w+(\.\w+)*", name):
            raise ConfigError(f"{origin}: expected NAME=VALUE, such as num_steps=100")
        value = _resolve_value(
            _parse_value(name, written, origin), self._modules, origin
        )
        if name in self.bindings.macros():
            return self.bindings.add(_Binding((), None, name, value, origin))
        scoped, _, parameter = name.rpartition(".")
        *scope, selector = scoped.split("/")
        first, fields = name.split(".")[0], _parameters(self._root)[0]
        if first in fields and not _is_callable(selector, self._modules):
            return Places(self.bindings, self._root).bind(name, value, origin)
        if not scoped or selector.split(".")[0] not in self._modules:
            tail = nearest(first, [*fields, *self._modules, *self.bindings.macros()])
            raise ConfigError(
                f"{origin}: {first!r} is no field of {label(self._root)}, imported"
                f" module or macro; {tail}"
            )
        target = _resolve(selector, self._modules, origin)
        _require_parameter(target, parameter, origin)
        new = _Binding(tuple(scope), target, parameter, value, origin)
        self.bindings.add(new)


def _open_config(name: str, base: str, where: str) -> tuple[str, str]:
    """Returns the name to show for a config, and its text."""
    prefix, known = f"{where}: " if where else "", shipped()
    stem = name.removesuffix(".gin")
    beside = os.path.join(base, name)
    bare = not name.endswith(".gin") and stem in known
    path = next((p for p in (beside, name) if os.path.isfile(p)), None)
    try:
        if path and not bare:
            return path, pathlib.Path(path).read_text(encoding="utf-8")
        if stem in known:
            return f"{stem}.gin", known[stem].read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{prefix}config {path} cannot be read: {error}") from error
    tail = nearest(os.path.basename(stem), known)
    raise ConfigError(
        f"{prefix}config {name!r} is neither a file nor a shipped config; {tail}"
    )


def _statements(display: str, text: str) -> list[Any]:
    try:
        return list(config_parser.ConfigParser(text, _Names()))
    except tokenize.TokenError as error:
        message, line = error.args[0], error.args[1][0]
    except SyntaxError as error:
        message, line = error.msg, error.lineno
    lines = text.splitlines()
    content = lines[line - 1].strip() if line and line <= len(lines) else "end of file"
    message = message.split("\n")[-1].strip().rstrip(".")
    raise ConfigError(
        f"{display}:{line}: syntax error at `{content}`: {message}; expected"
        " `module.Class.parameter = value`, where a string has quotes"
    )


def _parse_value(name: str, written: str, origin: str) -> Any:
    try:
        (binding,) = config_parser.ConfigParser(f"value = {written}", _Names())
        if isinstance(binding, config_parser.BindingStatement):
            return binding.value
        raise ValueError
    except (SyntaxError, ValueError, tokenize.TokenError):
        quoted = "'" + f'{name}="{written}"' + "'"
        remedy = f"a string needs quotes: --set {quoted}"
    if written.lower() in ("true", "false", "none"):
        remedy = f"write {name}={written.capitalize()}"
    raise ConfigError(
        f"{origin}: {written!r} is not a value; expected a Python literal,"
        f" @module.Class() or %macro; {remedy}"
    )


def _import(statement: Any, line: str) -> dict[str, types.ModuleType]:
    name = statement.module
    if name == "__gin__.dynamic_registration":
        return {}
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if not error.name or not f"{name}.".startswith(f"{error.name}."):
            raise ConfigError(f"{line}: import of {name} failed: {error}") from error
        package, _, last = name.rpartition(".")
        parent = sys.modules.get(package)
        if parent is not None and hasattr(parent, last):
            remedy = f"import the module {package} and write its name before {last}"
        elif parent is not None and hasattr(parent, "__path__"):
            remedy = nearest(
                last, (m.name for m in pkgutil.iter_modules(parent.__path__))
            )
        else:
            remedy = "install it, or add its folder to PYTHONPATH"
        raise ConfigError(f"{line}: there is no module {name!r}; {remedy}") from error
    except Exception as error:
        kind = type(error).__name__
        raise ConfigError(
            f"{line}: import of {name} failed: {kind}: {error}"
        ) from error
    bound = statement.bound_name()
    whole = statement.is_from or statement.alias
    return {bound: module if whole else sys.modules[bound]}


def _is_callable(selector: str, modules: Mapping[str, Any]) -> bool:
    first, *rest = selector.split(".")
    found = modules.get(first)
    for part in rest:
        found = getattr(found, part, None)
    return callable(found)


def _resolve(selector: str, modules: Mapping[str, Any], where: str) -> Callable:
    first, *rest = selector.split(".")
    if first not in modules:
        inside = [f"{m}.{first}" for m, x in modules.items() if hasattr(x, first)]
        tail = f"did you mean {inside[0]!r}?" if inside else nearest(first, modules)
        raise ConfigError(f"{where}: {first!r} is not an imported module; {tail}")
    found, path = modules[first], first
    for part in rest:
        if not hasattr(found, part):
            names = [n for n, x in vars(found).items() if isinstance(x, type)]
            names = [n for n in names if not n.startswith("_")]
            tail = nearest(part, names)
            raise ConfigError(f"{where}: {path} has no class {part!r}; {tail}")
        found, path = getattr(found, part), f"{path}.{part}"
    if not callable(found):
        raise ConfigError(
            f"{where}: {path} is a {type(found).__name__}, expected a class; write"
            f" {path}.CLASS"
        )
    return found


def _resolve_value(value: Any, modules: Mapping[str, Any], where: str) -> Any:
    def resolve(item: Any, _: str) -> Any:
        if not isinstance(item, _Written):
            return item
        *scope, selector = item.name.split("/")
        return _Ref(_resolve(selector, modules, where), tuple(scope), item.call)

    return _map(value, resolve)


def load(files: Sequence[str], sets: Sequence[str] = (), *, root: type) -> Loaded:
    """Reads configs (shipped names or paths, later ones win) and `--set` bindings."""
    reader = Reader(root)
    for name in files:
        reader.read(name)
    for text in sets:
        reader.set(text)
    builder = Builder(reader.bindings)
    config = builder.build(root)
    dropped = check_unused(reader.bindings, builder.used, config)
    return _complete(config, builder.origins, dropped)


def _complete(config: Any, origins: dict[str, str], dropped: tuple[str, ...]) -> Loaded:
    """Writes the config as gin text, and lets gin prove that the text gives it."""
    written = config_tree.GinText(config, origins)
    text = "".join(f"# dropped: {line}\n" for line in dropped) + str(written)
    if not written.gaps and config_tree.init_fields(config):
        filled = _fill(text, type(config))
        changes = config_tree.diff(
            config_tree.flatten(config), config_tree.flatten(filled)
        )
        if changes:
            raise ConfigError(
                f"gin reads {label(type(config))} back with other values:"
                f" {config_tree.format_diff(changes)}; make the __post_init__ of that"
                " class give the same for what it has made"
            )
        config = filled
    places = [path for path, _ in config_tree.walk(config)]
    origins = {path: config_tree.origin_of(path, origins) for path in places}
    return Loaded(config, origins, text, dropped)


def _fill(text: str, root: type) -> Any:
    gin.clear_config()
    try:
        # A class defined anew under an old name, as in a notebook, is no mistake.
        with gin_config.interactive_mode():
            gin.parse_config(text)
            return gin.get_configurable(root)()
    finally:
        gin.clear_config()


def override(loaded: Loaded, path: str, value: Any, origin: str) -> Loaded:
    """Returns `loaded` with another value at `path`, given by the flag `origin`."""
    for place, source in loaded.origins.items():
        if f"{place}.".startswith(f"{path}.") and source.startswith("--set"):
            raise ConfigError(
                f"{origin} and {source} both give {path}; leave one of them out"
            )
    config = _replace(loaded.config, path.split("."), value, origin)
    origins = {
        place: source
        for place, source in loaded.origins.items()
        if not f"{place}.".startswith(f"{path}.")
    }
    return _complete(config, {**origins, path: origin}, loaded.dropped)


def _replace(whole: Any, parts: list[str], value: Any, origin: str) -> Any:
    (name, *rest), node = parts, whole
    if isinstance(node, list | tuple) and name.isdigit() and int(name) < len(node):
        i, inner = int(name), node[int(name)]
        new = _replace(inner, rest, value, origin) if rest else value
        return type(node)([*node[:i], new, *node[i + 1 :]])
    if isinstance(node, Mapping) and name in node:
        new = _replace(node[name], rest, value, origin) if rest else value
        return {**node, name: new}
    if not config_tree.is_node(node):
        found = f"{type(node).__name__} {node!r}"
        raise ConfigError(f"{origin}: {found} has no part {name!r}; name a field")
    target = type(node)
    _require_parameter(target, name, origin)
    if rest:
        value = _replace(getattr(node, name), rest, value, origin)
    value = _conform(value, _parameters(target)[0][name][0], target, name, origin)
    try:
        return dataclasses.replace(whole, **{name: value})
    except (ValueError, TypeError) as error:
        raise ConfigError(f"{origin}: {label(target)}: {error}") from error


def flat_values(source: str, sets: Sequence[str] = (), *, root: type) -> dict[str, Any]:
    """Returns the flat config of a run folder, a config file or a shipped name."""
    if os.path.isdir(source):
        if sets:
            raise ConfigError(
                f"{source} is a run folder, whose config is fixed; drop --set"
            )
        return config_tree.read_run(source)
    return config_tree.flatten(load([source], sets, root=root).config)
