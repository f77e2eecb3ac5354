"""The log folder of a supervised job, and the part of it that goes to the terminal.

`worker-N.log` is what process N wrote to stdout and stderr, in all attempts; a command
that starts all of them, such as srun, has a log under its own name. `supervisor.jsonl`
has one JSON object for each event. `processes` has the number of workers; write another
number there to change it. For `progress-N.json` see progress_file.py.
"""

import fcntl
import json
import os
import select
import sys
import time
from pathlib import Path
from typing import Any

# A pipe that select calls writable takes this much without blocking.
CHUNK = select.PIPE_BUF
# How much of a log is read at a time, to show it or to find its last lines.
PIECE = 10_000
COLORS = (36, 33, 32, 35, 34, 31)  # cyan, yellow, green, magenta, blue, red
NOTE = "=="  # begins and ends the supervisor's lines in a worker's log


class Logs:
    """The log folder, locked: a second supervisor gets an error."""

    def __init__(self, folder: Path):
        self.folder = folder

    def __enter__(self):
        self.folder.mkdir(parents=True, exist_ok=True)
        self._events = open(self.folder / "supervisor.jsonl", "a")
        try:
            fcntl.flock(self._events, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._events.close()
            raise ValueError(
                f"log folder {self.folder} is in use by another supervisor. Wait for "
                "it, end it, or choose another folder with --logs."
            ) from None
        # Bytes of each log of this job that were shown, or were there before.
        self._shown: dict[str, int] = {}
        self._pending = b""  # not yet taken by the terminal
        return self

    def __exit__(self, *_):
        self.show(seconds=2)
        self._events.close()  # closing releases the lock

    def of(self, name: str) -> Path:
        """Returns the log of what the supervisor started under this name."""
        return self.folder / f"{name.replace(' ', '-')}.log"

    def worker(self, number: int) -> Path:
        return self.of(f"worker {number}")

    def progress(self, number: int) -> Path:
        return self.folder / f"progress-{number}.json"

    def event(self, kind: str, **fields: Any) -> None:
        document = {"time": round(time.time(), 3), "event": kind, **fields}
        self._events.write(json.dumps(document) + "\n")
        self._events.flush()

    def note(self, name: str, text: str) -> None:
        """Adds a line of our own to a log; it is not shown on the terminal."""
        now = time.strftime("%Y-%m-%d %H:%M:%S")
        with open(self.of(name), "ab") as log:
            self._shown.setdefault(name, log.tell())
            log.write(f"{NOTE} {now} {text} {NOTE}\n".encode())

    def show(self, seconds: float = 0) -> None:
        """Copies new log lines to the terminal, as far as it takes them.

        A paused terminal, or a pipe that nobody reads, must not keep us from watching;
        what it does not take is shown later, and is in the logs.
        """
        while True:
            while self._pending:
                taken = offer(sys.stdout.fileno(), self._pending[:CHUNK], seconds)
                if not taken:
                    return
                self._pending = self._pending[taken:]
            self._pending = b"".join(map(self._new_lines, self._shown))
            if not self._pending:
                return

    def _new_lines(self, name: str) -> bytes:
        """Returns the next lines of a log that were not shown, each with a prefix."""
        with open(self.of(name), "rb") as log:
            log.seek(self._shown[name])
            piece = log.read(PIECE)
        if b"\n" not in piece and len(piece) < PIECE:
            return b""  # a line that is still being written
        end = piece.rfind(b"\n") + 1 or len(piece)
        self._shown[name] += end
        mark = _prefix(name)
        lines = (line for line in piece[:end].splitlines() if not is_note(line))
        return b"".join(mark + line + b"\n" for line in lines)

    def write_size(self, size: int) -> None:
        (self.folder / "processes").write_text(f"{size}\n")

    def told_size(self, size: int) -> int | None:
        """Returns the number that the user wrote in place of `size`, if any."""
        try:
            text = (self.folder / "processes").read_text().strip()
        except (FileNotFoundError, UnicodeDecodeError):
            return None
        if text in ("", str(size)):  # "" while it is being written
            return None
        if text.isascii() and text.isdigit() and int(text) > 0:
            return int(text)
        say(
            f"{self.folder / 'processes'} contains {text[:40]!r}, expected a whole "
            f"number of processes; continuing with {size}"
        )
        self.write_size(size)
        return None


def is_note(line: bytes) -> bool:
    return line.startswith(NOTE.encode()) and line.endswith(NOTE.encode())


def _prefix(name: str) -> bytes:
    """Returns `0 | ` for worker 0, in its own color on a terminal with colors."""
    number = name.removeprefix("worker ")
    text = f"{number} | "
    if number.isdigit() and sys.stdout.isatty() and not os.environ.get("NO_COLOR"):
        text = f"\033[{COLORS[int(number) % len(COLORS)]}m{text}\033[0m"
    return text.encode()


def last_line(log: Path) -> str:
    """Returns the last nonempty line of the last attempt, or its last error line."""
    with open(log, "rb") as file:
        file.seek(max(0, log.stat().st_size - PIECE))
        lines = file.read().splitlines()
    while lines and is_note(lines[-1]):
        lines.pop()  # how it ended
    start = max((i for i, line in enumerate(lines) if is_note(line)), default=-1) + 1
    said = [line.decode(errors="replace").strip() for line in lines[start:]]
    errors = [line for line in said if line.startswith("meshloom: ")]
    return (errors or [line for line in said if line] or [""])[-1]


def say(text: str) -> None:
    """Writes a line to stderr; if nobody reads it, the events still have it."""
    offer(sys.stderr.fileno(), f"meshloom launch: {text}\n".encode(), seconds=1)


def offer(fd: int, data: bytes, seconds: float = 0) -> int:
    """Writes what can be written within `seconds`; returns the number of bytes.

    If nobody will ever read them (a closed pipe or terminal), all count as written.
    """
    try:
        if not select.select([], [fd], [], seconds)[1]:
            return 0
        return os.write(fd, data)
    except BlockingIOError:
        return 0
    except OSError:
        return len(data)
