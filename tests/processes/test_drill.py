"""Fault drills: a short form on real processes, and the comparison of runs."""

import json
import os
import shutil
import subprocess
import time
from pathlib import Path

import pytest
from bigram import CONFIG
from launch_job import ENV
from tiny_runs import COMMAND, command, main, refused, sets_of, train

from meshloom.trainer.record import ledger
from meshloom.trainer.verify import drill, drill_faults, drill_job, soak

SHORT = ["--steps", "60", "--save-every", "10"]
# A model whose parameters are sharded across processes, and that compiles fast.
QUICK = ["--config", CONFIG, "--mesh", "fsdp=-1"]


@pytest.mark.processes
@pytest.mark.timeout(450)
def test_a_short_drill(tmp_path):
    """On a mesh whose processes read and write other bytes; one fault of each kind.

    Process 0 killed between save and commit; a stopped worker; a torn commit; one
    process whose storage fails it once, and one that cannot write.
    """
    names = ["kill-first-before-commit", "sigstop", "torn-commit"]
    names += ["connection-reset", "file-limit-of-one"]
    argv = ["drill", *SHORT, "--workdir", str(tmp_path / "drill"), "--faults", *names]
    found = command(*argv, *QUICK, env=ENV, timeout=400)
    assert found.returncode == 0, found.stdout + found.stderr
    rows = [line.split() for line in found.stdout.splitlines()[-len(names) :]]
    for name, row in zip(names, rows, strict=True):
        assert row[:2] == [name, "yes"] and float(row[2]) > 0
        # It comes right after a checkpoint, so there may be no step to redo.
        assert int(row[3]) > 0 or name == "connection-reset"
        assert row[4:] == ["bit-equal", "exact", "bit-equal"]
    written = json.loads((tmp_path / "drill" / "drill.json").read_text())
    assert [row["fault"] for row in written] == names
    assert all(row["recovered"] for row in written)


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_the_whole_drill(tmp_path):
    meshes = ["data=-1", "fsdp=-1", "tensor=2", "data=2,fsdp=2@4", "pipe=2"]
    argv = ["drill", "--workdir", str(tmp_path / "drill"), "--mesh", *meshes]
    found = command(*argv, timeout=7000)
    assert found.returncode == 0, found.stdout + found.stderr
    number = len(meshes) * len(drill_faults.FAULTS)
    assert f"\n{number} of {number} recovered" in found.stdout


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_short_soak(tmp_path):
    argv = ["drill", "--workdir", str(tmp_path / "soak"), "--soak", "5"]
    found = command(*argv, "--steps", "2000", timeout=800)
    assert found.returncode == 0, found.stdout + found.stderr
    assert "kills recovered from       5 of 5\n" in found.stdout
    assert "soak: same as without kills" in found.stdout


@pytest.mark.processes
def test_a_drill_that_is_killed_leaves_nobody_behind(tmp_path):
    argv = [COMMAND, "drill", *SHORT, *QUICK, "--workdir", str(tmp_path / "drill")]
    process = subprocess.Popen(argv, env=os.environ | ENV, start_new_session=True)
    file = tmp_path / "drill" / "reference" / "logs" / "supervisor.jsonl"
    deadline = time.monotonic() + 60
    try:
        while not (file.exists() and '"start"' in file.read_text()):
            assert time.monotonic() < deadline and process.poll() is None
            time.sleep(0.05)
    finally:
        process.kill()
        process.wait()
    events = [json.loads(line) for line in file.read_text().splitlines()]
    pids = [pid for event in events for pid in event.get("pids", [event.get("pid")])]
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    folder = tmp_path_factory.mktemp("drill") / "reference"
    assert main([*train(folder), *sets_of("log_every=1")]) == 0
    return folder


@pytest.fixture
def other(reference, tmp_path):
    shutil.copytree(reference, tmp_path / "run")
    return tmp_path / "run"


def test_the_same_run_is_the_same(reference, other):
    found = drill.compare(other, reference, same_mesh=True)
    assert found.recovered and found.recomputed == 0
    assert (found.state, found.data, found.losses) == (
        "bit-equal",
        "exact",
        "bit-equal",
    )


def edit(path, change) -> None:
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    change(rows)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_another_loss_is_found(reference, other):
    edit(other / "metrics.jsonl", lambda rows: rows[1].update(loss=1.0))
    found = drill.compare(other, reference, same_mesh=True)
    assert "losses differ by" in found.problem and "at step 2" in found.problem


@pytest.mark.parametrize(("drift", "allowed"), [(1e-6, True), (1e-4, False)])
def test_a_little_drift_is_allowed_on_another_mesh_only(
    reference, other, drift, allowed
):
    def resumed(rows):
        places = [r.get("step", 0) == 2 and r["event"] == "step" for r in rows]
        rows.insert(places.index(True), {"event": "restore", "step": 1})

    edit(other / ledger.FILE, resumed)
    edit(
        other / "metrics.jsonl",
        lambda rows: rows[1].update(loss=rows[1]["loss"] * (1 + drift)),
    )
    assert drill.compare(other, reference, same_mesh=False).recovered == allowed
    assert not drill.compare(other, reference, same_mesh=True).recovered


def test_a_lost_step_is_found(reference, other):
    def drop(rows):
        del rows[[r["event"] for r in rows].index("step")]

    edit(other / ledger.FILE, drop)
    found = drill.compare(other, reference, same_mesh=True)
    assert "data: audit" in found.problem and "is missing" in found.problem


def test_another_state_is_found(reference, other):
    file = other / "checkpoints" / "4" / "manifest" / "metadata"
    saved = json.loads(file.read_text())
    saved["arrays"]["params/embedding"]["digest"] = "0" * 16
    file.write_text(json.dumps(saved))
    found = drill.compare(other, reference, same_mesh=True)
    assert found.problem == "the final state differs"


def test_a_table_of_several_meshes():
    found = [
        drill.Result("sigterm", "data=-1", seconds=3.0),
        drill.Result("sigterm", "fsdp=4@4", problem="lost"),
        drill.Result("read-only", "data=-1", skipped="cannot mount file systems here"),
        drill.Result("read-only", "fsdp=4@4", seconds=7.25),
    ]
    assert drill.table(found).splitlines()[:4] == [
        "seconds to recover  data=-1  fsdp=4@4",
        "sigterm                 3.0    FAILED",
        "read-only           skipped       7.2",
        "2 of 4 recovered: state and losses bit-equal (on another mesh, losses within "
        "1e-05), every sample used once, in the same update",
    ]


def test_the_text_of_a_soak():
    found = soak.Soak(4, [2.0, 4.0, 9.0], span=30.0)
    assert "kills recovered from       3 of 4\n" in str(found)
    assert "recovery, median           4.0 s\n" in str(found)
    assert "goodput                    50 % of the time on new steps\n" in str(found)


def test_wrong_input(tmp_path, capfd):
    assert "'flood' is not a fault" in refused(capfd, ["drill", "--faults", "flood"])
    assert "at least 2 processes" in refused(capfd, ["drill", "--processes", "1"])
    line = refused(capfd, ["drill", "--mesh", "fsdp=-1", "tensor=3@4"])
    assert line.startswith("mesh tensor=3 needs 3 devices, but there are 4")
    line = refused(capfd, ["drill", "--mesh", "fsdp=-1@x"])
    assert "expected a number of processes after @, found 'x'" in line
    line = refused(capfd, ["drill", "--soak", "3", "--mesh", "fsdp=-1", "data=-1"])
    assert line.startswith("a soak takes one --mesh, got 2")
    (tmp_path / "mine").touch()
    line = refused(capfd, ["drill", "--workdir", str(tmp_path)])
    assert line.endswith("is not empty. Remove it, or choose another --workdir.")
    assert main(["drill", "--list"]) == 0
    assert capfd.readouterr().out.splitlines() == list(drill_faults.FAULTS)


def test_a_run_that_ends_before_the_fault(tmp_path):
    """As in a soak with more kills than its steps last for."""
    done = subprocess.Popen(["true"])
    done.wait()
    start = {"event": "start", "pids": [done.pid]}
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "supervisor.jsonl").write_text(json.dumps(start) + "\n")
    with pytest.raises(
        drill_job.Failed, match="exited before the fault, at step 0.* more --steps.*log"
    ):
        drill_job.Job(tmp_path, None, 0.0).kill(0)  # type: ignore
