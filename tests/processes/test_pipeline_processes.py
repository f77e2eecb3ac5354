"""A pipeline whose stages are in different processes trains as one device does."""

import dataclasses
import shutil

import numpy as np
import pytest
from job_runs import (
    NUM_STEPS,
    ROWS,
    TRAIN_ONLY,
    Layout,
    Runs,
    start,
    write_config,
)

from meshloom.trainer.record import metrics

pytestmark = [pytest.mark.processes, pytest.mark.compiles_anew]

LAYERS = "model.num_layers=8"
SCHEDULES = ("gpipe", "1f1b", "interleaved")
# Devices are laid out process by process: pipe is the first axis, so it crosses them.
MESHES = {
    "2x4": (2, 4, "pipe=2,data=2,tensor=2", [ROWS, ROWS], 4),
    "4x1": (4, 1, "pipe=4", [ROWS] * 4, 4),
}
LAYOUTS = {
    f"{name}-{schedule}": Layout(
        *mesh,
        (*TRAIN_ONLY, LAYERS, "num_microbatches=4", f'pipeline.schedule="{schedule}"'),
    )
    for name, mesh in MESHES.items()
    for schedule in SCHEDULES
}
ONE = Layout(1, 1, "data=1", [ROWS], 1, (LAYERS,))
# Evaluates, saves and samples too. Its layers are not in their natural order.
WHOLE = Layout(
    *MESHES["2x4"],
    (LAYERS, "num_microbatches=4", 'pipeline.schedule="interleaved"'),
)
LAYOUTS["2x4-interleaved"] = WHOLE


@pytest.fixture(scope="module")
def config_file(tmp_path_factory):
    return write_config(tmp_path_factory.mktemp("config"))


@pytest.fixture(scope="module")
def run_of(tmp_path_factory, config_file):
    return Runs(config_file, tmp_path_factory.mktemp("runs"))


ALWAYS = ("2x4-interleaved", "4x1-1f1b")


@pytest.mark.parametrize(
    "name",
    [n if n in ALWAYS else pytest.param(n, marks=pytest.mark.slow) for n in LAYOUTS],
)
def test_the_same_losses_with_stages_in_several_processes(name, run_of):
    run, one = run_of(LAYOUTS[name]), run_of(ONE)
    np.testing.assert_allclose(run.losses(), one.losses(), rtol=1e-5)
    assert run.losses()[-1] < 0.9 * run.losses()[0]
    # Each process holds the layers of its own stage, and no whole block anywhere.
    layers = {}
    for process, path, _, where, _ in run.pieces(0):
        if path == "params/blocks/mlp/down":
            layers.setdefault(process, set()).add(tuple(where[0]))
    num_stages = 2 if name.startswith("2x4") else 4
    size = 8 // num_stages
    assert layers == {
        process: {(process * size, (process + 1) * size)}
        for process in range(run.layout.num_processes)
    }


def test_evaluation_and_sampling_take_all_stages(run_of):
    run, one = run_of(WHOLE), run_of(ONE)
    np.testing.assert_allclose(run.losses(), one.losses(), rtol=1e-5)
    found, expected = (metrics.read(r.workdir / "eval.jsonl") for r in (run, one))
    assert [row["step"] for row in found] == [10, 20]
    for row, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(row["loss"], other["loss"], rtol=1e-5)
    text = (run.workdir / "sample.txt").read_text()
    assert text.startswith("def ") and text == (one.workdir / "sample.txt").read_text()


def test_stages_resume_bit_for_bit_and_elsewhere(run_of, config_file, tmp_path):
    """A job that is killed after step 10 goes on exactly; without stages, the same."""
    whole = run_of(WHOLE)
    for name, layout in (("same", WHOLE), ("one", ONE)):
        folder = tmp_path / name
        shutil.copytree(whole.workdir, folder)
        shutil.rmtree(folder / "checkpoints" / str(NUM_STEPS))
        settings = (*TRAIN_ONLY, *layout.settings)
        again = dataclasses.replace(layout, settings=settings)
        resumed = start(again, config_file, folder)
        for process in resumed.processes:
            assert process.status == 0, process.stdout + process.stderr
        if name == "same":
            np.testing.assert_array_equal(resumed.losses(), whole.losses())
        np.testing.assert_allclose(resumed.losses(), whole.losses(), rtol=1e-5)
