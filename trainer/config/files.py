"""Loads gin files and `--set` flags into a config, with the origin of each value.

Gin parses the files. The bindings are collected here and followed in `build.py`. At the
end gin alone loads the text that is written to the run folder, to prove that it gives
the same config. No other module imports gin.
"""

import collections
import dataclasses
import importlib.resources
import os
import pathlib
import re
import sys
import tokenize
import types
from collections.abc import Sequence
from typing import Any

import gin
from gin import config as gin_config
from gin import config_parser

from . import modules as config_modules
from . import secrets as config_secrets
from . import tree as config_tree
from .bindings import (
    Binding,
    Bindings,
    ConfigError,
    Macro,
    Places,
    nearest,
    parameters,
    require_parameter,
)
from .build import Builder, check_unused, conform
from .text import GinText
from .tree import label


@dataclasses.dataclass(frozen=True)
class Loaded:
    """A complete config.

    Attributes:
      config: the instance of the root class.
      origins: path of each value -> "default.gin:12", "--set ..." or "default".
      text: gin bindings that give the same config, including all defaults.
      dropped: one line per binding of an object that a later binding replaced.
      notes: one line per outdated module name.
    """

    config: Any
    origins: dict[str, str]
    text: str
    dropped: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


class _Names(config_parser.ParserDelegate):
    """Keeps references as text, to be resolved where the line number is known."""

    def configurable_reference(self, scoped_configurable_name, evaluate):
        return config_modules.Written(scoped_configurable_name, evaluate)

    def macro(self, macro_name):
        return Macro(macro_name)


def shipped() -> dict[str, Any]:
    """Returns {name: file} of the configs shipped with the package."""
    files = importlib.resources.files("meshloom.configs").iterdir()
    return {f.name.removesuffix(".gin"): f for f in files if f.name.endswith(".gin")}


class Reader:
    """Collects the bindings of files and of `--set`."""

    def __init__(self, root: type):
        self.bindings = Bindings()
        self._root = root
        self.notes: dict[str, str] = {}
        self._modules: dict[str, types.ModuleType] = {}
        self._open: list[str] = []

    def read(self, name: str, *, base: str = "", where: str = "") -> None:
        """Reads a shipped config or a file; `base` is the folder of its includer."""
        display, text = _open_config(name, base, where)
        if display in self._open:
            raise ConfigError(f"{where}: {display} includes itself; remove the include")
        self._open.append(display)
        own: dict[str, types.ModuleType] = {}
        # A module imported by this file takes precedence over one of an earlier file.
        modules = collections.ChainMap(own, self._modules)
        for statement in _statements(display, text):
            line = f"{display}:{statement.location.line_num}"
            if isinstance(statement, config_parser.ImportStatement):
                imported = self._import(statement, line)
                own |= imported
                self._modules |= imported
            elif isinstance(statement, config_parser.IncludeStatement):
                base = os.path.dirname(display)
                self.read(statement.filename, base=base, where=line)
            elif isinstance(statement, config_parser.BlockDeclaration):
                config_modules.find(statement.selector, modules, line)
            else:
                self._bind(statement, modules, line)
        self._open.pop()

    def _bind(self, statement: Any, modules: config_modules.Modules, line: str) -> None:
        scope = tuple(filter(None, statement.scope.split("/")))
        value = config_modules.find_all(statement.value, modules, line)
        if not statement.arg_name:
            name = "/".join([*scope, statement.selector])
            return self.bindings.add(Binding((), None, name, value, line))
        target = config_modules.find(statement.selector, modules, line)
        require_parameter(target, statement.arg_name, line)
        self.bindings.add(Binding(scope, target, statement.arg_name, value, line))

    def set(self, text: str) -> None:
        """Applies NAME=VALUE, where NAME is a macro, a class parameter or a path."""
        origin = config_secrets.shown_flag(text)
        name, value = _split_set(text)
        value = config_modules.find_all(value, self._modules, origin)
        if name in self.bindings.macros():
            return self.bindings.add(Binding((), None, name, value, origin))
        scoped, _, parameter = name.rpartition(".")
        *scope, selector = scoped.split("/")
        first, fields = name.split(".")[0], parameters(self._root)
        if first in fields and not config_modules.is_callable(selector, self._modules):
            return Places(self.bindings, self._root).bind(name, value, origin)
        if not scoped or selector.split(".")[0] not in self._modules:
            tail = nearest(first, [*fields, *self._modules, *self.bindings.macros()])
            raise ConfigError(
                f"{origin}: {first!r} is not a field of {label(self._root)}, an"
                f" imported module or a macro; {tail}"
            )
        target = config_modules.find(selector, self._modules, origin)
        require_parameter(target, parameter, origin)
        self.bindings.add(Binding(tuple(scope), target, parameter, value, origin))

    def _import(self, statement: Any, line: str) -> dict[str, types.ModuleType]:
        """Returns {the name that the statement binds: module}."""
        if statement.module == "__gin__.dynamic_registration":
            return {}
        module = config_modules.import_module(statement.module, line)
        if statement.module in config_modules.MOVED:
            self.notes.setdefault(
                statement.module,
                f"{line}: {statement.module} has moved to {module.__name__}; the old"
                " name still works",
            )
        name = statement.bound_name()
        is_leaf = statement.is_from or statement.alias
        return {name: module if is_leaf else sys.modules[name]}


def _open_config(name: str, base: str, where: str) -> tuple[str, str]:
    """Returns the display name of a config, and its text."""
    prefix, known = f"{where}: " if where else "", shipped()
    stem = name.removesuffix(".gin")
    sibling = os.path.join(base, name)
    bare = not name.endswith(".gin") and stem in known
    path = next((p for p in (sibling, name) if os.path.isfile(p)), None)
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
        " `module.Class.parameter = value`, with quotes around strings"
    )


def read_values(path: str) -> list[tuple[str, Any, str]]:
    """Returns (name, value, file:line) of each binding of a file that is not a config.

    References in values stay text; see `value_text`.
    """
    try:
        text = pathlib.Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    found = []
    for statement in _statements(path, text):
        line = f"{path}:{statement.location.line_num}"
        if not isinstance(statement, config_parser.BindingStatement):
            raise ConfigError(
                f"{line}: expected NAME = VALUE; imports and includes belong in the "
                "config"
            )
        names = filter(None, (statement.selector, statement.arg_name))
        scopes = filter(None, [statement.scope])
        name = "/".join([*scopes, ".".join(names)])
        found.append((name, statement.value, line))
    return found


def value_text(value: Any) -> str:
    """Returns a value of `read_values` as text that --set accepts."""
    if isinstance(value, config_modules.Written):
        return f"@{value.name}" + "()" * value.call
    if isinstance(value, list):
        return f"[{', '.join(map(value_text, value))}]"
    if isinstance(value, tuple):
        comma = "," if len(value) == 1 else ""
        return f"({', '.join(map(value_text, value))}{comma})"
    if isinstance(value, dict):
        items = (f"{key!r}: {value_text(item)}" for key, item in value.items())
        return f"{{{', '.join(items)}}}"
    return repr(value)


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


def check_syntax(files: Sequence[str], sets: Sequence[str]) -> None:
    """Raises for missing files and for syntax errors.

    It does not import the modules that the files name, so it takes milliseconds.
    """
    for name in files:
        _statements(*_open_config(name, "", ""))
    for text in sets:
        config_secrets.check_flag(text)
        _split_set(text)


def _split_set(text: str) -> tuple[str, Any]:
    """Returns the name and the parsed value of a --set flag."""
    name, equals, written = (part.strip() for part in text.partition("="))
    origin = config_secrets.shown_flag(text)
    if not equals or not re.fullmatch(r"(\w+/)*\w+(\.\w+)*", name):
        raise ConfigError(f"{origin}: expected NAME=VALUE, such as num_steps=100")
    return name, _parse_value(name, written, origin)


def load(files: Sequence[str], sets: Sequence[str] = (), *, root: type) -> Loaded:
    """Loads configs (shipped names or paths, later ones win) and `--set` flags."""
    reader = Reader(root)
    for name in files:
        reader.read(name)
    for text in sets:
        config_secrets.check_flag(text)
        reader.set(text)
    builder = Builder(reader.bindings)
    config = builder.build(root)
    config_secrets.check(config)
    dropped = check_unused(reader.bindings, builder.used, config)
    loaded = _complete(config, builder.origins, dropped)
    return dataclasses.replace(loaded, notes=tuple(reader.notes.values()))


def _complete(config: Any, origins: dict[str, str], dropped: Sequence[str]) -> Loaded:
    """Adds the gin text of a config, and the origin of each value."""
    written = GinText(config, origins)
    text = "".join(f"# dropped: {line}\n" for line in dropped) + str(written)
    if not written.gaps and config_tree.init_fields(config):
        _prove(text, config)
    paths = [path for path, _ in config_tree.walk(config)]
    origins = {path: config_tree.origin_of(path, origins) for path in paths}
    return Loaded(config, origins, text, tuple(dropped))


def _prove(text: str, config: Any) -> None:
    """Raises if gin does not create the same config from the text alone.

    This guarantees that the `config.gin` of a run folder describes that run.
    """
    gin.clear_config()
    try:
        # Redefining a class under the same name, as in a notebook, is not an error.
        with gin_config.interactive_mode():
            gin.parse_config(text)
            filled = gin.get_configurable(type(config))()
    finally:
        gin.clear_config()
    changes = config_tree.diff(config_tree.flatten(config), config_tree.flatten(filled))
    if changes:
        raise ConfigError(
            f"gin reads {label(type(config))} back with different values:"
            f" {config_tree.format_diff(changes)}; make the __post_init__ of that"
            " class idempotent"
        )


def override(
    loaded: Loaded, path: str, value: Any, origin: str, *, over_flags: bool = False
) -> Loaded:
    """Returns `loaded` with another value at `path`, set by the flag `origin`.

    Args:
      over_flags: whether it overrides a --set of the same path; an error otherwise.
    """
    for place, source in loaded.origins.items():
        is_here = f"{place}.".startswith(f"{path}.")
        if is_here and source.startswith("--set") and not over_flags:
            raise ConfigError(
                f"{origin} and {source} both set {path}; remove one of them"
            )
    config = _replace(loaded.config, path.split("."), value, origin)
    origins = {
        place: source
        for place, source in loaded.origins.items()
        if not f"{place}.".startswith(f"{path}.")
    }
    complete = _complete(config, {**origins, path: origin}, loaded.dropped)
    return dataclasses.replace(complete, notes=loaded.notes)


def _replace(node: Any, parts: list[str], value: Any, origin: str) -> Any:
    name, *rest = parts
    if not config_tree.is_node(node):
        actual = f"{type(node).__name__} {node!r}"
        raise ConfigError(f"{origin}: {actual} has no field {name!r}; name a field")
    target = type(node)
    require_parameter(target, name, origin)
    if rest:
        value = _replace(getattr(node, name), rest, value, origin)
    annotation = parameters(target)[name].annotation
    value = conform(value, annotation, target, name, origin)
    try:
        return dataclasses.replace(node, **{name: value})
    except (ValueError, TypeError) as error:
        raise ConfigError(f"{origin}: {label(target)}: {error}") from error


def flat_values(source: str, sets: Sequence[str] = (), *, root: type) -> dict[str, Any]:
    """Returns the flat config of a run folder, a config file or a shipped name."""
    if os.path.isdir(source):
        if sets:
            raise ConfigError(
                f"{source} is a run folder, whose config is fixed; remove --set"
            )
        return config_tree.read_run(source)
    return config_tree.flatten(load([source], sets, root=root).config)
