"""Runs of the tiny config through the command line, and what they leave behind."""

import contextlib
import hashlib
import os
import pathlib
import signal
import subprocess
import sys

from paths import TINY

from meshloom.trainer.cli import main

COMMAND = str(pathlib.Path(sys.executable).with_name("meshloom"))
NUM_STEPS = 4


def command(*argv, timeout=120, env=None) -> subprocess.CompletedProcess:
    """Runs the installed command; it and its children are killed after `timeout`."""
    process = subprocess.Popen(
        [COMMAND, *argv],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, **(env or {})},
    )
    try:
        out, err = process.communicate(timeout=timeout)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    return subprocess.CompletedProcess(argv, process.returncode, out, err)


def train(folder, *flags) -> list[str]:
    flags = ("--steps", str(NUM_STEPS), *flags)
    return ["train", "--config", TINY, "--workdir", str(folder), *flags]


def sets_of(*values) -> list[str]:
    return [flag for value in values for flag in ("--set", value)]


def digest(folder: pathlib.Path) -> dict[str, tuple[str, int]]:
    """What every file holds and when it was changed; folders too."""
    found = {}
    for path in sorted([folder, *folder.rglob("*")]):
        content = path.read_bytes() if path.is_file() else b""
        changed = path.stat().st_mtime_ns
        found[str(path)] = (hashlib.sha256(content).hexdigest(), changed)
    return found


def refused(capfd, argv) -> str:
    """Returns the error of a command that exits with status 2: one line, and notes."""
    capfd.readouterr()
    assert main(argv) == 2
    lines = capfd.readouterr().err.splitlines()
    errors = [line for line in lines if not line.startswith("note: ")]
    assert len(errors) == 1 and errors[0].startswith("meshloom: "), lines
    return errors[0].removeprefix("meshloom: ")
