"""A fleet with two coordinators and a real etcd: the one that leads dies."""

import json
import re

import pytest
from real_fleets import SMALL, check_replay, real_fleet

from meshloom.trainer.cli import main
from meshloom.trainer.verify.etcd_cluster import etcd_cluster

pytestmark = [pytest.mark.fleets, pytest.mark.slow, pytest.mark.timeout(500)]


def test_the_other_coordinator_leads_and_everything_is_proved(tmp_path, capfd):
    """The short forms: tests/launch/test_fleet.py and tests/processes/test_serve.py."""
    train = [*SMALL, "--steps", "24"]
    with etcd_cluster(tmp_path) as etcd:
        flags = ["--coordinators", "2", "--store", etcd.url("run")]
        flags += ["--save-commits", "2"]
        with real_fleet(tmp_path, train, flags=flags) as fleet:
            home = fleet.run / "service" / "log"
            fleet.until_commit(7)
            address = (home / "address").read_text().strip()
            capfd.readouterr()
            token = str(fleet.run / "logs" / "token")
            assert main(["serve", "clean", address, "--token-file", token]) == 0
            assert re.search(r"^run: removed \d+ entries", capfd.readouterr().out, re.M)
            (leader,) = {
                event["name"]
                for event in fleet.events()
                if event["event"] == "start" and address in event["command"][1:]
                if event["name"].startswith("coordinator")
            }
            fleet.kill(leader)
            assert fleet.status() == 0, fleet.text
            starts = fleet.starts()
    assert starts[leader] > 1
    # A busy machine may depose the other one too; nobody else is restarted.
    others = {name: n for name, n in starts.items() if "coordinator" not in name}
    assert set(others.values()) == {1}, others
    events = [json.loads(x) for x in (home / "events.jsonl").read_text().splitlines()]
    led = [row for row in events if row["event"] == "leads"]
    terms = [row["term"] for row in led]
    assert len(terms) > 1 and terms == sorted({*terms})
    assert {row["address"] for row in led} > {address}
    assert fleet.who() == {(0, 1), (1, 1)}  # nobody had to join again
    assert [row["step"] for row in fleet.commits()] == list(range(1, 25))
    assert main(["ledger", "audit", str(fleet.run)]) == 0
    check_replay(fleet.run)
