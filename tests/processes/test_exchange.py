"""Learners on different meshes, across processes, against the ordinary trainer."""

import contextlib
import json
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from launched import default_signals, ending, wait_until
from test_jobs import ends
from tiny_runs import COMMAND

from meshloom.launch.fleet_status import last_commit
from meshloom.service.coordinator.log import Log
from meshloom.trainer.record import metrics
from meshloom.trainer.record.ledger import Ledger

pytestmark = [pytest.mark.processes, pytest.mark.timeout(500)]
SECONDS = 240  # about 30 on two quiet cores


def run(*argv: str, folder: Path, env: dict[str, str] | None = None) -> str:
    done = subprocess.run(
        [COMMAND, *argv],
        cwd=folder,
        env={**os.environ, **(env or {})},
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@contextlib.contextmanager
def fleet(folder: Path, flags: list[str], train: list[str]) -> Iterator:
    """A fleet on this machine that writes to `run`; ends with everything it started."""
    output = folder / "output"
    command = [COMMAND, "launch", "local", *flags, "--", "train", *train]
    with open(output, "wb") as file, default_signals():
        process = subprocess.Popen(
            [*command, "--workdir", str(folder / "run")],
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    with ending(process):
        yield process


def finish(process: subprocess.Popen, folder: Path) -> None:
    output = (folder / "output").read_text
    assert process.wait(SECONDS) == 0, output(errors="replace")
    pids = [
        pid
        for file in folder.glob("run/**/supervisor.jsonl")
        for line in file.read_text().splitlines()
        for pid in json.loads(line).get("pids", [])
    ]
    assert pids and all(ends(pid) for pid in pids)


def num_busy_servers(folder: Path) -> int:
    """Returns how many servers had blocks of the job; a small model may idle some."""
    (file,) = folder.glob("run/**/coordinator.db")
    with contextlib.closing(Log.embedded(file)) as log:
        (job,) = log.jobs()
        specs = [entry.body for entry in log.read(job) if entry.kind == "spec"]
    return len(specs[0]["servers"])


def losses(folder: Path) -> np.ndarray:
    return np.array([row["loss"] for row in metrics.read(folder / "metrics.jsonl")])


def replay(folder: Path) -> str:
    return run("rounds", "replay", str(folder / "run"), folder=folder)


def test_sync_is_data_parallel(tmp_path):
    """Two learners of two processes each, fsdp and tensor; AdamW with clipping."""
    flags = ["--learners", "2", "--servers", "2", "--processes", "2"]
    flags += ["--cpu-devices", "1"]
    flags += ["--each", "0 --mesh fsdp=2", "--each", "1 --mesh tensor=2"]
    train = ["--config", "drill", "--steps", "20"]
    train += ["--set", "exchange.block_bytes=8192"]
    with fleet(tmp_path, flags, train) as process:
        finish(process, tmp_path)
    ordinary = [*train, "--cpu-devices", "2", "--mesh", "data=2"]
    run("train", *ordinary, "--workdir", "ordinary", folder=tmp_path)
    assert num_busy_servers(tmp_path) == 2  # so clipping needs the norm over both
    found, expected = losses(tmp_path / "run"), losses(tmp_path / "ordinary")
    assert len(found) == 20
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    for learner, axis in enumerate(("fsdp", "tensor")):
        folder = tmp_path / "run" / "learners" / str(learner)
        arrays = json.loads((folder / "sharding.json").read_text())
        assert axis in json.dumps(arrays["arrays"]), arrays  # really sharded
    assert "are bit-equal" in replay(tmp_path)


def test_an_asynchronous_run_with_a_death_and_a_late_learner_replays(tmp_path):
    flags = ["--learners", "3", "--servers", "2", "--cpu-devices", "2"]
    flags += ["--each", "0 --mesh fsdp=2", "--each", "1 --mesh tensor=2"]
    train = ["--config", "drill", "--steps", "200", "--mesh", "data=2"]
    train += ["--set", "batch_size=12", "--set", 'exchange.mode="async"']
    train += ["--set", "exchange.block_bytes=8192"]
    commits = tmp_path / "run" / "commits.jsonl"

    def num_commits() -> int:
        return commits.read_bytes().count(b"\n") if commits.exists() else 0

    with fleet(tmp_path, flags, train) as process:
        wait = tmp_path / "output"
        wait_until(lambda: num_commits() >= 60, process, wait, SECONDS)
        log = tmp_path / "run" / "learners" / "1" / "logs" / "supervisor.jsonl"
        starts = [json.loads(line) for line in log.read_text().splitlines()]
        os.kill(starts[-1]["pids"][0], signal.SIGKILL)
        finish(process, tmp_path)
    rows = metrics.read(commits)
    incarnations = {
        part["incarnation"]
        for row in rows
        for part in row["contributions"]
        if part["learner"] == 1
    }
    assert len(incarnations) == 2, incarnations  # it died, and came back late
    assert max(
        row["staleness"] for row in metrics.read(commits.parent / "metrics.jsonl")
    )
    assert "are bit-equal" in replay(tmp_path)
    audit = run("ledger", "audit", "run/learners/1", folder=tmp_path)
    assert "exactly one update" in audit


@pytest.mark.parametrize(
    ("push", "settings", "num_steps", "kill_at"),
    [
        ("int8", ['exchange.mode="sync"'], 60, 20),
        ("topk:0.01+int8", ['exchange.mode="sync"'], 60, 20),
        ("topk:0.01", ['exchange.mode="diloco"', "exchange.local_steps=6"], 120, 8),
    ],
    ids=["int8", "topk", "topk of changes"],
)
def test_compressed_contributions_replay_after_a_death(
    push, settings, num_steps, kill_at, tmp_path
):
    """With top-k the learner comes back with what it had not sent."""
    flags = ["--learners", "2", "--servers", "2", "--cpu-devices", "2"]
    flags += ["--each", "0 --mesh fsdp=2", "--each", "1 --mesh tensor=2"]
    train = ["--config", "drill", "--steps", str(num_steps)]
    for setting in (f'exchange.push="{push}"', *settings):
        train += ["--set", setting]
    run_folder = tmp_path / "run"
    with fleet(tmp_path, flags, train) as process:
        output = tmp_path / "output"
        wait_until(
            lambda: (last_commit(run_folder) or 0) >= kill_at, process, output, SECONDS
        )
        log = run_folder / "learners" / "1" / "logs" / "supervisor.jsonl"
        starts = [json.loads(line) for line in log.read_text().splitlines()]
        os.kill(starts[-1]["pids"][0], signal.SIGKILL)
        finish(process, tmp_path)
    rows = metrics.read(run_folder / "commits.jsonl")
    who = {(p["learner"], p["incarnation"]) for r in rows for p in r["contributions"]}
    assert len({incarnation for learner, incarnation in who if learner == 1}) == 2
    own = Ledger(run_folder / "learners" / "1", is_writer=False).read()
    assert [row for row in own if row["event"] == "joined"][-1]["optimizer_step"] > 0
    assert "are bit-equal" in replay(tmp_path)
    spec = json.loads((run_folder / "spec.json").read_text())
    assert spec["compression"] == {"push": push}


def test_fragments_that_arrive_late_are_replayed(tmp_path):
    """Streaming: fragments in turn, merged two steps later with a share of a half."""
    flags = ["--learners", "2", "--servers", "2", "--cpu-devices", "2"]
    flags += ["--each", "0 --mesh fsdp=2", "--each", "1 --mesh tensor=2"]
    train = ["--config", "drill", "--steps", "36"]
    train += ["--set", 'exchange.mode="streaming-diloco"']
    train += ["--set", "exchange.local_steps=12"]
    with fleet(tmp_path, flags, train) as process:
        finish(process, tmp_path)
    rows = metrics.read(tmp_path / "run" / "commits.jsonl")
    assert {row["fragment"] for row in rows} == {0, 1, 2, 3}
    assert len(rows) == 12
    assert "are bit-equal" in replay(tmp_path)
    own = Ledger(tmp_path / "run" / "learners" / "0", is_writer=False).read()
    assert sum(row["event"] == "round" for row in own) == 12


def test_learners_stop_together_when_the_loss_no_longer_falls(tmp_path):
    """The example of docs/digits.md in short."""
    num_learners, num_steps = 4, 1000  # the steps of the config
    flags = ["--learners", str(num_learners), "--servers", "2", "--cpu-devices", "1"]
    train = ["--config", "digits", "--set", "schedule.value=5e-3"]
    train += ["--set", "stop_patience=2", "--set", "stop_min_change=0.02"]
    with fleet(tmp_path, flags, train) as process:
        finish(process, tmp_path)
    folder = tmp_path / "run"
    final = json.loads((folder / "final.json").read_text())
    commits = metrics.read(folder / "commits.jsonl")
    assert num_busy_servers(tmp_path) == 2
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
        rows = Ledger(own, is_writer=False).read()
        (stopped,) = [row for row in rows if row["event"] == "stopped"]
        assert stopped["reason"] == final["stopped"]
        tested = metrics.read(own / "test.jsonl")
        assert len(tested) == 1 and tested[0]["accuracy"] == pytest.approx(
            metrics.read(folder / "learners" / "0" / "test.jsonl")[0]["accuracy"]
        )
    audit = run("ledger", "audit", "run/learners/1", folder=tmp_path)
    assert "exactly one update" in audit
    assert "are bit-equal" in replay(tmp_path)
