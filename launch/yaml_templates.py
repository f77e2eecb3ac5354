"""Fills the YAML templates of `templates/`, which hold no logic of their own.

A value is a text, a number, a list or a mapping. Texts are written as JSON writes them,
which YAML reads as they are: nothing that a person gives can become another key. A list
or mapping follows its key as a block; the line of an empty one is left out.
"""

import json
import re
import string
from collections.abc import Mapping
from importlib import resources
from typing import Any

HERE = __name__.rpartition(".")[0]
# Line breaks and controls to YAML, but plain text to JSON.
_UNSAFE = re.compile("[\x7f-\x9f\u2028\u2029\ufeff]")
_BLOCK = re.compile(r"^( *)(- )?([\w.\-/]+): \$(\w+)$")


def fill(name: str, values: Mapping[str, Any]) -> str:
    """The template `name`, filled; each of its names must have a value."""
    source = resources.files(HERE).joinpath("templates", name)
    lines = []
    for line in source.read_text("utf-8").splitlines():
        found = _BLOCK.match(line)
        value = values[found[4]] if found else None
        if not isinstance(value, list | dict):
            scalars = {k: v for k, v in values.items() if isinstance(v, str | int)}
            texts = {k: _scalar(v) for k, v in scalars.items()}
            lines.append(string.Template(line).substitute(texts))
        elif value:
            assert found is not None
            lines.append(line.removesuffix(f" ${found[4]}"))
            indent = len(found[1]) + len(found[2] or "") + 2
            lines += [" " * indent + text for text in _block(value)]
    return "\n".join(lines) + "\n"


def _block(value: list | dict) -> list[str]:
    """The lines of a list or mapping that is not empty."""
    lines: list[str] = []
    if isinstance(value, list):
        for item in value:
            if isinstance(item, list | dict):
                first, *rest = _block(item)
                lines += [f"- {first}", *(f"  {line}" for line in rest)]
            else:
                lines.append(f"- {_scalar(item)}")
        return lines
    for key, item in value.items():
        if isinstance(item, list | dict) and item:
            lines += [f"{key}:", *(f"  {line}" for line in _block(item))]
        else:
            lines.append(f"{key}: {_scalar(item)}")
    return lines


def _scalar(value: Any) -> str:
    """On one line; characters beyond 16 bits stay, YAML has no pairs of escapes."""
    text = json.dumps(value, ensure_ascii=False)
    return _UNSAFE.sub(lambda match: f"\\u{ord(match[0]):04x}", text)
