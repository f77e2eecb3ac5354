"""The jobs of `meshloom scale`: processes that stay, and answer one request at a time.

Requests and answers are lines of JSON, on stdin and on a pipe of the worker's; its log
gets all else.
"""

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, TextIO

from ...launch.logs import last_line
from ...launch.workers import GUARD

WORKER = "meshloom.trainer.commands.scale_worker"


class JobFailed(Exception):
    """A process of a job ended, or gave no answer in time."""


class Job:
    """The processes of a job; kills them at the end of the context.

    Args:
      spec: passed to every process.
      envs: the environment of each.
      logs: the folder of their logs.
      seconds: how long an answer may take.
    """

    def __init__(
        self,
        spec: Mapping[str, Any],
        envs: Sequence[Mapping[str, str]],
        logs: Path,
        seconds: float,
    ):
        self._spec, self._envs, self._logs = json.dumps(spec), envs, logs
        self._seconds = seconds
        self._workers: list[subprocess.Popen[str]] = []
        self._answers: list[queue.Queue[str | None]] = []
        self._readers: list[threading.Thread] = []

    def __enter__(self) -> "Job":
        self._logs.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-P", "-m", WORKER, self._spec]
        for number, env in enumerate(self._envs):
            with open(self._log(number), "ab") as log:
                worker = subprocess.Popen(
                    [*GUARD, "worker", str(os.getpid()), *command],
                    env=dict(env),
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    text=True,
                    start_new_session=True,
                )
            self._workers.append(worker)
            answers: queue.Queue[str | None] = queue.Queue()
            self._answers.append(answers)
            assert worker.stdout is not None
            reader = threading.Thread(
                target=_read, args=(worker.stdout, answers), daemon=True
            )
            reader.start()
            self._readers.append(reader)
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self._workers:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(worker.pid, signal.SIGKILL)
        for worker in self._workers:
            worker.wait()
            assert worker.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                worker.stdin.close()
        for reader in self._readers:
            reader.join()

    def ask(self, method: str, *args: Any) -> list[dict[str, Any]]:
        """Returns the answer of each process.

        Raises:
          ValueError: what the user must fix.
          JobFailed: a process failed otherwise.
        """
        request = json.dumps([method, *args]) + "\n"
        for number, worker in enumerate(self._workers):
            assert worker.stdin is not None
            try:
                worker.stdin.write(request)
                worker.stdin.flush()
            except BrokenPipeError:
                raise self._failed(number, "ended") from None
        answers = [self._answer(number) for number in range(len(self._workers))]
        for answer in answers:
            if "error" in answer:
                raise ValueError(answer["error"])
        return [answer["found"] for answer in answers]

    def _answer(self, number: int) -> dict[str, Any]:
        try:
            line = self._answers[number].get(timeout=self._seconds)
        except queue.Empty:
            what = f"gave no answer within {self._seconds:g} s"
            raise self._failed(number, what) from None
        if line is None:
            raise self._failed(number, "ended")
        return json.loads(line)

    def _failed(self, number: int, what: str) -> JobFailed:
        log = self._log(number)
        return JobFailed(f"process {number} {what}; {log} ends with: {last_line(log)}")

    def _log(self, number: int) -> Path:
        return self._logs / f"worker-{number}.log"


def _read(pipe: IO[str], answers: "queue.Queue[str | None]") -> None:
    with pipe:
        for line in pipe:
            answers.put(line)
    answers.put(None)


def serve(trials: Any, requests: Iterable[str], answers: TextIO) -> None:
    """Answers requests until there are no more; only a ValueError is an answer too."""
    for line in requests:
        method, *args = json.loads(line)
        try:
            answer = {"found": getattr(trials, method)(*args)}
        except ValueError as error:
            answer = {"error": str(error)}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
