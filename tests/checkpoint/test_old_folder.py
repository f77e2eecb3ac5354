"""A run folder of an earlier version resumes where it ended.

tests/golden/run was written by version 0.1.0 (its environment.json has all versions):

    meshloom train --config run.gin --steps 4 --workdir run --mesh fsdp=2,data=2 \
      --cpu-devices 4

It is never written again. A change that cannot read it needs a way to read both.
"""

import shutil

import numpy as np
from paths import ROOT
from tiny_runs import main

from meshloom.trainer.checkpoint import manifest
from meshloom.trainer.record import metrics

GOLDEN = ROOT / "tests" / "golden" / "run"
DIGEST = "cae8df4b9965db27"  # of the state at step 4
# Of steps 5 and 6, as that version continued it; another CPU may round differently.
LOSSES = [2.572315216064453, 2.514125108718872]


def test_the_folder_of_an_earlier_version_resumes_bit_equal(tmp_path, capfd):
    """On another mesh than its own."""
    folder = tmp_path / "run"
    shutil.copytree(GOLDEN, folder)
    argv = ["train", "--config", str(GOLDEN.with_suffix(".gin"))]
    argv += ["--workdir", str(folder), "--steps", "6", "--mesh", "data=4,fsdp=2"]
    assert main(argv) == 0
    assert "Resuming from step 4" in capfd.readouterr().out
    events = metrics.read(folder / "ledger.jsonl")
    restored = [row["state"] for row in events if row["event"] == "restore"]
    saved = manifest.state_digest(manifest.read(folder / "checkpoints", 4))
    assert restored == [saved] == [DIGEST]
    before, after = (metrics.read(x / "metrics.jsonl") for x in (GOLDEN, folder))
    assert after[:4] == before
    assert [row["step"] for row in after] == [1, 2, 3, 4, 5, 6]
    losses = [row["loss"] for row in after[4:]]
    np.testing.assert_allclose(losses, LOSSES, rtol=1e-5)
