"""The benchmark of compression, in a short form: real fleets, and their bytes."""

import json
import subprocess
import sys

import pytest
from paths import ROOT
from tiny_runs import sets_of

pytestmark = [pytest.mark.fleets, pytest.mark.slow, pytest.mark.timeout(600)]

FLAGS = ["--config", "drill", "--kinds", "dense", "local-int8", "--seeds", "1"]
FLAGS += ["--steps", "100", *sets_of("model.num_layers=1", "model.unroll=1")]


def test_bytes_and_losses_with_and_without_compression(tmp_path):
    """The benchmark fails if bytes are not what the layout says."""
    command = [sys.executable, str(ROOT / "benchmarks" / "compress.py"), *FLAGS]
    command += ["--folder", str(tmp_path)]

    def run() -> str:
        done = subprocess.run(command, capture_output=True, text=True, timeout=500)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    assert "2 trainings, 0 of them done before" in run()
    rows = json.loads((tmp_path / "results.json").read_text())
    moved = {name: sum(row["bytes"].values()) for name, row in rows.items()}
    # One round: nothing is as small as the parameters that are received first.
    assert moved["drill-dense-0"] / moved["drill-local-int8-0"] > 100
    found = run()
    assert "2 trainings, 2 of them done before" in found
    assert (tmp_path / "drill.txt").read_text().strip() in found
