"""A fleet in a process of its own, with fake roles; nothing is left behind."""

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

FAKE = Path(__file__).with_name("fake_role.py")
PROGRAM = """
import json, os, sys
from pathlib import Path
from meshloom.launch.fleet import Fleet, FleetSettings
from meshloom.launch.fleet_parts import Commands
from meshloom.launch.target import Command

run, argvs, settings = Path(sys.argv[1]), json.loads(sys.argv[2]), sys.argv[3]
found = {name: Command(name, argv, os.environ) for name, argv in argvs.items()}
of = lambda role: [c for name, c in found.items() if name.startswith(role)]
roles = found["coordinator"], of("server"), of("learner")
standbys = of("standby")
beat = None if standbys else run / "beat"
commands = Commands(*roles, beat=beat, standbys=standbys)
settings = FleetSettings(**json.loads(settings))
sys.exit(Fleet(lambda: commands, run, run / "logs", settings).run())
"""
QUICK = dict(first_delay=0.05, longest_delay=0.2, poll_seconds=0.01, status_seconds=0.1)
TIME_LIMIT = 60  # seconds; for a busy machine, a fleet takes less than 3
WAIT = {"end": "wait"}


class RunningFleet:
    """A fleet of fake roles; it is killed at the end of the block.

    Args:
      plan: the actions of each role by name, such as "learner 0"; two servers wait and
        the coordinator has finished where nothing else is given.
      argvs: commands of roles that are not fakes.
    """

    def __init__(self, folder: Path, plan: dict, *, argvs=None, **settings):
        self.folder, self.logs = folder, folder / "logs"
        (folder / "seen").mkdir(exist_ok=True)
        service = {"coordinator": [{"final": True}], "server 0": [WAIT]}
        roles = {
            name: [sys.executable, str(FAKE), str(folder), name.replace(" ", "-")]
            + [json.dumps(actions)]
            for name, actions in {**service, "server 1": [WAIT], **plan}.items()
        }
        self._errors, self._output = folder / "stderr", folder / "stdout"
        argv = [sys.executable, "-c", PROGRAM, str(folder)]
        argv += [json.dumps({**roles, **(argvs or {})})]
        argv += [json.dumps({**QUICK, **settings})]
        with (
            open(self._output, "wb") as output,
            open(self._errors, "wb") as errors,
            default_signals(),
        ):
            self.process = subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=output,
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
        for pid in pids:  # which a fleet that works has ended
            with contextlib.suppress(ProcessLookupError):
                if os.getsid(pid) in pids:  # a stranger may have got the number
                    os.kill(pid, signal.SIGKILL)

    def status(self) -> int:
        """Waits for the end; every process that was started has gone by then."""
        try:
            status = self.process.wait(TIME_LIMIT)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running\n{self.stderr}") from None
        left = [pid for pid in self.pids() if not ends(pid)]
        assert self.pids() and not left, self.stderr
        return status

    def until(self, condition: Callable[[], object]) -> None:
        deadline = time.monotonic() + TIME_LIMIT
        while not condition():
            assert time.monotonic() < deadline and self.process.poll() is None, (
                self.stderr
            )
            time.sleep(0.01)

    def until_seen(self, *names: str) -> None:
        """Waits until these starts, such as "learner-0-1", have reported."""
        files = [self.folder / "seen" / f"{name}.json" for name in names]
        self.until(lambda: all(file.exists() for file in files))

    def pids_of(self, name: str) -> list[int]:
        """Returns the process of a start, and its child if it has one."""
        return json.loads((self.folder / "seen" / f"{name}.json").read_text())["pids"]

    def starts(self) -> dict[str, int]:
        """Returns how often each role was started."""
        found: dict[str, int] = {}
        for event in self.events("start"):
            found[event["name"]] = found.get(event["name"], 0) + 1
        return found

    def events(self, kind: str | None = None) -> list[dict]:
        file = self.logs / "supervisor.jsonl"
        lines = file.read_text().splitlines() if file.exists() else []
        found = [json.loads(line) for line in lines]
        return [event for event in found if kind in (None, event["event"])]

    @property
    def stderr(self) -> str:
        return self._errors.read_text()

    @property
    def stdout(self) -> str:
        return self._output.read_text()

    def order(self) -> list[str]:
        """Returns who was told to stop, in order."""
        return (self.folder / "order").read_text().split()

    def pids(self) -> list[int]:
        started = [pid for event in self.events("start") for pid in event["pids"]]
        for file in (self.folder / "seen").glob("*.json"):
            started += json.loads(file.read_text())["pids"]
        return started
