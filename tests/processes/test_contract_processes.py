"""Keys, variables and epochs where arrays are sharded across processes."""

import sys
from pathlib import Path

import jobs
import numpy as np
import pytest
from noisy import CONFIG_TEXT
from paths import SUPPORT

from meshloom.trainer.checkpoint import manifest
from meshloom.trainer.record import metrics

pytestmark = pytest.mark.processes


def train(folder: Path, processes: int, devices: int, mesh: str) -> Path:
    (folder / "noisy.gin").write_text(CONFIG_TEXT)
    workdir = folder / f"run-{processes}"
    argv = [sys.executable, "-m", "meshloom.trainer.cli", "train"]
    argv += ["--config", str(folder / "noisy.gin"), "--workdir", str(workdir)]
    argv += ["--cpu-devices", str(devices), "--mesh", mesh]
    # Other tests look at what these do in several processes.
    settings = ("num_microbatches=2", "check_replicas_every=0", "probe_network=False")
    argv += [part for text in settings for part in ("--set", text)]
    env = {"PYTHONPATH": str(SUPPORT)}
    if processes == 1:
        ended = jobs.run_processes([env], devices, argv, 240)
    else:
        ended = jobs.run_job(processes, devices, argv, 240, env=env)
    for one in ended:
        assert one.status == 0, one.stdout + one.stderr
    return workdir


def test_three_processes_train_as_one_device_does(tmp_path):
    """Each process holds a third of the variables of fsdp, and reads its own rows."""
    one = train(tmp_path, 1, 1, "data=1")
    three = train(tmp_path, 3, 2, "fsdp=3,tensor=2")
    for name, count in (("metrics.jsonl", 8), ("eval.jsonl", 2)):
        found, expected = (
            np.array([row["loss"] for row in metrics.read(run / name)])
            for run in (three, one)
        )
        # Sums of 24 rows in another order; keys and rows are equal bit for bit.
        np.testing.assert_allclose(found, expected, rtol=2e-5)
        assert len(found) == count
    saved = manifest.read(three / "checkpoints", 8)["arrays"]
    assert {path for path in saved if path.startswith("variables/")} == {
        f"variables/{layer}/{kind}"
        for layer in ("input", "hidden")
        for kind in ("mean", "variance")
    }
