"""A ring of devices in different processes trains as one device does."""

import numpy as np
import pytest
from job_runs import ROWS, TRAIN_ONLY, Layout, Runs, write_config

pytestmark = pytest.mark.processes

RING = ("model.num_kv_heads=2", 'model.context_attention="ring"')
ONE = Layout(1, 1, "data=1", [ROWS], 1, (*TRAIN_ONLY, *RING[:1]))
# Both processes read all rows: each has half of the positions of every example.
TWO = Layout(2, 1, "context=2", [ROWS, ROWS], 1, (*TRAIN_ONLY, *RING))


def test_a_ring_over_two_processes_has_the_losses_of_one_device(tmp_path):
    run_of = Runs(write_config(tmp_path), tmp_path)
    found, expected = run_of(TWO), run_of(ONE)
    np.testing.assert_allclose(found.losses(), expected.losses(), rtol=1e-5)
    for process in range(2):
        assert found.read("train", process) == expected.read("train", 0)
    output = "".join(p.stdout + p.stderr for p in found.processes)
    assert "Attention over context: ring, zig-zag order" in output
