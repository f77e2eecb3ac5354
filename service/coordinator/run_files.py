"""The files of a job for people and for the trainer's own tools.

    DIR/NAME/spec.json        what the job is
             metrics.jsonl    one row per commit, as an ordinary run writes it
             commits.jsonl    one row per commit: which contributions it is made of
             abandoned.jsonl  rows of commits that a restart took back
             eval.jsonl       what learners report of their evaluations
             final.json       digests of the final parameters
             service/VERSION/ checkpoints of the servers

All of them follow from the log, so a row that a killed process did not write, or wrote
half, is written again; rows whose entries were removed from the log are left as they
are. JSON has no NaN and no infinity: they are the strings "NaN",
"Infinity" and "-Infinity", as in the metrics of any run.
"""

import json
import math
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from .history import History

CHUNK = 1 << 20
_NOT_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def plain(value: Any) -> Any:
    """Returns a JSON value, with floats that JSON does not have as strings."""
    if isinstance(value, Mapping):
        return {str(name): plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value


def number(value: Any) -> float:
    """Returns the number that `plain` wrote."""
    return float(_NOT_FINITE.get(value, value) if isinstance(value, str) else value)


def replace_json(path: Path, document: Any) -> None:
    """Writes a JSON file atomically and durably."""
    _replace(path, json.dumps(plain(document), indent=2) + "\n")


class RowFile:
    """A file with one JSON object per line, each with an integer `step`."""

    def __init__(self, path: Path):
        self.path = path
        self._size: int | None = None  # as this process has left it

    def append(self, row: Mapping[str, Any]) -> None:
        data = _line(row).encode()
        with open(self.path, "ab") as file:
            file.write(data)
        if self._size is not None:
            self._size += len(data)

    @property
    def is_untouched(self) -> bool:
        """Whether nobody but this process has changed the file since `restore`."""
        found = self.path.stat().st_size if self.path.exists() else 0
        return self._size == found

    def sync(self) -> None:
        """Waits until all rows are on disk."""
        if self.path.exists():
            with open(self.path, "rb") as file:
                os.fsync(file.fileno())

    def read(self) -> list[dict[str, Any]]:
        """Returns the complete rows; what follows the last newline is not one."""
        if not self.path.exists():
            return []
        with open(self.path, "rb") as file:
            lines = [line for line in file if line.endswith(b"\n")]
        return [json.loads(line) for line in lines]

    def restore(self, rows: Iterable[Mapping[str, Any]], kept: int = 0) -> None:
        """Makes the file contain exactly these rows, after some that it has.

        Args:
          kept: the number of rows that come before; they are nowhere else.
        """
        data = "".join(map(_line, rows)).encode()
        is_new = not self.path.exists()
        with open(self.path, "a+b") as file:
            begin = _end_of_rows(file, kept)
            file.seek(begin)
            # What is there may be long: only what follows is read at once.
            if file.read(len(data) + 1) != data:
                # These rows are in the log, if this is cut short.
                file.truncate(begin)
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
        if is_new:
            _sync_folder(self.path.parent)
        self._size = begin + len(data)


class RunFiles:
    """The folder of one job.

    Args:
      check: called before files change; raises an error if they must not.
    """

    def __init__(self, folder: Path, check: Callable[[], None] = lambda: None):
        self.folder, self._check = folder, check
        self.metrics = RowFile(folder / "metrics.jsonl")
        self.commits = RowFile(folder / "commits.jsonl")
        self.eval = RowFile(folder / "eval.jsonl")
        self._abandoned = RowFile(folder / "abandoned.jsonl")

    def create(self, spec: Mapping[str, Any]) -> None:
        self._check()
        self.folder.mkdir(parents=True, exist_ok=True)
        replace_json(self.folder / "spec.json", spec)

    def write_commit(self, entry: Mapping[str, Any]) -> None:
        self._check()
        self.commits.append(commit_row(entry))
        self.metrics.append(entry["metrics"])

    def restore(self, history: History) -> None:
        """Makes the files agree with the log, and with what it had before."""
        self._check()
        kept = history.snapshot or {"version": 0, "evaluations": 0, "abandoned": 0}
        commits = history.commits
        entries = [commits[version] for version in sorted(commits)]
        self.commits.restore(map(commit_row, entries), kept["version"])
        self.metrics.restore((e["metrics"] for e in entries), kept["version"])
        self.eval.restore(history.evaluations, kept["evaluations"])
        if history.abandoned or kept["abandoned"]:
            rows = map(commit_row, history.abandoned)
            self._abandoned.restore(rows, kept["abandoned"])

    def make_durable(self, history: History) -> None:
        """Makes sure that the files have all of the log, and are on disk."""
        files = self.commits, self.metrics, self.eval, self._abandoned
        if not all(file.is_untouched for file in files[:3]):
            self.restore(history)
        for file in files:
            file.sync()

    def write_final(
        self, version: int, digests: Mapping[str, str], stopped: str | None
    ) -> None:
        """Args:
        stopped: why the job ended before its last round.
        """
        self._check()
        final = {"version": version, "digests": digests}
        final |= {"stopped": stopped} if stopped else {}
        replace_json(self.folder / "final.json", final)


def commit_row(entry: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the row of commits.jsonl of a commit in the log."""
    hidden = ("metrics", "keep", "drop", "step")
    rest = {name: value for name, value in entry.items() if name not in hidden}
    return {"step": entry["version"], "update_step": entry["step"], **rest}


def _line(row: Mapping[str, Any]) -> str:
    return json.dumps(plain(row), allow_nan=False, ensure_ascii=False) + "\n"


def _replace(path: Path, text: str) -> None:
    draft = path.with_name(f".{path.name}.tmp")  # one process writes here
    try:
        with open(draft, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise
    _sync_folder(path.parent)


def _end_of_rows(file: BinaryIO, num: int) -> int:
    """Returns where the first rows of a file end; refuses one that has fewer."""
    file.seek(0)
    end = found = 0
    while found < num:
        part = file.read(CHUNK)
        if not part:
            raise ValueError(
                f"{file.name} has {found} rows, expected at least {num}, which are "
                "not in the log any more. Restore the file from a copy, or start the "
                "job under another name."
            )
        count = part.count(b"\n")
        if found + count < num:
            found, end = found + count, end + len(part)
            continue
        at = -1
        for _ in range(num - found):
            at = part.index(b"\n", at + 1)
        return end + at + 1
    return end


def _sync_folder(path: Path) -> None:
    folder = os.open(path, os.O_RDONLY)
    try:
        os.fsync(folder)  # makes the rename itself durable
    finally:
        os.close(folder)
