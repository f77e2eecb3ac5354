"""Writes a config as gin text, for the `config.gin` of a run folder."""

import collections
import math
import re
import sys
import types
from collections.abc import Mapping
from typing import Any

from .tree import init_fields, is_node, join, origin_of, walk


class GinText:
    """Gin bindings that recreate a config, each with its origin as a comment.

    All fields are written, including defaults, so that the text describes the same run
    after a default has changed. `gaps` lists the paths of values that gin has no syntax
    for.
    """

    def __init__(self, config: Any, origins: Mapping[str, str]):
        nodes = [("", config), *(item for item in walk(config) if is_node(item[1]))]
        count = collections.Counter(type(node) for _, node in nodes)
        self.gaps: list[str] = []
        self._imports: dict[str, str] = {}
        self._scopes: dict[str, str] = {}
        for path, node in nodes:
            # Two objects of one class need two scopes, or they would share bindings.
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
            # A literal too large for a float is infinity; there is none for nan.
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
        """Returns the name of a class or function, None if it cannot be imported."""
        value: Any = sys.modules.get(thing.__module__)
        for part in thing.__qualname__.split("."):
            value = getattr(value, part, None)
        if value is not thing:
            return None
        if thing.__module__ not in self._imports:
            name = base = thing.__module__.rpartition(".")[2]
            used = {"gin", *self._imports.values()}
            number = 2
            while name in used:
                name, number = f"{base}_{number}", number + 1
            self._imports[thing.__module__] = name
        return f"{self._imports[thing.__module__]}.{thing.__qualname__}"
