"""Ledgers of growing data and of mixtures: the same on any number of processes."""

import signal
import sys
from pathlib import Path

import growing_folder
import jobs
import mixed_run
import pytest
from growing_folder import history
from paths import SUPPORT

from meshloom.trainer.record import ledger_audit
from meshloom.trainer.run import train

pytestmark = pytest.mark.processes
ADDS = "3:a.npz:60 8:z.npz:70"


def job(root: Path, processes: int, devices: int, *, kill_at: int = -1) -> list:
    """Runs the command in the folder `root` as a job that adds the files itself."""
    growing_folder.write(root / "data", "m.npz", 100)
    text = growing_folder.CONFIG.format(path=root / "data")
    (root / "follow.gin").write_text(text)
    argv = [sys.executable, str(SUPPORT / "growing_folder.py"), "train", "--follow"]
    argv += ["--config", str(root / "follow.gin"), "--workdir", str(root / "run")]
    argv += ["--cpu-devices", str(devices), "--mesh", "data=2,fsdp=-1"]
    env = {
        "PYTHONPATH": str(SUPPORT),
        "FOLLOWING_FOLDER": str(root / "data"),
        "FOLLOWING_ADDS": ADDS,
        "FOLLOWING_KILL": str(kill_at),
    }
    if processes == 1:
        return jobs.run_processes([env], devices, argv, 240)
    return jobs.run_job(processes, devices, argv, 240, env=env)


@pytest.fixture(scope="module")
def expected(tmp_path_factory) -> dict:
    """The history of a run in this process, with the same files."""
    root = tmp_path_factory.mktemp("alone")
    growing_folder.write(root / "data", "m.npz", 100)
    adds = growing_folder.Adds(root / "data", growing_folder.adds_from(ADDS))
    train.train(
        growing_folder.config(root / "data"), workdir=root / "run", hooks=[adds]
    )
    found = history(root / "run")
    assert len(found) > 10
    return found


def test_the_same_ledger_after_kill_9_and_with_fewer_processes(expected, tmp_path):
    """Both processes die in the middle of the first new file; one goes on alone."""
    for process in job(tmp_path, 2, 2, kill_at=7):
        assert process.status == -signal.SIGKILL, process.stdout + process.stderr
    assert set(history(tmp_path / "run")) <= set(range(1, 8))
    (last,) = job(tmp_path, 1, 2)
    assert last.status == 0, last.stdout + last.stderr
    assert "Resuming from step 5" in last.stdout
    assert history(tmp_path / "run") == expected
    found = ledger_audit.audit(tmp_path / "run")
    assert found.faults == [] and len(found.history) == len(expected)


@pytest.mark.slow
@pytest.mark.parametrize("processes", [2, 4])
def test_the_same_ledger_on_several_processes(processes, expected, tmp_path):
    for process in job(tmp_path, processes, 4 // processes):
        assert process.status == 0, process.stdout + process.stderr
    assert history(tmp_path / "run") == expected
    assert ledger_audit.audit(tmp_path / "run").faults == []


def mixed_job(root: Path, processes: int, devices: int, *, kill_at: int = -1) -> list:
    """Runs the command on a mixture in the folder `root` as a job."""
    (root / "mixed.gin").write_text(mixed_run.write(root / "data"))
    argv = [sys.executable, str(SUPPORT / "growing_folder.py"), "train"]
    argv += ["--config", str(root / "mixed.gin"), "--workdir", str(root / "run")]
    argv += ["--cpu-devices", str(devices), "--mesh", "data=2,fsdp=-1"]
    env = {
        "PYTHONPATH": str(SUPPORT),
        "FOLLOWING_FOLDER": str(root / "data"),
        "FOLLOWING_KILL": str(kill_at),
    }
    if processes == 1:
        return jobs.run_processes([env], devices, argv, 240)
    return jobs.run_job(processes, devices, argv, 240, env=env)


@pytest.mark.slow
def test_a_mixture_has_the_same_ledger_on_4_2_and_1_processes(tmp_path):
    """4 processes die at step 5, 2 at step 11, where the weights have changed."""
    mixed_run.write(tmp_path / "alone" / "data")
    alone = tmp_path / "alone" / "run"
    train.train(mixed_run.config(tmp_path / "alone" / "data"), workdir=alone)
    for processes, kill_at in ((4, 5), (2, 11)):
        for process in mixed_job(tmp_path, processes, 4 // processes, kill_at=kill_at):
            killed = process.status == -signal.SIGKILL
            assert killed, process.stdout + process.stderr
    (last,) = mixed_job(tmp_path, 1, 4)
    assert last.status == 0, last.stdout + last.stderr
    assert "Resuming from step " in last.stdout  # a save may have been under way
    assert history(tmp_path / "run") == history(alone)
    found = ledger_audit.audit(tmp_path / "run")
    assert found.faults == [] and len(found.history) == 14
