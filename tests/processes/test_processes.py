"""Training as several processes is training as one: same losses, sharded arrays, one
writer, and an end for all when one cannot start.
"""

import dataclasses
import fcntl
import json
import re
import shutil
import socket
import sys
from collections import Counter
from pathlib import Path

import jobs
import numpy as np
import pytest
from job_runs import (
    BATCH,
    HALVES,
    LENGTH,
    NUM_STEPS,
    ROWS,
    TRAIN_ONLY,
    Layout,
    Run,
    Runs,
    start,
    write_config,
)
from launch_job import ENV, train

from meshloom.launch.exit_codes import UNREACHABLE
from meshloom.trainer import data
from meshloom.trainer.record import metrics

pytestmark = pytest.mark.processes

# Devices are laid out process by process and the last axis varies fastest.
LAYOUTS = {
    "one": Layout(1, 1, "data=1", [ROWS], 1),
    "data-across": Layout(
        2, 4, "data=2,fsdp=2,tensor=2", HALVES, 4, ("probe_network=None",)
    ),
    "tensor-across": Layout(2, 4, "tensor=8", [ROWS, ROWS], 8, TRAIN_ONLY),
    "both-across": Layout(
        4, 2, "fsdp=2,tensor=4", [HALVES[0]] * 2 + [HALVES[1]] * 2, 8, TRAIN_ONLY
    ),
}
# The last one also has tensor across processes.
SLOW = {"tensor-across"}
NAMES = [
    n if n not in SLOW else pytest.param(n, marks=pytest.mark.slow) for n in LAYOUTS
]


@pytest.fixture(scope="module")
def config_file(tmp_path_factory) -> Path:
    return write_config(tmp_path_factory.mktemp("config"))


@pytest.fixture(scope="module")
def run_of(tmp_path_factory, config_file):
    runs = Runs(config_file, tmp_path_factory.mktemp("runs"))
    return lambda name: runs(LAYOUTS[name])


# Gloo prints a line for each group of devices, from several threads in bits and pieces.
GLOO = re.compile(
    r"\[Gloo\] Rank|is connected to|peer ranks\.|[\d\s]|"
    r"Expected number of connected peer ranks is :"
)


@pytest.mark.parametrize("name", NAMES[1:])
def test_the_same_losses_and_the_same_start(name, run_of):
    run, one = run_of(name), run_of("one")
    # Sums in another order differ in the last bits, which 20 steps may amplify.
    np.testing.assert_allclose(run.losses(), one.losses(), rtol=1e-5)
    assert run.losses()[-1] < 0.9 * run.losses()[0]
    found, expected = run.state(0), one.state(0)
    params = [path for path in expected if path.startswith("params/")]
    assert len(params) == 10
    for path in params:
        np.testing.assert_array_equal(found[path], expected[path], err_msg=path)


def _num_examples(config_file: Path) -> int:
    folder = str(config_file.parent / "text")
    return len(data.Text(path=folder, length=LENGTH, holdout=0.3).open("train"))


@pytest.mark.parametrize("name", NAMES)
def test_a_process_reads_its_rows_and_no_others(name, run_of, config_file):
    run = run_of(name)
    order = data.Order(_num_examples(config_file), 0)
    for process, rows in enumerate(run.layout.rows):
        places = [step * BATCH + row for step in range(NUM_STEPS) for row in rows]
        expected = Counter(order.index(np.array(places))[1].tolist())
        found = run.read("train", process)
        # The first is also looked at for its shapes, before training.
        assert found.pop(0) >= expected.pop(0, 0)
        assert found == expected


@pytest.mark.parametrize("name", NAMES)
def test_arrays_are_sharded_as_planned_in_every_process(name, run_of):
    run = run_of(name)
    plan = json.loads((run.workdir / "sharding.json").read_text())
    planned = {array["path"]: array for array in plan["arrays"]}
    each = run.layout.devices_each
    held = Counter()
    for process, path, device, _, piece in run.pieces(NUM_STEPS):
        if not path.startswith("params/"):
            continue
        array = planned[path.removeprefix("params/")]
        assert piece.nbytes == array["bytes_per_device"], (path, device)
        assert piece.nbytes * array["ways"] == array["bytes"], path
        held[process] += piece.nbytes
    total = plan["totals"]["bytes_per_device"] * each
    assert held == Counter({p: total for p in range(run.layout.num_processes)})
    # Sharded 8 ways, no process has all of it.
    assert planned["embedding"]["ways"] == run.layout.ways


def test_one_process_writes_and_prints(run_of):
    run = run_of("data-across")
    first, second = run.processes
    assert f"Run folder {run.workdir}\n" in first.stdout
    assert "8 cpu devices in 2 processes" in first.stdout
    assert first.stdout.count("No forecast: how CPU processes share cores") == 1
    assert f"Report: {run.workdir / 'report.html'}\n" in first.stdout
    joining, _, rest = second.stdout.partition("\n")
    assert joining.startswith("process 1 of 2 on host ")
    assert GLOO.sub("", rest) == second.stderr == first.stderr == ""
    written = [
        set((run.recording / f"written-{process}.txt").read_text().split())
        for process in range(2)
    ]
    names = ["metrics.jsonl", "eval.jsonl", "config.json", "report.html", "sample.txt"]
    assert {str(run.workdir / name) for name in names} <= written[0]
    # A checkpoint is written by all, each process its own pieces.
    # In the preflight each briefly leaves a file, to check that the others see it.
    # Each keeps its compiled programs, too.
    strays = [path for path in written[1] if path.startswith(str(run.workdir))]
    parts = ("checkpoints", ".preflight-", "executables")
    allowed = tuple(f"{run.workdir}/{part}" for part in parts)
    assert [path for path in strays if not path.startswith(allowed)] == []


def test_evaluation_and_sampling_take_all_processes(run_of):
    run, one = run_of("data-across"), run_of("one")
    found, expected = (metrics.read(r.workdir / "eval.jsonl") for r in (run, one))
    assert [row["step"] for row in found] == [10, 20]
    for row, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(row["loss"], other["loss"], rtol=1e-5)
    # Two evaluations of two batches, half of the rows in each process; the first
    # example is looked at for its shapes by both.
    read = [run.read("eval", process) for process in (0, 1)]
    assert [rows.pop(0) >= 1 for rows in read] == [True, True]
    assert [sum(rows.values()) for rows in read] == [30, 32]
    assert not set(read[0]) & set(read[1])
    text = (run.workdir / "sample.txt").read_text()
    assert text.startswith("def ") and text == (one.workdir / "sample.txt").read_text()


def test_processes_that_are_alike(run_of):
    """What they have compared, and the network that they have measured."""
    run = run_of("data-across")
    here, work = socket.gethostname(), run.workdir
    record = json.loads((work / "preflight.json").read_text())
    first, second = record["processes"]
    assert first.pop("clock") == pytest.approx(second.pop("clock"), abs=1)
    assert first == second
    assert first["host"] == here and len(first["step"]["program"]) == 64
    assert len(first["config"]) == len(first["code"]) == 64
    assert first["data"]["train source"] == "Text"
    assert "environ" not in (work / "preflight.json").read_text()
    events = [row for row in metrics.read(work / "ledger.jsonl")]
    (event,) = (row for row in events if row["event"] == "preflight")
    assert event["hosts"] == [here, here]
    assert event["seconds"] == record["seconds"] < 1
    assert not list(work.glob(".preflight*"))
    network = json.loads((work / "network.json").read_text())
    assert network["mesh"] == {"data": 2, "fsdp": 2, "tensor": 2}
    assert network["hosts"] == [here, here]
    spanned = {figure["axis"]: figure["processes"] for figure in network["figures"]}
    assert spanned == {"data": 2, "fsdp": 1, "tensor": 1}
    assert "Network by mesh axis:\naxis " in run.processes[0].stdout
    assert "Network by" not in run.processes[1].stdout


def interrupted(run: Run, workdir: Path) -> Path:
    """A copy of the run as if it had been killed after step 10 was saved."""
    shutil.copytree(run.workdir, workdir)
    shutil.rmtree(workdir / "checkpoints" / "20")
    return workdir


def test_the_same_processes_resume_bit_for_bit(run_of, config_file, tmp_path):
    whole = run_of("data-across")
    folder = interrupted(whole, tmp_path / "work")
    layout = dataclasses.replace(whole.layout, settings=TRAIN_ONLY)
    resumed = start(layout, config_file, folder)
    assert [p.status for p in resumed.processes] == [0, 0], resumed.processes
    np.testing.assert_array_equal(resumed.losses(), whole.losses())
    found, expected = resumed.state(NUM_STEPS), whole.state(NUM_STEPS)
    assert found.keys() == expected.keys()
    for path in expected:
        np.testing.assert_array_equal(found[path], expected[path], err_msg=path)
    # Steps 11 to 20 and no others were computed again.
    read = resumed.read("train", 0)
    order = data.Order(_num_examples(config_file), 0)
    again = order.index(np.arange(10 * BATCH, 20 * BATCH).reshape(10, BATCH)[:, :8])[1]
    expected = Counter(again.ravel().tolist())
    assert read.pop(0) >= expected.pop(0, 0)
    assert read == expected


def test_one_process_resumes_what_two_have_written(run_of, config_file, tmp_path):
    whole = run_of("data-across")
    folder = interrupted(whole, tmp_path / "work")
    alone = Layout(1, 8, whole.layout.mesh, [ROWS], 4, TRAIN_ONLY)
    program = (str(Path(sys.executable).with_name("meshloom")),)
    resumed = start(alone, config_file, folder, program)
    assert resumed.processes[0].status == 0, resumed.processes
    np.testing.assert_array_equal(resumed.losses()[:10], whole.losses()[:10])
    np.testing.assert_allclose(resumed.losses(), whole.losses(), rtol=1e-5)
    assert "in 1 process, mesh" in resumed.processes[0].stdout


@pytest.mark.parametrize(
    "change, message",
    {
        "half": ({"MESHLOOM_NUM_PROCESSES": None}, "MESHLOOM_NUM_PROCESSES is not set"),
        "outside": ({"MESHLOOM_PROCESS_ID": "2"}, "MESHLOOM_PROCESS_ID is 2, but"),
        "no port": ({"MESHLOOM_COORDINATOR": "here"}, "expected host:port"),
    }.values(),
)
def test_a_wrong_description_ends_with_one_line(change, message, tmp_path):
    env = jobs.job_env(2) | {"MESHLOOM_PROCESS_ID": "1"} | change
    env = {name: value for name, value in env.items() if value is not None}
    argv = [sys.executable, "-m", "meshloom.trainer.cli", "train"]
    argv += ["--cpu-devices", "1", "--workdir", str(tmp_path / "work")]
    # Far less than the five minutes that jax would wait for the other process.
    (found,) = jobs.run_processes([env], 1, argv, 60)
    assert (found.status, found.stdout) == (2, "")
    assert message in found.stderr and found.stderr.count("\n") == 1
    assert not (tmp_path / "work").exists()


def test_what_stops_one_process_stops_all(config_file, tmp_path):
    folder = tmp_path / "work"
    folder.mkdir()
    layout = Layout(2, 1, "data=2", HALVES, 1, TRAIN_ONLY)
    with open(folder / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        first, second = start(layout, config_file, folder).processes
    assert (first.status, second.status) == (2, 2), (first, second)
    assert "is in use by another process" in first.stderr
    words = f"process 0 on {socket.gethostname()} failed, and every other process"
    assert words in second.stderr and "is in use by another" in second.stderr
    assert first.stderr.count("\n") == second.stderr.count("\n") == 1
    assert [path.name for path in folder.iterdir()] == [".lock"]


def test_an_error_in_one_process_ends_the_job(tmp_path):
    argv = [sys.executable, "-m", "meshloom.trainer.cli", *train(tmp_path / "work")]
    argv += ["--cpu-devices", "1"]
    first, second = jobs.run_job(2, 1, argv, 240, env=ENV | {"MORTAL_BROKEN": "1"})
    assert second.stderr.startswith("meshloom: disk: Input/output error. This may be ")
    assert second.status == UNREACHABLE
    assert first.status not in (0, 2), first  # its collective has lost its peer
