"""Runs the probe, which needs jax, in a subprocess that may crash or hang."""

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

# Lines that best explain why a process crashed, most specific first.
REASONS = (
    r"(Unknown flags? in XLA_FLAGS: \S+)",
    r"^(\w*(?:Error|Exception)\b.*)",
)


class ProbeProcess:
    """A running probe. Several can run at the same time."""

    def __init__(self, *args: str, environ: Mapping[str, str], seconds: float):
        self._seconds, self._begin = seconds, time.monotonic()
        self._output = tempfile.TemporaryFile()
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "meshloom.trainer.doctor.probe", *args],
            env=dict(environ),
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def result(self) -> dict[str, Any]:
        """Returns what the probe found, or {"error": ...} if it crashed or timed out.

        Does not wait long for a killed probe: a process stuck in a driver may not die.
        """
        left = self._seconds - (time.monotonic() - self._begin)
        try:
            status = self._process.wait(max(left, 0.1))
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(1)
            return {"error": f"no response within {self._seconds:g} s"}
        finally:
            self._output.seek(0)
            text = self._output.read().decode(errors="replace")
            self._output.close()
        for line in text.splitlines():
            if line.startswith(MARK):
                return json.loads(line.removeprefix(MARK))
        return {"error": reason(text) or f"exited with status {status}"}


def reason(text: str) -> str:
    """Returns the line of a crashed program's output that best explains the crash."""
    for pattern in REASONS:
        if found := re.findall(pattern, text, re.MULTILINE):
            return found[-1].strip()[:300]
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:300] if lines else ""
