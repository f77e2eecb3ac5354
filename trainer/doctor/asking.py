"""Asks what only jax can answer, in a process that may break or hang."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from typing import Any

from .probe import MARK

# Lines that say most about why a process broke, the best first.
TELLING = (
    r"(Unknown flags? in XLA_FLAGS: \S+)",
    r"^(\w*(?:Error|Exception)\b.*)",
)


class Question:
    """A probe under way. Others can be asked at the same time."""

    def __init__(self, *words: str, environ: Mapping[str, str], seconds: float):
        self._seconds, self._begin = seconds, time.monotonic()
        self._output = tempfile.TemporaryFile()
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "meshloom.trainer.doctor.probe", *words],
            env=dict(environ),
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def answer(self) -> dict[str, Any]:
        """What the probe said; {"error": ...} where it broke, or is not done in time.

        It is not waited for long after it was killed: a process that is stuck in a
        driver does not die.
        """
        left = self._seconds - (time.monotonic() - self._begin)
        try:
            status = self._process.wait(max(left, 0.1))
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(1)
            return {"error": f"no answer within {self._seconds:g} s"}
        finally:
            self._output.seek(0)
            text = self._output.read().decode(errors="replace")
            self._output.close()
        for line in text.splitlines():
            if line.startswith(MARK):
                return json.loads(line.removeprefix(MARK))
        return {"error": telling_line(text) or f"it ended with status {status}"}


def telling_line(text: str) -> str:
    """The line of a broken program's output that says most."""
    for pattern in TELLING:
        if found := re.findall(pattern, text, re.MULTILINE):
            return found[-1].strip()[:300]
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:300] if lines else ""
