"""Each sample in one update, although learners die and stand still, with real ones."""

import json
import os
import signal
import subprocess
import time
from collections import Counter
from contextlib import ExitStack
from pathlib import Path

import pytest
from launched import default_signals, ending, wait_until
from tiny_runs import COMMAND

from meshloom.service.coordinator.settings import Settings
from meshloom.service.rounds.leases import from_ranges
from meshloom.trainer.record import metrics

pytestmark = [pytest.mark.fleets, pytest.mark.timeout(500)]
SECONDS = 300  # most of it is waiting
NUM_STEPS = 100  # of each learner, in rounds that take half a second
TRAIN = ["train", "--config", "drill", "--steps", str(NUM_STEPS)]
for _setting in (
    'exchange.mode="async"',
    "exchange.wait=1.0",
    "exchange.block_bytes=8192",
    "batch_size=24",
    "data.num_examples=1000",  # so that epochs do not end where blocks do
):
    TRAIN += ["--set", _setting]


class Training:
    """Processes that are started one by one; each writes to a file of its name."""

    def __init__(self, folder: Path, stack: ExitStack):
        self.folder, self.run = folder, folder / "home" / "run"
        self._stack = stack

    def start(self, name: str, *argv: str) -> subprocess.Popen:
        with open(self.folder / name, "wb") as output, default_signals():
            process = subprocess.Popen(
                [COMMAND, *argv],
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        return self._stack.enter_context(ending(process))

    def learner(self, number: int, mesh: str, devices: int) -> subprocess.Popen:
        address = (self.folder / "home" / "address").read_text().strip()
        launch = ["launch", "local", "--processes", "1", "--cpu-devices", str(devices)]
        where = ["--exchange", f"{address}/run", "--learner", f"{number}/3"]
        where += ["--workdir", str(self.home(number)), "--mesh", mesh]
        return self.start(f"learner {number}", *launch, "--", *TRAIN, *where)

    def home(self, learner: int) -> Path:
        return self.run / "learners" / str(learner)

    def pids(self, learner: int) -> list[int]:
        """Returns the processes of a learner that its supervisor started last."""
        log = self.home(learner) / "logs" / "supervisor.jsonl"
        starts = [json.loads(line) for line in log.read_text().splitlines()]
        return [row["pids"] for row in starts if "pids" in row][-1]

    def commits(self) -> list[dict]:
        file = self.run / "commits.jsonl"
        return metrics.read(file) if file.exists() else []

    def rounds(self) -> Counter[tuple[int, int]]:
        """Returns how many rounds of each learner and incarnation are committed."""
        parts = [part for row in self.commits() for part in row["contributions"]]
        return Counter((part["learner"], part["incarnation"]) for part in parts)

    def command(self, *argv: str) -> str:
        done = subprocess.run(
            [COMMAND, *argv], capture_output=True, text=True, timeout=SECONDS
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout


def test_no_sample_is_lost_or_used_twice_by_a_death_and_a_long_pause(tmp_path):
    with ExitStack() as stack:
        training = Training(tmp_path, stack)
        center = training.start("center", "serve", "--folder", "home", "--once")
        output = tmp_path / "center"
        address = tmp_path / "home" / "address"
        wait_until(address.exists, center, output, SECONDS)
        learners = [
            training.learner(0, "fsdp=2", 2),
            training.learner(1, "tensor=2", 2),
            training.learner(2, "data=1", 1),
        ]

        def all_of(count: int) -> bool:
            rounds = training.rounds()
            return min(rounds[learner, 1] for learner in range(3)) >= count

        wait_until(lambda: all_of(4), center, output, SECONDS)
        (dead,), (paused,) = training.pids(1), training.pids(2)
        os.kill(paused, signal.SIGSTOP)
        # For good: its supervisor goes first, and cannot start it again.
        os.kill(learners[1].pid, signal.SIGKILL)
        os.kill(dead, signal.SIGKILL)
        time.sleep(Settings().lease_seconds + 4)
        os.kill(paused, signal.SIGCONT)
        for number in (0, 2):
            text = (tmp_path / f"learner {number}").read_text
            assert learners[number].wait(SECONDS) == 0, text(errors="replace")
        assert center.wait(SECONDS) == 0, output.read_text()
    rounds = training.rounds()
    assert rounds[0, 1] == NUM_STEPS
    assert rounds[1, 1] >= 4 and not rounds[1, 2]
    assert rounds[2, 1] >= 4 and rounds[2, 2]  # it has joined again
    blocks = Counter(
        block
        for row in training.commits()
        for part in row["contributions"]
        for block in from_ranges(part["blocks"])
    )
    assert sorted(blocks) == list(range(sum(rounds.values())))
    assert set(blocks.values()) == {1}
    audit = training.command("ledger", "audit", str(training.run))
    assert "audit: each sample contributed to exactly one update" in audit
    assert f"samples in an update     {8 * len(blocks):,}" in audit, audit
    certified = training.command("certify", "--run", str(training.run))
    assert "state, data and trajectory hold" in certified
    # A block that is counted twice is found.
    rows = training.commits()
    rows[5]["contributions"][0]["blocks"] = rows[4]["contributions"][0]["blocks"]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (training.run / "commits.jsonl").write_text(text)
    with pytest.raises(AssertionError, match="is in commit 5 and again in commit 6"):
        training.command("ledger", "audit", str(training.run))
