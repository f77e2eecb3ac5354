"""The processes that tests start are always ended, with their children."""

import signal
import sys
import time
from pathlib import Path

import jobs
import pytest

pytestmark = pytest.mark.processes

# Ignores SIGTERM as jax does, and has a child that does too.
STUBBORN = """
import os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen(["sleep", "1000"])
print(os.getpid(), child.pid, os.environ["NPROC"], flush=True)
time.sleep(1000)
"""


def is_running(pid: int) -> bool:
    """Whether it still runs; a child of a killed process may wait to be reaped."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat.rpartition(")")[2].split()[0] not in "ZX"


def ends(pid: int, within: float = 5.0) -> bool:
    """A killed process takes a moment to go, and nobody waits for a grandchild."""
    deadline = time.monotonic() + within
    while is_running(pid) and time.monotonic() < deadline:
        time.sleep(0.01)
    return not is_running(pid)


def test_processes_are_killed_with_their_children_at_the_time_limit():
    found = jobs.run_job(2, 3, [sys.executable, "-c", STUBBORN], timeout=5)
    assert [process.status for process in found] == [-signal.SIGKILL] * 2
    for process in found:
        *pids, num_threads = map(int, process.stdout.split())
        assert len(pids) == 2 and num_threads >= 12
        assert all(ends(pid) for pid in pids)


def test_processes_are_killed_when_the_test_is_interrupted(monkeypatch):
    started = []
    popen = jobs.subprocess.Popen

    def noted(*args, **settings):
        started.append(popen(*args, **settings))
        return started[-1]

    def interrupt(seconds):
        raise KeyboardInterrupt

    monkeypatch.setattr(jobs.subprocess, "Popen", noted)
    monkeypatch.setattr(jobs.time, "sleep", interrupt)
    begin = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        jobs.run_job(2, 1, [sys.executable, "-c", STUBBORN], timeout=60)
    assert time.monotonic() - begin < 30
    assert [process.returncode for process in started] == [-signal.SIGKILL] * 2
