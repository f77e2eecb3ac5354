"""What several files of this folder compare with, computed once."""

from pathlib import Path

import pytest
from launch_job import ENV, NUM_STEPS, train
from launched import losses
from tiny_runs import command


@pytest.fixture(scope="session")
def uninterrupted(tmp_path_factory) -> Path:
    """The run folder of the job of `launch_job`, launched on this machine."""
    run = tmp_path_factory.mktemp("uninterrupted") / "run"
    flags = ("--processes", "2", "--cpu-devices", "1")
    argv = ("launch", "local", *flags, "--", *train(run))
    found = command(*argv, env=ENV, timeout=270)
    assert found.returncode == 0, found.stdout + found.stderr
    assert "done at attempt 1" in found.stderr
    assert len(losses(run)) == NUM_STEPS
    return run
