"""Imports the modules that a config names, and finds classes in them."""

import dataclasses
import importlib
import pkgutil
import sys
import types
from collections.abc import Callable, Mapping
from typing import Any

from .bindings import ConfigError, Ref, map_items, nearest

Modules = Mapping[str, types.ModuleType]

# {old name: new name} of modules that old config files and run folders import.
MOVED = {
    "meshloom.trainer.optimizers": "meshloom.trainer.program.optimizers",
    "meshloom.trainer.pipelining": "meshloom.trainer.program.pipelining",
    "meshloom.trainer.schedules": "meshloom.trainer.program.schedules",
    "meshloom.trainer.sources": "meshloom.trainer.data.sources",
    "meshloom.trainer.tokenizer": "meshloom.trainer.data.tokenizer",
    "meshloom.trainer.train": "meshloom.trainer.run.train",
}


@dataclasses.dataclass(frozen=True, eq=False)
class Written:
    """A reference as text, `scope/module.Class`, and whether () follows."""

    name: str
    call: bool


def import_module(name: str, where: str) -> types.ModuleType:
    """Imports a module by its current or an old name; `where` prefixes errors."""
    name = MOVED.get(name, name)
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if not error.name or not f"{name}.".startswith(f"{error.name}."):
            raise ConfigError(f"{where}: import of {name} failed: {error}") from error
        package, _, last = name.rpartition(".")
        parent = sys.modules.get(package)
        if parent is not None and hasattr(parent, last):
            remedy = (
                f"import the module {package} and write its name in front of {last}"
            )
        elif parent is not None and hasattr(parent, "__path__"):
            remedy = nearest(
                last, (m.name for m in pkgutil.iter_modules(parent.__path__))
            )
        else:
            remedy = "install it, or add its folder to PYTHONPATH"
        raise ConfigError(f"{where}: no module named {name!r}; {remedy}") from error
    except Exception as error:
        kind = type(error).__name__
        raise ConfigError(
            f"{where}: import of {name} failed: {kind}: {error}"
        ) from error


def is_callable(selector: str, modules: Modules) -> bool:
    first, *rest = selector.split(".")
    value: Any = modules.get(first)
    for part in rest:
        value = _member(value, part)
    return callable(value)


def find(selector: str, modules: Modules, where: str) -> Callable:
    """Returns the class or function that `module.Class` names."""
    first, *rest = selector.split(".")
    if first not in modules:
        inside = [f"{m}.{first}" for m, x in modules.items() if hasattr(x, first)]
        tail = f"did you mean {inside[0]!r}?" if inside else nearest(first, modules)
        raise ConfigError(f"{where}: {first!r} is not an imported module; {tail}")
    value, path = modules[first], first
    for part in rest:
        if (member := _member(value, part)) is None:
            names = [n for n, x in vars(value).items() if isinstance(x, type)]
            tail = nearest(part, (n for n in names if not n.startswith("_")))
            raise ConfigError(f"{where}: {path} has no class {part!r}; {tail}")
        value, path = member, f"{path}.{part}"
    if not callable(value):
        raise ConfigError(
            f"{where}: {path} has type {type(value).__name__}, expected a class; write"
            f" {path}.CLASS"
        )
    return value


def _member(value: Any, name: str) -> Any:
    """Returns an attribute, or the module that a submodule of this name has become."""
    moved = MOVED.get(f"{getattr(value, '__name__', '')}.{name}")
    return sys.modules.get(moved) if moved else getattr(value, name, None)


def find_all(value: Any, modules: Modules, where: str) -> Any:
    """Returns `value` with each Written in it resolved to a Ref."""

    def resolve(item: Any, _: str) -> Any:
        if not isinstance(item, Written):
            return item
        *scope, selector = item.name.split("/")
        return Ref(find(selector, modules, where), tuple(scope), item.call)

    return map_items(value, resolve)
