"""Learners on different meshes, across processes, against the ordinary trainer."""

import json
import os
import signal
import subprocess
from collections import Counter
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
from launched import default_signals, ending, wait_until
from real_fleets import ENV, SECONDS, SMALL, check_replay, real_fleet
from tiny_runs import COMMAND, command, main, sets_of

from meshloom.service.blocks.layout import Layout
from meshloom.trainer.record import metrics

pytestmark = [pytest.mark.fleets, pytest.mark.timeout(500)]


def run(*argv: str) -> str:
    done = command(*argv, timeout=SECONDS, env=ENV)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def losses(folder: Path) -> np.ndarray:
    return np.array([row["loss"] for row in metrics.read(folder / "metrics.jsonl")])


def check_bytes(folder: Path, pull_share: float = 1.0) -> None:
    """Checks the bytes in the metrics of a fleet that pushes float32.

    Args:
      pull_share: the size of a change, relative to the parameters.
    """
    spec = json.loads((folder / "spec.json").read_text())
    layout = Layout.from_json(spec["layout"])
    sizes: dict[int, int] = dict.fromkeys(layout.fragments, 0)  # of fragments
    for block in layout.blocks:
        sizes[layout.fragment_of(block.index)] += layout.block_bytes(block.index)
    rows = metrics.read(folder / "commits.jsonl")
    for row, commit in zip(metrics.read(folder / "metrics.jsonl"), rows, strict=True):
        assert row["bytes"] == len(commit["contributions"]) * sizes[commit["fragment"]]
    for learner in (folder / "learners").iterdir():
        own = [r for r in metrics.read(learner / "metrics.jsonl") if "version" in r]
        fragments = [sizes[i % len(sizes)] for i in range(len(own))]
        assert [row["pushed_bytes"] for row in own] == fragments
        # Since the round before: at first all parameters, and then what was merged.
        changes = [pull_share * size for size in fragments[:-1]]
        pulled = [sum(sizes.values()), *changes]
        assert [row["pulled_bytes"] for row in own] == pulled


def test_sync_is_data_parallel(tmp_path):
    """Learners of four meshes in one run; AdamW with clipping."""
    meshes = ("data=2", "fsdp=2", "tensor=2", "data=1")
    flags = ["--cpu-devices", "2", "--each", "3 --cpu-devices 1"]
    for number, mesh in enumerate(meshes):
        flags += ["--each", f"{number} --mesh {mesh}"]
    train = [*SMALL, "--steps", "20", *sets_of("max_grad_norm=0.5")]
    with real_fleet(tmp_path, train, learners=4, flags=flags) as fleet:
        assert fleet.status() == 0, fleet.text
    alone = tmp_path / "alone"
    ordinary = [*train, "--cpu-devices", "4", "--mesh", "data=4"]
    run("train", *ordinary, "--workdir", str(alone))
    assert fleet.num_busy_servers() == 2  # so clipping needs the norm over both
    found, expected = losses(fleet.run), losses(alone)
    assert len(found) == 20
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    scales = [row["scale"] for row in fleet.commits()]
    assert min(scales) < 0.9 and sum(scale < 1 for scale in scales) > 5, scales
    for learner, axis in enumerate(("data", "fsdp", "tensor")):
        folder = fleet.run / "learners" / str(learner)
        arrays = json.loads((folder / "sharding.json").read_text())
        assert arrays["mesh"][axis] == 2
        if axis != "data":
            assert axis in json.dumps(arrays["arrays"]), arrays  # really sharded
    check_bytes(fleet.run)
    check_replay(fleet.run)


class Parts:
    """A training whose processes are started one by one, as on machines of their own.

    Attributes:
      run: the folder of the training.
    """

    def __init__(self, folder: Path, stack: ExitStack):
        self.folder, self.run = folder, folder / "home" / "run"
        self._stack = stack

    def start(self, name: str, *argv: str) -> subprocess.Popen:
        with open(self.folder / name, "wb") as output, default_signals():
            process = subprocess.Popen(
                [COMMAND, *argv],
                cwd=self.folder,
                env={**os.environ, **ENV},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        return self._stack.enter_context(ending(process))

    def learner(self, number: int, mesh: str, *launch: str) -> subprocess.Popen:
        """Starts one of four learners, under a supervisor if `launch` says so."""
        train = ["train", *SMALL, "--steps", "40", "--mesh", mesh]
        train += sets_of('exchange.mode="async"', "exchange.start_with=3")
        # Rounds that take their time, so that the others are still there later.
        train += sets_of("exchange.wait=2.2")
        train += ["--exchange", f"{self.address}/run", "--learner", f"{number}/4"]
        train += ["--workdir", str(self.run / "learners" / str(number))]
        if launch:
            return self.start(f"learner {number}", "launch", *launch, "--", *train)
        return self.start(f"learner {number}", *train, "--cpu-devices", "2")

    @property
    def address(self) -> str:
        return (self.folder / "home" / "address").read_text().strip()

    def rounds(self) -> Counter[int]:
        """Returns how many rounds of each learner are committed."""
        file = self.run / "commits.jsonl"
        rows = metrics.read(file) if file.exists() else []
        return Counter(p["learner"] for row in rows for p in row["contributions"])

    def text(self, name: str) -> str:
        return (self.folder / name).read_text(errors="replace")


def test_an_asynchronous_run_with_a_death_and_a_late_learner_replays(tmp_path, capsys):
    """Four learners: one of two processes, one that is killed, one that comes late."""
    with ExitStack() as stack:
        parts = Parts(tmp_path, stack)
        flags = ["--folder", "home", "--servers", "2", "--once"]
        center = parts.start("center", "serve", "--role", "coordinator", *flags)
        address, output = tmp_path / "home" / "address", tmp_path / "center"
        wait_until(address.exists, center, output, SECONDS)
        for name in ("a", "b"):
            where = ["--coordinator", parts.address, "--folder", name]
            parts.start(f"server {name}", "serve", "--role", "server", *where)
        learners = [
            parts.learner(
                0, "fsdp=2", "local", "--processes", "2", "--cpu-devices", "1"
            ),
            parts.learner(
                1, "tensor=2", "local", "--processes", "1", "--cpu-devices", "2"
            ),
            parts.learner(2, "data=2"),
        ]
        wait_until(lambda: parts.rounds()[2] >= 2, center, output, SECONDS)
        late = parts.learner(3, "data=2")
        wait_until(
            lambda: parts.rounds()[3] >= 1, late, tmp_path / "learner 3", SECONDS
        )
        log = parts.run / "learners" / "1" / "logs" / "supervisor.jsonl"
        events = [json.loads(line) for line in log.read_text().splitlines()]
        starts = [event for event in events if event["event"] == "start"]
        os.kill(starts[-1]["pids"][0], signal.SIGKILL)
        for number, process in enumerate((*learners, late)):
            assert process.wait(SECONDS) == 0, parts.text(f"learner {number}")
        assert center.wait(SECONDS) == 0, parts.text("center")
    commits = metrics.read(parts.run / "commits.jsonl")
    keys = [
        (part["learner"], part["incarnation"], part["round"])
        for row in commits
        for part in row["contributions"]
    ]
    assert {learner for learner, *_ in keys} == {0, 1, 2, 3}
    assert {incarnation for learner, incarnation, _ in keys if learner == 1} == {1, 2}
    assert min(round for learner, _, round in keys if learner == 3) > 1  # it came late
    assert max(r["staleness"] for r in metrics.read(parts.run / "metrics.jsonl"))
    said = run("certify", "--run", str(parts.run))
    assert f"hold for {len(commits)} commits of 4 learners" in said
    certificate = json.loads((parts.run / "certificate.json").read_text())
    assert certificate["passed"] and certificate["state"]["words"] == "bit-equal"
    assert [x["processes"] for x in certificate["learners"]] == [2, 1, 1, 1]
    assert main(["ledger", "audit", str(parts.run)]) == 0
    assert "exactly one update" in capsys.readouterr().out


def test_compressed_changes_replay_after_a_death(tmp_path):
    """With top-k the learner comes back with what it had not sent.

    It pulls all elements when it comes back, and changes before and after.

    Gradients are compressed in test_fleet.py.
    """
    flags = ["--cpu-devices", "2"]
    flags += ["--each", "0 --mesh fsdp=2", "--each", "1 --mesh tensor=2"]
    train = [*SMALL, "--steps", "72", *sets_of('exchange.push="topk:0.01"')]
    train += sets_of('exchange.pull="int8"')
    train += sets_of('exchange.mode="diloco"', "exchange.local_steps=6")
    train += sets_of("exchange.wait=1.0")
    with real_fleet(tmp_path, train, flags=flags) as fleet:
        fleet.until_saved(1)
        fleet.until(lambda: (1, 1) in fleet.who())
        fleet.until_commit(2)  # it has sent something, and received changes
        fleet.kill("learner 1")
        assert fleet.status() == 0, fleet.text
    assert fleet.who() == {(0, 1), (1, 1), (1, 2)}
    joined = [row for row in fleet.ledger(1) if row["event"] == "joined"]
    assert joined[-1]["optimizer_step"] > 0
    check_replay(fleet.run)
    spec = json.loads((fleet.run / "spec.json").read_text())
    assert spec["compression"] == {"push": "topk:0.01", "pull": "int8"}
    rows = metrics.read(fleet.run / "learners" / "0" / "metrics.jsonl")
    first, *later = [row["pulled_bytes"] for row in rows if "version" in row]
    # Rows of 64 columns are sharded by the mesh, so a scale is for fewer numbers.
    assert {size < 0.32 * first for size in later} == {True}, (first, later)


def test_fragments_that_arrive_late_are_replayed(tmp_path):
    """Streaming: fragments in turn, merged two steps later with a share of a half."""
    flags = ["--cpu-devices", "2"]
    flags += ["--each", "0 --mesh fsdp=2", "--each", "1 --mesh tensor=2"]
    train = [*SMALL, "--steps", "36", *sets_of('exchange.mode="streaming-diloco"')]
    train += sets_of("exchange.local_steps=12", 'exchange.pull="bfloat16"')
    with real_fleet(tmp_path, train, flags=flags) as fleet:
        assert fleet.status() == 0, fleet.text
    rows = fleet.commits()
    assert {row["fragment"] for row in rows} == {0, 1, 2, 3}
    assert len(rows) == 12
    check_bytes(fleet.run, pull_share=0.5)
    check_replay(fleet.run)
    assert sum(row["event"] == "round" for row in fleet.ledger(0)) == 12


def test_learners_stop_together_when_the_loss_no_longer_falls(tmp_path, capsys):
    """The example of docs/digits.md in short."""
    num_learners, num_steps = 2, 1000  # the steps of the config
    train = ["--config", "digits", *sets_of("schedule.value=5e-3")]
    train += sets_of("stop_patience=2", "stop_min_change=0.02")
    flags = ["--cpu-devices", "1"]
    with real_fleet(tmp_path, train, learners=num_learners, flags=flags) as fleet:
        assert fleet.status() == 0, fleet.text
    folder, commits = fleet.run, fleet.commits()
    final = json.loads((folder / "final.json").read_text())
    assert fleet.num_busy_servers() == 2
    assert final["version"] == len(commits) < num_steps // 10
    assert "in 2 evaluations the held-out loss did not fall by" in final["stopped"]
    assert all(len(row["contributions"]) == num_learners for row in commits)
    evals = metrics.read(folder / "eval.jsonl")
    # Every second round, and at the end the final parameters once more.
    versions = [row["step"] for row in evals]
    assert versions[:-1] == list(range(2, final["version"] + 1, 2))
    assert versions[-1] == final["version"]
    assert evals[-1]["accuracy"] > 0.9
    for learner in range(num_learners):
        own = folder / "learners" / str(learner)
        (stopped,) = [x for x in fleet.ledger(learner) if x["event"] == "stopped"]
        assert stopped["reason"] == final["stopped"]
        tested = metrics.read(own / "test.jsonl")
        assert len(tested) == 1 and tested[0]["accuracy"] == pytest.approx(
            metrics.read(folder / "learners" / "0" / "test.jsonl")[0]["accuracy"]
        )
    assert main(["ledger", "audit", str(folder)]) == 0
    assert "exactly one update" in capsys.readouterr().out
    check_replay(folder)
