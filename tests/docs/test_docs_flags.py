"""The real parser accepts the commands that pages show and no test runs."""

import contextlib
import io
import re
import shlex

import pytest
from test_docs import PAGES, ROOT

from meshloom.trainer import cli

# What a page may write before a command: a prompt, variables, other programs.
COMMAND = re.compile(r"(?:^|[\s(])(meshloom (?!-)[a-z].*)$")


def shown(page: str) -> list[str]:
    """The commands in the blocks of a page that are not run (see test_docs.py)."""
    text = (ROOT / page).read_text()
    found = []
    for language, block in re.findall(r"^```(\w*)\n(.*?)^```", text, re.M | re.S):
        if language in ("bash", "python"):
            continue
        for line in re.sub(r"\\\n\s*", "", block).splitlines():
            if match := COMMAND.search(line):
                found.append(re.split(r"\s{3}|\s\s#", match[1])[0])  # less the remark
    return found


COMMANDS = [(page, command) for page in PAGES for command in shown(page)]


def arguments(command: str) -> list[list[str]]:
    """The arguments of a command, and of the one that it starts, after `--`."""
    words = shlex.split(re.split(r"\s[|&>;]", command)[0])[1:]
    words = [word for word in words if word != "..."]
    if "--" not in words:
        return [words]
    own = words[words.index("--") + 1 :]
    return [words, *([own[1:]] if own[0] == "meshloom" else [])]


def complaint(words: list[str]) -> str:
    """What the parser says; "" if it accepts the words, or only misses others."""
    said = io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.suppress(SystemExit):
        cli._parser().parse_args(words)
    return "" if "arguments are required" in said.getvalue() else said.getvalue()


@pytest.mark.parametrize(("page", "command"), COMMANDS)
def test_the_parser_knows_every_flag(page, command):
    for words in arguments(command):
        assert not complaint(words), f"{page}: {command}"


def test_a_flag_that_does_not_exist_is_found():
    (words,) = arguments("meshloom train --stepz 3 | tail")
    assert "unrecognized arguments: --stepz" in complaint(words)


def test_commands_are_found():
    pages = {page for page, _ in COMMANDS}
    assert pages >= {"docs/launch.md", "docs/service.md", "docs/tables.md"}
