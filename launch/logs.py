"""The log folder of a supervised job, and what of it goes to the terminal.

`worker-N.log` is what process N wrote to stdout and stderr, in all attempts; a command
that starts all of them, such as srun, has a log under its own name. `supervisor.jsonl`
is one JSON object for each event; `processes` the number of workers, in which a person
may write another; `progress-N.json` see progress_file.
"""

import fcntl
import json
import os
import select
import sys
import time
from pathlib import Path
from typing import Any

# A pipe that select calls writable takes this much without waiting.
CHUNK = select.PIPE_BUF
# So much of a log is read at a time, to be shown or to look for its last lines.
PIECE = 10_000
COLOURS = (36, 33, 32, 35, 34, 31)  # cyan, yellow, green, magenta, blue, red
NOTE = "=="  # begins and ends a line of the supervisor's in a worker's log


class Logs:
    """The folder. Holds it: a second supervisor gets an error."""

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
        # Bytes of each log that were shown, or were there before; the logs of this job.
        self._shown: dict[str, int] = {}
        self._pending = b""  # to be shown, and not taken yet
        return self

    def __exit__(self, *_):
        self.show(seconds=2)
        self._events.close()  # closing releases the lock

    def of(self, name: str) -> Path:
        """The log of what the supervisor started under this name."""
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
        """A line of our own in a log; the terminal is told in other words."""
        now = time.strftime("%Y-%m-%d %H:%M:%S")
        with open(self.of(name), "ab") as log:
            self._shown.setdefault(name, log.tell())
            log.write(f"{NOTE} {now} {text} {NOTE}\n".encode())

    def show(self, seconds: float = 0) -> None:
        """Passes on what was written to the logs, as far as the terminal takes it.

        A terminal that is held, or a pipe that nobody reads, must not keep us from
        watching; what it does not take is shown later, and is in the logs.
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
        """The next lines of a log that were not shown, each with its prefix."""
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
        """The number that a person has written in the place of `size`, if any."""
        try:
            text = (self.folder / "processes").read_text().strip()
        except (FileNotFoundError, UnicodeDecodeError):
            return None
        if text in ("", str(size)):  # "" while it is being written
            return None
        if text.isascii() and text.isdigit() and int(text) > 0:
            return int(text)
        say(
            f"{self.folder / 'processes'} holds {text[:40]!r}, expected a whole number "
            f"of processes; continuing with {size}"
        )
        self.write_size(size)
        return None


def is_note(line: bytes) -> bool:
    return line.startswith(NOTE.encode()) and line.endswith(NOTE.encode())


def _prefix(name: str) -> bytes:
    """`0 | ` in a colour of its own for worker 0, where colours are welcome."""
    number = name.removeprefix("worker ")
    text = f"{number} | "
    if number.isdigit() and sys.stdout.isatty() and not os.environ.get("NO_COLOR"):
        text = f"\033[{COLOURS[int(number) % len(COLOURS)]}m{text}\033[0m"
    return text.encode()


def last_line(log: Path) -> str:
    """The last line of the last attempt that says something; an error line if any."""
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
    """One line to stderr; lost where nobody takes it, but the events have it too."""
    offer(sys.stderr.fileno(), f"meshloom launch: {text}\n".encode(), seconds=1)


def offer(fd: int, data: bytes, seconds: float = 0) -> int:
    """Writes what can be written within `seconds`; returns how many bytes that were.

    Where nobody will ever read, a closed pipe or terminal, all bytes count as written.
    """
    try:
        if not select.select([], [fd], [], seconds)[1]:
            return 0
        return os.write(fd, data)
    except BlockingIOError:
        return 0
    except OSError:
        return len(data)
