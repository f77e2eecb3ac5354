"""A supervisor in a process of its own, with fake workers; nothing is left behind."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from launched import default_signals
from test_jobs import ends

FAKE = Path(__file__).with_name("fake_worker.py")
PROGRAM = """
import json, sys
from pathlib import Path
from meshloom.launch.settings import Settings
from meshloom.launch.supervisor import Supervisor
from meshloom.launch.targets.local import Local

folder, command, settings = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
target = Local(json.loads(command), cpu_devices=settings.pop("cpu_devices", None))
target.warm = settings.pop("warm", None)
sys.exit(Supervisor(target, Path(folder), Settings(**settings)).run())
"""
QUICK = dict(first_delay=0.05, longest_delay=0.2, poll_seconds=0.01, end_seconds=0.3)
TIME_LIMIT = 60  # seconds; for a busy machine, a job takes less than 3


class Job:
    """A supervised job; it is killed at the end of the block, or at the time limit."""

    def __init__(
        self, folder: Path, plan: dict, *, processes: int = 2, stdout=None, **settings
    ):
        self.folder, self.logs = folder, folder / "logs"
        command = [sys.executable, str(FAKE), str(folder), json.dumps(plan)]
        settings = {**QUICK, "processes": processes, **settings}
        argv = [sys.executable, "-c", PROGRAM, str(self.logs), json.dumps(command)]
        self._output, self._errors = folder / "stdout", folder / "stderr"
        with (
            open(self._output, "wb") as output,
            open(self._errors, "wb") as errors,
            default_signals(),
        ):
            self.process = subprocess.Popen(
                [*argv, json.dumps(settings)],
                stdin=subprocess.DEVNULL,
                stdout=stdout or output,
                stderr=errors,
                start_new_session=True,
            )

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        pids = self.pids()
        for pid in pids:  # which a supervisor that works has ended
            with contextlib.suppress(ProcessLookupError):
                if os.getsid(pid) in pids:  # a stranger may have got the number
                    os.kill(pid, signal.SIGKILL)

    def status(self) -> int:
        """Waits for the end; every process that was started has gone by then."""
        try:
            status = self.process.wait(TIME_LIMIT)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running\n{self.stderr}") from None
        assert self.pids() and all(ends(pid) for pid in self.pids())
        return status

    def until(self, condition: Callable[[], object]) -> None:
        deadline = time.monotonic() + TIME_LIMIT
        while not condition():
            assert time.monotonic() < deadline and self.process.poll() is None, (
                self.stderr
            )
            time.sleep(0.01)

    def until_stepped(self, attempt: int, processes: int = 2) -> None:
        names = [f"stepped-{attempt}-{number}" for number in range(processes)]
        self.until(lambda: all((self.folder / name).exists() for name in names))

    def send(self, number: int) -> None:
        self.process.send_signal(number)

    @property
    def stderr(self) -> str:
        return self._errors.read_text()

    @property
    def stdout(self) -> str:
        return self._output.read_text()

    def said(self) -> list[str]:
        """The supervisor's lines without the first, which names the log folder."""
        first, *lines = self.stderr.splitlines()
        assert first.endswith(f"logs in {self.logs}"), self.stderr
        prefix = "meshloom launch: "
        assert all(line.startswith(prefix) for line in lines), self.stderr
        return [line.removeprefix(prefix) for line in lines]

    def events(self, kind: str | None = None) -> list[dict]:
        file = self.logs / "supervisor.jsonl"
        lines = file.read_text().splitlines() if file.exists() else []
        found = [json.loads(line) for line in lines]
        return [event for event in found if kind in (None, event["event"])]

    def seen(self) -> list[dict]:
        """What each worker found, by attempt and number."""
        found = [json.loads(p.read_text()) for p in self.folder.glob("seen-*.json")]
        key = lambda env: (int(env["ATTEMPT"]), int(env["PROCESS_ID"]))  # noqa: E731
        return sorted(found, key=key)

    def pids(self) -> list[int]:
        started = [pid for event in self.events("start") for pid in event["pids"]]
        return started + [pid for env in self.seen() for pid in env["pids"]]
