"""The log folder of a supervised job, and what of it goes to the terminal.

`worker-N.log` is what worker N wrote to stdout and stderr, in all attempts;
`supervisor.jsonl` one JSON object for each event; `processes` the number of workers, in
which a person may write another; `progress-N.json` see progress_file.
"""

import contextlib
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
        log = self.worker(0)
        self._shown = log.stat().st_size if log.exists() else 0  # bytes of it
        return self

    def __exit__(self, *_):
        self.show(seconds=2)
        self._events.close()  # closing releases the lock

    def worker(self, number: int) -> Path:
        return self.folder / f"worker-{number}.log"

    def progress(self, number: int) -> Path:
        return self.folder / f"progress-{number}.json"

    def event(self, kind: str, **fields: Any) -> None:
        document = {"time": round(time.time(), 3), "event": kind, **fields}
        self._events.write(json.dumps(document) + "\n")
        self._events.flush()

    def note(self, number: int, text: str) -> None:
        """A line of our own in a worker's log; the terminal is told in other words."""
        if number == 0:
            self.show()
        now = time.strftime("%Y-%m-%d %H:%M:%S")
        with open(self.worker(number), "ab") as log:
            all_shown = number == 0 and self._shown == log.tell()
            log.write(f"== {now} {text} ==\n".encode())
            if all_shown:
                self._shown = log.tell()

    def last_line(self, number: int) -> str:
        """The last line that a worker wrote and that is no note of ours."""
        with open(self.worker(number), "rb") as log:
            log.seek(max(0, os.fstat(log.fileno()).st_size - 10_000))
            lines = log.read().decode(errors="replace").splitlines()
        written = [line for line in lines if line.strip() and not line.startswith("==")]
        return written[-1].strip() if written else ""

    def show(self, seconds: float = 0) -> None:
        """Passes on what worker 0 has written, as far as the terminal takes it.

        A terminal that is held, or a pipe that nobody reads, must not keep us from
        watching; what it does not take is shown later, and is in the log.
        """
        with contextlib.suppress(FileNotFoundError), open(self.worker(0), "rb") as log:
            log.seek(self._shown)
            while chunk := log.read(CHUNK):
                taken = offer(sys.stdout.fileno(), chunk, seconds)
                self._shown += taken
                if taken < len(chunk):
                    return

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
