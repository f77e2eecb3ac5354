"""Bad settings of a pipeline: one line with the remedy, status 2, no compilation."""

import re

import pytest
from test_errors import pattern
from tiny_runs import refused, sets_of, train

from meshloom.trainer.run.prepare import Prepared

pytestmark = pytest.mark.compiles_anew

MESH = ["--mesh", "pipe=4,data=2"]
LAYERS = sets_of("model.num_layers=8")
ONE = 'pipeline.schedule="1f1b"'
INTERLEAVED = 'pipeline.schedule="interleaved"'

FLAGS = {
    "layers that the stages do not divide": (
        ["--mesh", "pipe=8", *sets_of("model.num_layers=12")],
        "mesh axis pipe=8: 12 layers cannot be divided into 8 equal stages. Use 8 or "
        "16 layers, or numbers of stages and chunks whose product divides 12.",
    ),
    "fewer layers than stages": (
        [*MESH, *sets_of("model.num_layers=2")],
        "mesh axis pipe=4: 2 layers cannot be divided into 4 equal stages. Use 4 "
        "layers,",
    ),
    "layers that the chunks do not divide": (
        [*MESH, *LAYERS, *sets_of(INTERLEAVED, "pipeline.num_chunks=3")],
        "mesh axis pipe=4: 8 layers cannot be divided into 4 equal stages of 3 chunks "
        "each. Use 12 layers,",
    ),
    "schedule unknown": (
        [*MESH, *LAYERS, *sets_of('pipeline.schedule="1F1B"')],
        "schedule must be one of gpipe, 1f1b, interleaved, auto, got '1F1B' (schedule "
        'from --set pipeline.schedule="1F1B")',
    ),
    "gather unknown": (
        [*MESH, *LAYERS, *sets_of('pipeline.gather="layer"')],
        "gather must be one of step, microbatch, auto, got 'layer' (gather from --set",
    ),
    "chunks for 1f1b": (
        [*MESH, *LAYERS, *sets_of(ONE, "pipeline.num_chunks=2")],
        "num_chunks 2: schedule 1f1b has one chunk of layers per stage. Leave "
        "num_chunks unset, or use schedule interleaved. (.*num_chunks from --set "
        "pipeline.num_chunks=2)",
    ),
    "no chunks": (
        [*MESH, *LAYERS, *sets_of(INTERLEAVED, "pipeline.num_chunks=0")],
        "num_chunks must be >= 1, got 0 (num_chunks from --set pipeline.num_chunks=0)",
    ),
    "chunks no number": (
        [*MESH, *LAYERS, *sets_of('pipeline.num_chunks="2"')],
        "pipelining.Pipelining.num_chunks must be int or None, got str '2'",
    ),
    "misspelled field": (
        [*MESH, *LAYERS, *sets_of("pipeline.chunks=2")],
        "pipelining.Pipelining has no parameter 'chunks'; did you mean 'num_chunks'?",
    ),
    "plan without the axis": (
        [*MESH, *LAYERS, *sets_of('plan="data+fsdp+tensor"')],
        "mesh axis pipe=4: the rules do not shard layers over it. Add +pipeline to "
        "the plan, or set pipe=1.",
    ),
    "batch smaller than the mesh": (
        [*MESH, *LAYERS, *sets_of("batch_size=1")],
        "batch_size 1 cannot be sharded 2 ways (data=2). Set batch_size to 2, or "
        "change the mesh.",
    ),
    "microbatches that do not divide the batch": (
        [*MESH, *LAYERS, *sets_of("num_microbatches=3")],
        "batch_size 16 is not divisible by num_microbatches 3; 18 would be",
    ),
    "microbatches smaller than the mesh": (
        [*MESH, *LAYERS, *sets_of("num_microbatches=16")],
        "num_microbatches 16 does not divide the 8 examples per device of batch_size "
        "16. Set it to 8, or change batch_size.",
    ),
    "no microbatches": (
        [*MESH, *LAYERS, *sets_of("num_microbatches=0")],
        "num_microbatches must be >= 1, got 0",
    ),
    "length that the stages do not divide": (
        [*MESH, *LAYERS, *sets_of("data.length=14")],
        "dimension 1 of size 14 cannot be divided among 4 stages, which share the "
        "work outside the blocks. Make it a multiple of 4.",
    ),
    "more stages than devices": (
        ["--mesh", "pipe=16", *sets_of("model.num_layers=16")],
        "mesh pipe=16 needs 16 devices, but there are 8.",
    ),
    "fewer stages than devices": (
        ["--mesh", "pipe=3", *LAYERS],
        "mesh pipe=3 needs 3 devices, but there are 8. Change the axis sizes, or set "
        "one axis to -1.",
    ),
}

NO_STACK = """\
from __gin__ import dynamic_registration
import test_second_family
from meshloom.trainer.program import optimizers
from meshloom.trainer.program import schedules
from meshloom.trainer.run import train

train.Config:
  model = @test_second_family.Classifier()
  data = @test_second_family.Digits()
  optimizer = @optimizers.AdamW()
  schedule = @schedules.WarmupCosine()
  batch_size = 64
  num_steps = 4
schedules.WarmupCosine.peak = 0.01
"""


@pytest.fixture(autouse=True)
def no_compilation(monkeypatch):
    def compile(self):
        raise AssertionError("the step was compiled")

    monkeypatch.setattr(Prepared, "compile", compile)


@pytest.mark.parametrize("what", FLAGS)
def test_bad_flags_are_refused(tmp_path, capfd, what):
    flags, message = FLAGS[what]
    line = refused(capfd, train(tmp_path / "run", *flags))
    assert re.search(pattern(message), line), line
    assert not (tmp_path / "run").exists()


def test_a_dry_run_refuses_the_same_settings(tmp_path, capfd):
    flags, message = FLAGS["layers that the stages do not divide"]
    line = refused(capfd, train(tmp_path / "run", "--dry-run", *flags))
    assert line.startswith(message)


def test_a_model_without_a_stack_is_refused(tmp_path, capfd):
    config = tmp_path / "digits.gin"
    config.write_text(NO_STACK)
    argv = ["train", "--config", str(config), "--workdir", str(tmp_path / "run"), *MESH]
    assert refused(capfd, argv) == (
        "mesh axis pipe=4: Classifier is not a stack of equal blocks (it has no method "
        "`stack`), so it cannot be split into stages. Set pipe=1."
    )
    assert not (tmp_path / "run").exists()
