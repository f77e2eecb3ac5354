"""The benchmark of servers that come and go, in a short form: real processes."""

import json
import signal
import subprocess
import sys

import pytest
import servers
from paths import ROOT

pytestmark = [pytest.mark.fleets, pytest.mark.timeout(400)]


def test_servers_come_and_go_under_load(tmp_path):
    script, folder = str(ROOT / "benchmarks" / "servers.py"), tmp_path / "servers"
    flags = ["--servers", "3", "--params", "1e5", "--block-bytes", "4096"]
    done = subprocess.run(
        [sys.executable, script, *flags, "--rounds", "2", "--folder", str(folder)],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads((folder / "result.json").read_text())
    names = ["added", "asked to leave", "killed"]
    assert [event["name"] for event in result["events"]] == names
    for event in result["events"]:
        # 98 blocks: their shares differ by chance, since servers have other ports.
        assert 0.4 * event["ideal"] < event["moved"] < 1.8 * event["ideal"], event
        assert event["no_commit_s"] < 60, event
    log = (folder / "coordinator.log").read_text()
    assert "abandoned" not in log and log.count("is lost: not heard of") == 1
    # Who is told to stop ends as one that is preempted, and holds nothing any more.
    assert "no job needs this server" in (folder / "server-2.log").read_text()


@pytest.mark.slow
def test_a_server_that_stands_still_is_left_out_and_comes_back(tmp_path):
    """Streams to it do not end by themselves: learners hear that it is lost."""
    service = servers.Service(tmp_path / "service", 3)
    spec = servers.make_spec(100_000, 4096, 2)
    paused = service.servers[0]
    try:
        with servers.playing(service, spec) as players:
            servers.play(players, 3)
            paused.send_signal(signal.SIGSTOP)
            servers.play(players, 5)  # although it stands still
            assert max(x for p in players for x in p.waits) < 60
            paused.send_signal(signal.SIGCONT)
            servers.wait_for(lambda: len(service.moves()) == 2)
            servers.play(players, 3)
            assert [player.joined for player in players] == [1, 1]
    finally:
        service.close()
    log = (tmp_path / "service" / "coordinator.log").read_text()
    assert "abandoned" not in log and "servers that have come" in log
