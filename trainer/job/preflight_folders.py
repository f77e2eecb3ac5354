"""Checks that all processes see the same folders: each leaves a small file in them.

Folders that only look alike, such as /tmp/run on every host, would scatter the pieces
of a checkpoint over several disks, and nobody could restore it.
"""

import contextlib
import os
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

from .group import Group

PREFIX = ".preflight-"
# How long a network file system may hide a new file of another host.
SEE_SECONDS = 5.0


class FolderProbe:
    """The files that the processes leave in folders for each other to see.

    A context manager, which removes them at its end.

    Process 0 leaves its files first and creates the folders. Once all know that it has,
    the others leave theirs and look for its; once all know that, process 0 looks too.

    Args:
      folders: by what they are for.
      mark: the same in all processes of this attempt, and in no other.
    """

    def __init__(self, folders: Mapping[str, Path], group: Group, mark: str):
        self._folders, self._group = dict(folders), group
        self._names = [f"{PREFIX}{mark}-{process}" for process in range(group.size)]
        self._problems: dict[str, str | None] = {}

    def leave(self) -> None:
        """Leaves this process's files; what goes wrong is reported by `look`."""
        first, name = self._group.is_first, self._names[self._group.index]
        for what, folder in self._folders.items():
            self._problems[what] = _write(folder, name, create=first)

    def look(self) -> dict[str, dict]:
        """Returns each folder's `path`, a `problem` or None, and who is `unseen`.

        Only process 0 lists the processes whose files it does not see.
        """
        first, found = self._group.is_first, {}
        for what, folder in self._folders.items():
            wanted = range(1, self._group.size) if first else [0]
            unseen = _unseen(folder, {p: self._names[p] for p in wanted})
            problem = self._problems[what]
            if unseen and not first and problem is None:
                problem = "process 0's file is not in it"
            found[what] = {
                "path": os.path.abspath(folder),
                "problem": problem,
                "unseen": unseen if first else [],
            }
        return found

    def __enter__(self) -> "FolderProbe":
        return self

    def __exit__(self, *_) -> None:
        for folder in self._folders.values():
            with contextlib.suppress(OSError):  # what could not be written is not there
                (folder / self._names[self._group.index]).unlink()


def _write(folder: Path, name: str, *, create: bool) -> str | None:
    """Writes a file; returns the problem if that fails."""
    try:
        if create:
            folder.mkdir(parents=True, exist_ok=True)
            for left in folder.glob(f"{PREFIX}*"):  # by processes that were killed
                left.unlink(missing_ok=True)
        (folder / name).write_text("")
    except OSError as error:
        return f"it cannot be written: {error.strerror}"
    return None


def _unseen(folder: Path, names: Mapping[int, str]) -> list[int]:
    """Returns the processes whose files do not appear in time."""
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
    except OSError:  # a folder that cannot be read shows no files
        return []
