"""A process behind ssh: here a shell stands for ssh, on the same machine."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from launched import ending
from test_jobs import ends

from meshloom.launch import exit_codes, remote

REMOTE = str(Path(remote.__file__))
FAR = ["sh", "-c", f"exec {sys.executable} -I -S {REMOTE} far"]


def near(command: list[str], *, ssh=FAR, silence=30.0, names="PATH", folder=None):
    argv = [sys.executable, "-I", "-S", REMOTE, "near", "b", str(silence), names]
    return subprocess.Popen(
        [*argv, *command, "--", *ssh],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
        cwd=folder,
        env={**os.environ, "GIVEN": "sentinel", "HIDDEN": "other"},
    )


def sleeper(folder: Path, on_term: str = "exit 75") -> list[str]:
    """Writes its number to a file and waits, with a child of its own."""
    script = f"trap '{on_term}' TERM; echo $$ > {folder}/pid; sleep 100 & wait; wait"
    return ["sh", "-c", script]


def pid_of(folder: Path) -> int:
    deadline = time.monotonic() + 20
    while not (text := _read(folder / "pid")):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return int(text)


def _read(path: Path) -> str:
    return path.read_text().strip() if path.exists() else ""


@pytest.mark.parametrize("script, status", [("exit 0", 0), ("exit 75", 75)])
def test_the_status_comes_back(script, status):
    with ending(near(["sh", "-c", f"echo hello; {script}"])) as process:
        out, err = process.communicate(timeout=30)
        assert (process.returncode, out, err) == (status, "hello\n", "")


def test_a_signal_comes_back_as_a_signal():
    with ending(near(["sh", "-c", "kill -9 $$"])) as process:
        assert process.wait(30) == -signal.SIGKILL


def test_it_runs_in_our_folder_with_the_variables_that_are_named(tmp_path):
    script = 'echo "$PWD $GIVEN"'
    with ending(near(["sh", "-c", script], names="GIVEN", folder=tmp_path)) as process:
        assert process.communicate(timeout=30)[0] == f"{tmp_path} sentinel\n"


def test_a_folder_that_is_not_there(tmp_path):
    gone = tmp_path / "gone"
    gone.mkdir()
    ssh = ["sh", "-c", f"rmdir {gone}; {FAR[-1]}"]
    with ending(near(["true"], ssh=ssh, folder=gone)) as process:
        _, err = process.communicate(timeout=30)
        assert process.returncode == 2
        assert f"folder {gone}: No such file" in err and "on every host" in err


def test_a_host_that_cannot_be_reached():
    with ending(near(["true"], ssh=["sh", "-c", "exit 255"])) as process:
        _, err = process.communicate(timeout=30)
        assert process.returncode == exit_codes.UNREACHABLE
        assert "meshloom: cannot reach b with sh" in err


def test_told_to_stop_it_passes_it_on(tmp_path):
    with ending(near(sleeper(tmp_path))) as process:
        pid = pid_of(tmp_path)
        process.terminate()
        assert process.wait(30) == 75
        assert ends(pid)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_process_that_nobody_wants_any_more_ends(number, tmp_path):
    """Where the near side is gone, or says nothing: a host that was cut off."""
    with ending(near(sleeper(tmp_path, on_term=":"), silence=2.0)) as process:
        pid = pid_of(tmp_path)
        os.kill(process.pid, number)
        assert ends(pid)
