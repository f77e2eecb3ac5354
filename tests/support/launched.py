"""Launched jobs that a test watches while they run, and what they leave behind."""

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from meshloom.trainer.record import metrics


@contextlib.contextmanager
def ending(process: subprocess.Popen) -> Iterator[subprocess.Popen]:
    """Kills the process, and what is in its group, at the end of the block."""
    try:
        yield process
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        for pipe in filter(None, (process.stdout, process.stderr)):
            pipe.close()


@contextlib.contextmanager
def default_signals() -> Iterator[None]:
    """What is started in the block takes SIGINT and SIGHUP.

    Tests that a shell runs in the background ignore the first, tests under nohup the
    second, and so would their children.
    """
    numbers = (signal.SIGINT, signal.SIGHUP)
    before = {number: signal.signal(number, signal.SIG_DFL) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def wait_until(
    done: Callable[[], bool], process: subprocess.Popen, output: Path, seconds: float
) -> None:
    """Args:
    output: what the process writes; shown where it has ended or takes too long.
    """
    deadline = time.monotonic() + seconds
    while not done():
        text = output.read_text(errors="replace")
        assert process.poll() is None and time.monotonic() < deadline, text
        time.sleep(0.2)


def step_of(run: Path) -> int:
    """The step that process 0 has reported last; 0 where it has done none."""
    found = run / "logs" / "progress-0.json"
    return json.loads(found.read_text())["step"] or 0 if found.exists() else 0


def losses(run: Path) -> list[float]:
    rows = metrics.read(run / "metrics.jsonl")
    return [row["loss"] for row in rows if "loss" in row]
