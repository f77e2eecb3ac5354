"""A job that runs once: how its end is told, and that no process is left."""

import os
import sys
import time

import pytest

from meshloom.launch import once

SLEEP = "import time; time.sleep(600)"


def run(tmp_path, *programs: str, seconds: float = 60.0) -> once.Outcome:
    """Each program notes its process, and that of a child, in a file of its own."""
    source = (
        "import os, subprocess, sys\n"
        "number = os.environ['NUMBER']\n"
        "child = subprocess.Popen(['sleep', '600'])\n"
        f"with open(os.path.join({str(tmp_path)!r}, number + '.pids'), 'w') as file:\n"
        "    file.write(f'{os.getpid()} {child.pid}')\n"
        "exec(os.environ['PROGRAM'])\n"
    )
    envs = [
        {**os.environ, "NUMBER": str(number), "PROGRAM": program}
        for number, program in enumerate(programs)
    ]
    command = [sys.executable, "-S", "-c", source]
    return once.run(command, envs, tmp_path / "logs", seconds=seconds)


def is_alive(pid: int) -> bool:
    """Whether it runs; the dead that nobody has reaped yet do not."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def left(tmp_path) -> list[int]:
    """Processes of the programs that still run, after time to be gone."""
    pids = [int(n) for f in tmp_path.glob("*.pids") for n in f.read_text().split()]
    assert pids
    for _ in range(100):
        if not (alive := [pid for pid in pids if is_alive(pid)]):
            break
        time.sleep(0.05)
    return alive


def test_all_is_well(tmp_path):
    outcome = run(tmp_path, "print('one')", "print('two')")
    assert outcome.reason == "" and not outcome.is_bad_input
    assert (tmp_path / "logs" / "worker-1.log").read_text() == "two\n"
    assert left(tmp_path) == []


FAILURES = {
    "bad input": (
        "print('meshloom: no such mesh', flush=True); sys.exit(2)",
        "worker 0 exited with code 2 (bad input): no such mesh",
    ),
    "an error": (
        "print('Boom'); print(); sys.exit(1)",
        "worker 0 exited with code 1: Boom",
    ),
    "a signal": (
        "print('last words', flush=True); os.kill(os.getpid(), 9)",
        "worker 0 was killed by signal 9 (SIGKILL): last words",
    ),
}


@pytest.mark.parametrize("name", FAILURES)
def test_a_failure_is_told_and_the_others_are_ended(name, tmp_path, monkeypatch):
    monkeypatch.setattr(once, "LEAVE_SECONDS", 0.2)
    program, reason = FAILURES[name]
    outcome = run(tmp_path, f"import time; time.sleep(0.5); {program}", SLEEP)
    assert outcome.reason == reason
    assert outcome.is_bad_input == (name == "bad input")
    assert left(tmp_path) == []


def test_the_time_limit_kills(tmp_path):
    outcome = run(tmp_path, f"print('busy', flush=True); {SLEEP}", seconds=4.0)
    assert outcome.reason == "killed after 4 s; its last line: busy"
    assert not outcome.is_bad_input
    assert left(tmp_path) == []
