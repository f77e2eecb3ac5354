"""Whether all processes see the same folder: each leaves a small file for the others.

A folder that only looks alike, such as /tmp/run on every host, would keep the pieces of
a checkpoint on several disks, and nobody could restore it.
"""

import contextlib
import os
import time
import uuid
from collections.abc import Iterable, Mapping
from pathlib import Path

import jax

from . import joining

PREFIX = ".preflight-"
# For how long a file of another host may be hidden by what a network file system keeps.
SEE_SECONDS = 5.0


def probe(folders: Mapping[str, Path]) -> dict[str, dict]:
    """What this process found in each folder; every process must come here.

    Returns by folder its `path`, a `problem` or None, and in process 0 the processes
    whose files it does not see (`unseen`).
    """
    mark = joining.consult("mark", {"mark": uuid.uuid4().hex[:12]}, lambda r: r[0])
    number, count = jax.process_index(), jax.process_count()
    names = [f"{PREFIX}{mark['mark']}-{process}" for process in range(count)]
    found = {}
    for turn in (number == 0, number > 0):  # process 0 first: it makes the folders
        if turn:
            for what, folder in folders.items():
                problem = _write(folder, names[number], make=number == 0)
                path = os.path.abspath(folder)
                found[what] = {"path": path, "problem": problem, "unseen": []}
        joining.wait_for_all("probes")
    for what, folder in folders.items():
        wanted = range(1, count) if number == 0 else [0]
        unseen = _unseen(folder, {p: names[p] for p in wanted})
        if number == 0:
            found[what]["unseen"] = unseen
        elif unseen and found[what]["problem"] is None:
            found[what]["problem"] = "process 0's file is not in it"
    joining.wait_for_all("probes seen")
    for folder in folders.values():
        with contextlib.suppress(OSError):  # what could not be written is not there
            (folder / names[number]).unlink()
    return found


def _write(folder: Path, name: str, *, make: bool) -> str | None:
    """The problem, if it cannot be written."""
    try:
        if make:
            folder.mkdir(parents=True, exist_ok=True)
            for left in folder.glob(f"{PREFIX}*"):  # by processes that were killed
                left.unlink(missing_ok=True)
        (folder / name).write_text("")
    except OSError as error:
        return f"it cannot be written: {error.strerror}"
    return None


def _unseen(folder: Path, names: Mapping[int, str]) -> list[int]:
    """The processes whose files do not show up in time."""
    deadline = time.monotonic() + SEE_SECONDS
    while True:
        present = set(_listing(folder))
        unseen = [process for process, name in names.items() if name not in present]
        if not unseen or time.monotonic() > deadline:
            return unseen
        time.sleep(0.1)


def _listing(folder: Path) -> Iterable[str]:
    try:
        return os.listdir(folder)
    except OSError:  # that it cannot be read shows in the files that are not seen
        return []
