"""Learners below mergers, as processes: a merger is killed, and the log replays."""

import contextlib
import json
import os
import signal
from pathlib import Path

import pytest
from launched import wait_until
from real_fleets import SMALL, check_replay
from test_exchange import Parts
from tiny_runs import main, sets_of

from meshloom.trainer.record import metrics

LIMIT = 500
pytestmark = [pytest.mark.fleets, pytest.mark.timeout(3 * LIMIT)]


class Tree(Parts):
    """A service, two mergers, and learners below them."""

    def begin(self, num_learners: int) -> list:
        self.center = self.start("center", "serve", "--folder", "home", "--once")
        home = self.folder / "home" / "address"
        wait_until(home.exists, self.center, self.folder / "center", LIMIT)
        self.mergers = []
        for name in ("m0", "m1"):
            flags = ["--upstream", self.address, "--folder", name, "--once"]
            self.mergers.append(self.start(f"merger {name}", "serve", *flags))
            output = self.folder / f"merger {name}"
            file = self.folder / name / "address"
            wait_until(file.exists, self.mergers[-1], output, LIMIT)
        half = num_learners // 2
        return [
            self.below(i, num_learners, f"m{i // half}") for i in range(num_learners)
        ]

    def below(self, number: int, num_learners: int, merger: str):
        address = (self.folder / merger / "address").read_text().strip()
        where = f"{address},{self.address}/run"
        train = ["train", *SMALL, "--steps", "32", "--cpu-devices", "1"]
        train += sets_of('exchange.mode="local-sgd"', "exchange.local_steps=4")
        train += sets_of("exchange.wait=1.0", f"batch_size={num_learners}")
        train += ["--exchange", where, "--learner", f"{number}/{num_learners}"]
        train += ["--workdir", str(self.run / "learners" / str(number))]
        return self.start(f"learner {number}", *train)

    def commits(self) -> list[dict]:
        file: Path = self.run / "commits.jsonl"
        return metrics.read(file) if file.exists() else []


@pytest.mark.slow
@pytest.mark.parametrize("num_learners", [8])
def test_a_tree_goes_on_without_a_merger_and_replays(tmp_path, capsys, num_learners):
    """The short form is in tests/service/test_merger.py."""
    with contextlib.ExitStack() as stack:
        tree = Tree(tmp_path, stack)
        learners = tree.begin(num_learners)
        output = tmp_path / "center"
        wait_until(lambda: len(tree.commits()) >= 2, tree.center, output, LIMIT)
        os.kill(tree.mergers[1].pid, signal.SIGKILL)
        for number, process in enumerate(learners):
            assert process.wait(LIMIT) == 0, tree.text(f"learner {number}")
        assert tree.center.wait(LIMIT) == 0, tree.text("center")
        assert tree.mergers[0].wait(LIMIT) == 0, tree.text("merger m0")
    rows, half = tree.commits(), num_learners // 2
    assert len(rows) == 8
    who = {(p["learner"], p["incarnation"]) for r in rows for p in r["contributions"]}
    assert who == {(learner, 1) for learner in range(num_learners)}
    assert all(len(row["contributions"]) == num_learners for row in rows)
    sizes = [[len(tree["of"]) for tree in row["sums"]] for row in rows]
    assert [half, half] in sizes and sizes[-1] == [half], sizes  # before, and after
    assert main(["ledger", "audit", str(tree.run)]) == 0
    assert "exactly one update" in capsys.readouterr().out
    check_replay(tree.run)
    final = json.loads((tree.run / "final.json").read_text())
    assert final["version"] == 8
