"""`meshloom serve status` against a service on loopback, and its errors in one line."""

import io
import json
import re
import threading
import time
from importlib import metadata

import pytest
from services import spec

from meshloom.service.coordinator.coordinator import Coordinator
from meshloom.service.coordinator.servers import RemoteServer
from meshloom.service.coordinator.settings import Settings
from meshloom.service.server.server import ServerProcess
from meshloom.service.wire.calls import Channel, Server
from meshloom.trainer.cli import main
from meshloom.trainer.commands import serve_status
from meshloom.trainer.commands.serve_events import StatusLines

TOKEN = "secret"


class Service:
    """A coordinator and a server in this process, with a token."""

    def __init__(self, folder):
        self.coordinator = Coordinator(
            folder,
            num_servers=1,
            version=metadata.version("meshloom"),
            settings=Settings(),
            connect=lambda n, a: RemoteServer(n, a, Channel(a, TOKEN)),
            clock=time.monotonic,
            say=lambda *_, **__: None,
        )
        self.calls = Server(
            "127.0.0.1:0", self.coordinator.methods, token=TOKEN, num_threads=8
        )
        self.address = f"127.0.0.1:{self.calls.port}"
        self.server = ServerProcess(name="s0", coordinator=self.address, token=TOKEN)

    def close(self) -> None:
        self.server.close()
        self.coordinator.close()
        self.calls.close()


@pytest.fixture
def service(tmp_path, monkeypatch):
    from meshloom.service.server import server as module

    monkeypatch.setattr(module, "BEAT_SECONDS", 0.1)
    (tmp_path / "token").write_text(TOKEN)
    service = Service(tmp_path / "folder")
    yield service
    service.close()


@pytest.fixture
def status(service, tmp_path, capsys):
    """Runs the command; returns its exit status, output and errors."""

    def run(target: str, *flags: str, token: str | None = None):
        path = tmp_path / "token"
        if token is not None:
            path = tmp_path / "other"
            path.write_text(token)
        argv = ["serve", "status", target, "--token-file", str(path), *flags]
        code = main(argv)
        return code, *capsys.readouterr()

    return run


@pytest.fixture
def job(service):
    service.coordinator.methods["OpenJob"](spec())
    service.coordinator.methods["Join"]({"job": "run", "learner": 1})
    deadline = time.monotonic() + 20

    def is_shown() -> bool:
        found = service.coordinator.status({})
        is_held = found["servers"][0].get("blocks")
        return bool(is_held and found["jobs"]["run"].get("members"))

    while not is_shown():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_members_and_servers_are_shown(service, status, job):
    code, out, err = status(f"{service.address}/run")
    assert (code, err) == (0, "")
    assert re.search(r"^1 server; term 1, meshloom ", out, re.M)
    assert re.search(r"^  s0 +\d+\.\d s ago +4 +128 B +0 +0 B/s +0 B/s$", out, re.M)
    assert "run: waiting for the initial parameters, version 0" in out
    assert re.search(r"^  1 +1 +joined +\d+\.\d s ago +0 +0 +0$", out, re.M)


def test_json_is_what_the_coordinator_says(service, status, job):
    code, out, _ = status(service.address, "--json")
    found = json.loads(out)
    assert code == 0 and list(found["jobs"]) == ["run"]
    assert found["servers"][0]["jobs"][0]["blocks"] == 4


def test_flags_may_come_before_the_action(service, job, tmp_path, capsys):
    path = str(tmp_path / "token")
    assert main(["serve", "--token-file", path, "status", service.address]) == 0
    assert "run: waiting" in capsys.readouterr().out
    assert main(["serve", "--bind", "1.2.3.4:1", "status", service.address]) == 2
    assert capsys.readouterr().err == "meshloom: serve status: --bind is not for it\n"


ERRORS = {
    "token": ("{}", 2, "refused Status: wrong or missing token; give the token", "no"),
    "job": ("{}/walk", 2, r"there is no job 'walk' at .*, but \['run'\]", None),
    "nobody": (
        "127.0.0.1:1",
        69,
        "no answer to Status .*Does `meshloom serve` ru",
        None,
    ),
    "address": ("here", 2, "'here': expected HOST:PORT or HOST:PORT/JOB, where", None),
    "slash": ("{}/", 2, "expected HOST:PORT or HOST:PORT/JOB, where", None),
    "server": ("SERVER", 2, "is a server: ask its coordinator", None),
}


@pytest.mark.parametrize("case", ERRORS)
def test_errors_are_one_line(service, status, job, case):
    target, expected, message, token = ERRORS[case]
    target = target.format(service.address).replace("SERVER", service.server.address)
    code, out, err = status(target, token=token)
    assert (code, out) == (expected, "")
    assert re.fullmatch(rf"meshloom: .*{message}.*\n", err), err


def test_serve_without_a_folder_is_refused(capsys):
    assert main(["serve"]) == 2
    assert capsys.readouterr().err == (
        "meshloom: serve: --folder is missing; expected --folder DIR\n"
    )


def test_a_live_table_is_renewed(service, job, monkeypatch):
    """The table of a terminal: rows of the last answer, also while there is none."""
    from meshloom.launch.exit_codes import Unreachable

    shown = []

    class Live:
        def __init__(self, first, **settings):
            shown.append(first)

        def __enter__(self):
            return self

        def __exit__(self, *error):
            return None

        def update(self, table, refresh):
            shown.append(table)

    import rich.console
    import rich.live

    monkeypatch.setattr(rich.live, "Live", Live)
    monkeypatch.setattr(rich.console.Console, "is_terminal", True)
    monkeypatch.setattr(serve_status, "WATCH_SECONDS", 0.0)
    answers = iter([service.coordinator.status({}), Unreachable("gone"), None])

    def ask():
        answer = next(answers)
        if answer is None:
            raise KeyboardInterrupt
        if isinstance(answer, Exception):
            raise answer
        return answer

    with pytest.raises(KeyboardInterrupt):
        serve_status._watch(ask, as_json=False)
    console = rich.console.Console(width=120, record=True, file=io.StringIO())
    for table in shown:
        console.print(table)
    text = console.export_text()
    assert text.count("joined") == 2 and text.count("no answer now: gone") == 1
    assert threading.active_count() > 1


def test_a_job_that_waits_for_servers_has_no_line():
    """A coordinator that was restarted says so for a while, and goes on."""
    now = iter([0.0, 20.0, 40.0, 60.0])
    lines = StatusLines(lambda: next(now))
    waiting = {"run": {"state": "waiting for servers"}}
    running = {"run": {"state": "running", "version": 4}}
    later = {"run": {"state": "running", "version": 8}}
    assert lines.lines(waiting) == []
    assert lines.lines(running) == []
    assert lines.lines(waiting) == []
    (line,) = lines.lines(later)
    assert line.startswith("run: running, version 8, 0.1 rounds/s")


def test_a_line_is_shown_when_a_job_moves():
    """Not when a lease is renewed."""
    times = iter([0.0, 20.0, 40.0])
    lines = StatusLines(lambda: next(times)).lines
    running = {"state": "running", "version": 10, "learners": 2, "num_learners": 3}
    running |= {"waiting": 1, "bytes": 4_000_000, "members": [{"age": 0.1}]}
    assert lines({"a": running}) == []
    assert lines({"a": running | {"members": [{"age": 0.2}]}}) == []
    assert lines({"a": running | {"version": 11}}) == [
        "a: running, version 11, 0.05 rounds/s, learners 2/3 (1 waiting), 0 MB/s"
    ]


def test_a_job_that_waits_for_servers_at_first_has_a_status_line_later():
    now = [0.0]
    status = StatusLines(lambda: now[0])
    assert status.lines({"run": {"state": "waiting for servers"}}) == []
    found = []
    for now[0], version in ((20.0, 3), (40.0, 5)):
        found = status.lines({"run": {"state": "running", "version": version}})
    assert len(found) == 1 and "running, version 5, 0.1 rounds/s" in found[0]
