"""Forks workers from a warm process, which has already imported everything.

It is started once, with a command line that the target gives, and serves all attempts
of a job on this machine. Its own side is trainer/warm.py. Linux only: its forks become
children of the supervisor, which is their subreaper.
"""

import contextlib
import ctypes
import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from .logs import Logs, say
from .target import GUARD, Command

PR_SET_CHILD_SUBREAPER = 36
# Enough for the imports on a slow disk; after that each worker imports for itself.
ANSWER_SECONDS = 60.0
NAME = "warm"  # of its log
# Set for each worker when it starts, and not read by anything imported earlier.
OWN = "MESHLOOM_"


class Forked:
    """A forked worker, with the part of subprocess.Popen's interface that we use."""

    def __init__(self, pid: int):
        self.pid = pid
        self._status: int | None = None

    def poll(self) -> int | None:
        if self._status is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self._status = os.waitstatus_to_exitcode(status)
        return self._status

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)


class Warm:
    """The process that workers are forked from, if there is one.

    If it fails, that is logged once, and workers are started without it from then on.

    Args:
      argv: its command line; None for no such process.
      is_told: whether we were told to stop, and need not wait for it.
    """

    def __init__(
        self,
        argv: Sequence[str] | None,
        logs: Logs,
        is_told: Callable[[], bool] = lambda: False,
    ):
        self._argv = argv if sys.platform == "linux" else None
        self._logs, self._is_told = logs, is_told
        self._process: subprocess.Popen[bytes] | None = None
        self._env: dict[str, str] = {}
        self._forked: set[int] = set()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._end()

    def fork(self, command: Command, log: Path) -> Forked | None:
        """Forks a worker for the command; None if it must be started another way."""
        if self._argv is None or self._is_told():
            return None
        self._reap()
        env = _common(command.env)
        if self._process is None:
            self._start(self._argv, env)
        elif env != self._env:  # it did its imports in another environment
            return None
        pid = self._ask({"env": dict(command.env), "log": str(log.absolute())})
        if pid is None:
            return None
        self._forked.add(pid)
        return Forked(pid)

    def _start(self, argv: Sequence[str], env: dict[str, str]) -> None:
        if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        self._env = env
        with open(self._logs.of(NAME), "ab") as log:
            self._process = subprocess.Popen(
                [*GUARD, "worker", str(os.getpid()), *argv],
                env=env,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,
            )
        self._logs.event("warm", pid=self._process.pid)

    def _ask(self, request: dict[str, object]) -> int | None:
        assert self._process is not None and self._process.stdin is not None
        line = json.dumps(request | {"parent": os.getpid()}).encode() + b"\n"
        try:
            self._process.stdin.write(line)
            self._process.stdin.flush()
            answer = self._answer()
        except BrokenPipeError:
            answer = b""
        if answer.strip().isdigit():
            return int(answer)
        if not self._is_told():
            self._fail()
        return None

    def _answer(self) -> bytes:
        """Returns one line; b"" if none comes in time."""
        assert self._process is not None and self._process.stdout is not None
        output, line = self._process.stdout.fileno(), b""
        deadline = time.monotonic() + ANSWER_SECONDS
        while not line.endswith(b"\n"):
            if self._is_told() or time.monotonic() > deadline:
                return b""
            if select.select([output], [], [], 0.1)[0]:
                piece = os.read(output, 100)
                if not piece:
                    return b""
                line += piece
        return line

    def _fail(self) -> None:
        text = (
            "the warm process does not answer; from now on each worker imports for "
            f"itself, see {self._logs.of(NAME)}"
        )
        self._logs.event("note", text=text)
        say(text)
        self._end()
        self._argv = None

    def _end(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None

    def _reap(self) -> None:
        """Reaps the dead children of workers, which are ours by now."""
        for group in list(self._forked):
            with contextlib.suppress(ChildProcessError):
                while os.waitpid(-group, os.WNOHANG)[0]:
                    continue
                continue  # some of it still runs
            self._forked.discard(group)


def _common(env: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables that are the same for all workers of all attempts."""
    return {name: value for name, value in env.items() if not name.startswith(OWN)}
