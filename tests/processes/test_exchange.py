"""Learners on different meshes, across processes, against the ordinary trainer."""

import json
import os
import signal
import subprocess
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

import numpy as np
import pytest
from launched import default_signals, ending, wait_until
from test_jobs import ends
from tiny_runs import COMMAND

from meshloom.launch.fleet_status import last_commit
from meshloom.service.blocks.layout import Layout
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


@contextmanager
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
    with closing(Log.embedded(file)) as log:
        (job,) = log.jobs()
        specs = [entry.body for entry in log.read(job) if entry.kind == "spec"]
    return len(specs[0]["servers"])


def losses(folder: Path) -> np.ndarray:
    return np.array([row["loss"] for row in metrics.read(folder / "metrics.jsonl")])


def replay(folder: Path) -> str:
    return run("rounds", "replay", str(folder / "run"), folder=folder)


def check_bytes(folder: Path) -> None:
    """Checks the bytes in the metrics of a fleet, which pulls and pushes float32."""
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
        pulled = [sum(sizes.values()), *fragments[:-1]]
        assert [row["pulled_bytes"] for row in own] == pulled


def test_sync_is_data_parallel(tmp_path):
    """Learners of four meshes in one run; AdamW with clipping."""
    meshes = ("data=2", "fsdp=2", "tensor=2", "data=1")
    flags = ["--learners", "4", "--servers", "2", "--cpu-devices", "2"]
    for number, mesh in enumerate(meshes):
        flags += ["--each", f"{number} --mesh {mesh}"]
    flags += ["--each", "3 --cpu-devices 1"]
    train = ["--config", "drill", "--steps", "20"]
    train += ["--set", "max_grad_norm=0.5", "--set", "exchange.block_bytes=8192"]
    with fleet(tmp_path, flags, train) as process:
        finish(process, tmp_path)
    ordinary = [*train, "--cpu-devices", "4", "--mesh", "data=4"]
    run("train", *ordinary, "--workdir", "ordinary", folder=tmp_path)
    assert num_busy_servers(tmp_path) == 2  # so clipping needs the norm over both
    found, expected = losses(tmp_path / "run"), losses(tmp_path / "ordinary")
    assert len(found) == 20
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    scales = [row["scale"] for row in metrics.read(tmp_path / "run" / "commits.jsonl")]
    assert min(scales) < 0.9 and sum(scale < 1 for scale in scales) > 5, scales
    for learner, axis in enumerate(("data", "fsdp", "tensor")):
        folder = tmp_path / "run" / "learners" / str(learner)
        arrays = json.loads((folder / "sharding.json").read_text())
        assert arrays["mesh"][axis] == 2
        if axis != "data":
            assert axis in json.dumps(arrays["arrays"]), arrays  # really sharded
    check_bytes(tmp_path / "run")
    assert "are bit-equal" in replay(tmp_path)


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
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        return self._stack.enter_context(ending(process))

    def learner(self, number: int, mesh: str, *launch: str) -> subprocess.Popen:
        """Starts one of four learners, under a supervisor if `launch` says so."""
        train = ["train", "--config", "drill", "--steps", "120", "--mesh", mesh]
        train += ["--set", 'exchange.mode="async"', "--set", "exchange.start_with=3"]
        # Rounds that take their time, so that the others are still there later.
        train += ["--set", "exchange.wait=0.6", "--set", "exchange.block_bytes=8192"]
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


def test_an_asynchronous_run_with_a_death_and_a_late_learner_replays(tmp_path):
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
        wait_until(lambda: parts.rounds()[2] >= 10, center, output, SECONDS)
        late = parts.learner(3, "data=2")
        wait_until(
            lambda: parts.rounds()[3] >= 1, late, tmp_path / "learner 3", SECONDS
        )
        log = parts.run / "learners" / "1" / "logs" / "supervisor.jsonl"
        starts = [json.loads(line) for line in log.read_text().splitlines()]
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
    said = run("certify", "--run", str(parts.run), folder=tmp_path)
    assert f"hold for {len(commits)} commits of 4 learners" in said
    certificate = json.loads((parts.run / "certificate.json").read_text())
    assert certificate["passed"] and certificate["state"]["words"] == "bit-equal"
    assert [x["processes"] for x in certificate["learners"]] == [2, 1, 1, 1]
    audit = run("ledger", "audit", str(parts.run), folder=tmp_path)
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
    check_bytes(tmp_path / "run")
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
    audit = run("ledger", "audit", "run", folder=tmp_path)
    assert "exactly one update" in audit
    assert "are bit-equal" in replay(tmp_path)
