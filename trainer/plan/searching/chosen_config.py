"""Writes a candidate as a config: the user's own configs, and what differs."""

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ...config import files as config_files
from ...config import tree as config_tree
from ...config.text import GinText

if TYPE_CHECKING:
    from ...run.train import Config


# Written even where the base has the same value, so that it may change later.
CHOSEN = re.compile(
    r"\S+(MeshSpec\.\w+|Pipelining\.\w+"
    r"|\.(batch_size|plan|remat|head_block|num_microbatches)) ="
)


def write(path: Path, config: "Config", names: Sequence[str], about: str) -> None:
    """Writes a gin file that gives `config`, and reads it back to check.

    Args:
      names: the configs to include, as the command line had them.
      about: lines for the top of the file.
    """
    if path.exists():
        raise ValueError(
            f"--write {path}: the file exists. Name another, or remove it."
        )
    if path.suffix != ".gin":
        raise ValueError(f"--write {path}: a config's name must end in .gin")
    base = config_files.load(names, root=type(config)).config
    imports, lines = _difference(config, base)
    text = "\n".join(
        [
            *(f"# {line}".rstrip() for line in about.splitlines()),
            *imports,
            "",
            *(f'include "{_included(name, path)}"' for name in names),
            "",
            *lines,
            "",
        ]
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    _check(path, config)


def _check(path: Path, config: "Config") -> None:
    found = config_files.load([str(path)], root=type(config)).config
    flat = [config_tree.flatten(c) for c in (config, found)]
    if changes := config_tree.diff(*flat):
        raise ValueError(
            f"--write {path}: read back, it gives another config: "
            f"{config_tree.format_diff(changes)}. Set these values in it by hand; this "
            "happens if a config has two parts of one class."
        )


def _included(name: str, path: Path) -> str:
    """Returns a shipped config by its name, a file relative to the new one."""
    if not name.endswith(".gin") and name in config_files.shipped():
        return name
    return os.path.relpath(name, path.parent or ".")


def _difference(config: "Config", base: "Config") -> tuple[list[str], list[str]]:
    """Returns the (imports, bindings) that turn `base` into `config`."""
    old = set(_bindings(base))
    all_lines = _bindings(config)
    wanted = {line for line in all_lines if line not in old or CHOSEN.match(line)}
    # A part that nothing bound before must be named, or its values are not used.
    grown = True
    while grown:
        parts = {line.partition(" = ")[0].rpartition(".")[0] for line in wanted}
        more = {x for x in all_lines for part in parts if x.endswith(f" = @{part}()")}
        grown = not more <= wanted
        wanted |= more
    lines = [line for line in all_lines if line in wanted]
    text = str(GinText(config, {}))
    imports = [x for x in text.splitlines() if re.match("from|import", x)]
    used = {re.split(r"[/.]", line)[0] for line in lines}
    used |= set(re.findall(r"@(\w+)\.", "\n".join(lines)))
    return [x for x in imports if _bound(x) in {*used, "dynamic_registration"}], lines


def _bindings(config: "Config") -> list[str]:
    lines = str(GinText(config, {})).splitlines()
    return [
        line.rpartition("  # ")[0] for line in lines if re.match(r"[\w./]+ = ", line)
    ]


def _bound(statement: str) -> str:
    return statement.rpartition(" ")[2]
