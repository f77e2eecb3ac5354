"""The benchmark of all modes, in a short form: real fleets, in time slots."""

import json
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
from launched import default_signals, ending, wait_until
from modes_slots import busy_share
from paths import ROOT
from tiny_runs import sets_of

pytestmark = [pytest.mark.fleets, pytest.mark.timeout(400)]

SECONDS = 180  # two fleets take about 30 on two quiet cores
STEPS = 32
FLAGS = ["--configs", "drill", "--modes", "local-sgd", "--seeds", "1", "--slow", "1x4"]
FLAGS += ["--learners", "2", "--steps", str(STEPS), "--points", "2"]
FLAGS += sets_of("model.num_layers=1", "model.unroll=1")


def command(folder: Path, *more: str) -> list[str]:
    script = str(ROOT / "benchmarks" / "modes.py")
    return [sys.executable, script, *FLAGS, "--folder", str(folder), *more]


def run(folder: Path, *more: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        command(folder, *more), capture_output=True, text=True, timeout=SECONDS
    )


def processes_of(folder: Path) -> dict[str, str]:
    """Returns the states of processes whose command line names the folder."""
    found = {}
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if str(folder) in file.read_text(errors="replace"):
                state = file.with_name("stat").read_text().rpartition(")")[2].split()[0]
                found[file.parent.name] = state
        except (FileNotFoundError, ProcessLookupError):
            continue  # it has ended meanwhile
    return found


def test_a_slow_learner_changes_the_speed_and_nothing_else(tmp_path):
    done = run(tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert not processes_of(tmp_path)
    rows = json.loads((tmp_path / "results.json").read_text())
    even, slowed = (
        rows[f"drill-local-sgd-0-{kind}"]["result"] for kind in ("even", "slowed")
    )
    # In lockstep, timing has no influence on what is computed.
    losses = [[point[2] for point in result["points"]] for result in (even, slowed)]
    assert losses[0] == losses[1] and losses[0][-1] < 4.1  # it begins at ln(64) = 4.16
    assert [point[0] for point in even["points"]] == [16 * STEPS // 2, 16 * STEPS]
    assert even["commits"] == STEPS // 8 and even["rounds"] == 2 * even["commits"]
    assert even["dropped"] == 0 and even["staleness"] == [0.0, 0]
    allowed = slowed["allowed"]
    assert allowed[1] < 0.6 * allowed[0]
    assert 0 < slowed["busy"] <= 1 and even["busy"] > 0
    assert "local-sgd" in (tmp_path / "drill-slow.txt").read_text()
    ElementTree.parse(tmp_path / "drill-slow.svg")

    again = run(tmp_path)
    assert "2 trainings, 2 of them done before" in again.stdout
    other = run(tmp_path, "--share", "0.4")
    assert other.returncode and "share=0.3, expected 0.4; give" in other.stderr


def test_killed_it_leaves_nobody_behind(tmp_path):
    """Not even a learner that is stopped, which could not end by itself."""
    output = tmp_path / "output"
    with open(output, "wb") as file, default_signals():
        process = subprocess.Popen(
            command(tmp_path),
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    with ending(process):
        stopped = lambda: "T" in processes_of(tmp_path).values()  # noqa: E731
        wait_until(stopped, process, output, SECONDS)
        process.send_signal(signal.SIGKILL)
        process.wait()
    deadline = time.monotonic() + 30
    while left := processes_of(tmp_path):
        assert time.monotonic() < deadline, left
        time.sleep(0.1)


def test_cores_that_always_had_work_were_busy_all_the_time():
    """Exactly, and not a rounding error more; also if the kernel corrects iowait."""
    before = (11_017, 3, 2_203, 47_011, 108, 0, 17, 0)
    after = (13_119, 3, 2_310, 47_011, 107, 0, 19, 1)
    assert busy_share(before, after) == 1
    assert busy_share(before, (*after[:3], 47_011 + 2_212, 108, *after[5:])) == 0.5
    assert busy_share(before, before) == 0
