"""A config with a pipe axis: derived microbatches, its description, and errors."""

import dataclasses
import functools
import json

import numpy as np
import pytest
import short_runs
from test_second_family import CONFIG as DIGITS
from tiny_runs import TINY

from meshloom.sharding import MeshSpec, parse_plan
from meshloom.sharding.pipeline import make
from meshloom.trainer.config import files as config_files
from meshloom.trainer.program.pipelining import Pipelining, make_staging
from meshloom.trainer.run import train


@functools.cache
def tiny() -> train.Config:
    return config_files.load([TINY], root=train.Config).config


def stage(config, mesh):
    return make_staging(
        config.model,
        mesh,
        parse_plan(config.plan),
        config.pipeline,
        batch_size=config.batch_size,
        num_microbatches=config.num_microbatches,
    )


def plan(mesh, schedule="1f1b", num_chunks=None, *, num_layers=8, **changes):
    """Returns the pipeline plan of the tiny config on an abstract mesh."""
    model = dataclasses.replace(tiny().model, num_layers=num_layers)
    changes = {"model": model, **changes}
    changes["pipeline"] = Pipelining(schedule=schedule, num_chunks=num_chunks)
    config = dataclasses.replace(tiny(), **changes)
    spec = MeshSpec.parse(mesh).abstract()
    return stage(config, spec)


def test_without_a_pipe_axis_there_is_no_pipeline():
    assert plan("data=8") is None
    assert plan("data=8", "interleaved", num_layers=7) is None


@pytest.mark.parametrize(
    "mesh, schedule, batch_size, num, bubble",
    [
        # The smallest divisor with a bubble <= 10 %; 9 would be enough.
        ("pipe=2", "1f1b", 18, 9, 1 / 10),
        ("pipe=2", "gpipe", 64, 16, 1 / 17),
        # Each of 2 devices has only 8 examples: as many microbatches as possible.
        ("pipe=4,data=2", "1f1b", 16, 8, 3 / 11),
        ("pipe=4,data=2", "1f1b", 2, 1, 3 / 4),
        # Batches are sharded over data and fsdp, not over tensor.
        ("pipe=4,data=2,fsdp=2", "1f1b", 128, 32, 3 / 35),
        ("pipe=4,tensor=2", "1f1b", 64, 32, 3 / 35),
        ("pipe=4", "interleaved", 64, 16, 1.5 / 17.5),
        ("pipe=3", "1f1b", 18, 18, 2 / 20),
    ],
)
def test_the_number_of_microbatches_is_derived(mesh, schedule, batch_size, num, bubble):
    result = plan(mesh, schedule, batch_size=batch_size, num_layers=24)
    assert result.derived
    assert result.schedule.num_microbatches == num
    assert result.simulation.bubble == pytest.approx(bubble)


def test_a_configured_number_of_microbatches_is_kept():
    result = plan("pipe=4,data=2", num_microbatches=2)
    assert not result.derived and result.schedule.num_microbatches == 2


def test_the_simulation_knows_remat_and_gather():
    model = dataclasses.replace(tiny().model, num_layers=4, remat="full")
    config = dataclasses.replace(
        tiny(), model=model, pipeline=Pipelining(gather="microbatch")
    )
    mesh = MeshSpec(pipe=2, fsdp=2).abstract()
    result = stage(config, mesh)
    assert (result.simulation.remat, result.simulation.gather) == ("full", "microbatch")


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved"])
def test_the_record_in_the_run_folder_redraws_the_schedule(schedule):
    result = plan("pipe=4,data=2", schedule)
    record = json.loads(json.dumps(result.to_json(start=7)))
    sizes = ("num_stages", "num_microbatches", "num_chunks")
    again = make(record["name"], *(record[size] for size in sizes))
    np.testing.assert_array_equal(again.forward, result.schedule.forward)
    np.testing.assert_array_equal(again.backward, result.schedule.backward)
    assert (record["start"], record["derived"]) == (7, True)
    assert record["bubble"] == result.simulation.bubble


@pytest.mark.parametrize(
    "settings, text",
    [
        (
            {"schedule": "interleaved"},
            "Pipeline: interleaved, stages 4 of 2 chunks, microbatches 8 (derived), "
            "examples in each 2; bubble 15.8 % of the step (simulated), saved inputs "
            "per stage 11",
        ),
        (
            {"num_microbatches": 8},
            "Pipeline: 1f1b, stages 4, microbatches 8, examples in each 2; bubble 27.3 "
            "% of the step (simulated), saved inputs per stage 7. It would be "
            "smaller with batch_size=32 and num_microbatches=16 (15.8 %) or "
            'pipeline.schedule="interleaved" (15.8 %).',
        ),
    ],
)
def test_the_description_names_schedule_and_bubble(settings, text):
    assert plan("pipe=4,data=2", **settings).describe(16) == text


MESH = "pipe=4,data=2"
# The settings, the advice, and the settings that follow it.
ADVICE = {
    "larger batch": (
        {"num_layers": 4},
        "batch_size=32",
        {"num_layers": 4, "batch_size": 32},
    ),
    "a batch that is much larger": (
        {"batch_size": 2, "num_layers": 4},
        "batch_size=32",
        {"batch_size": 32, "num_layers": 4},
    ),
    "interleaved": ({}, 'pipeline.schedule="interleaved"', {"schedule": "interleaved"}),
    "stages of 3 layers": (
        {"num_layers": 12},
        'pipeline.schedule="interleaved" and pipeline.num_chunks=3',
        {"num_layers": 12, "schedule": "interleaved", "num_chunks": 3},
    ),
    "more chunks": (
        {"schedule": "interleaved", "num_layers": 16, "batch_size": 8},
        "pipeline.num_chunks=4",
        {
            "schedule": "interleaved",
            "num_chunks": 4,
            "num_layers": 16,
            "batch_size": 8,
        },
    ),
    "more microbatches": (
        {"num_microbatches": 2},
        "num_microbatches=8",
        {"num_microbatches": 8},
    ),
    "larger batch of more": (
        {"num_microbatches": 8},
        "batch_size=32 and num_microbatches=16",
        {"batch_size": 32, "num_microbatches": 16},
    ),
}


@pytest.mark.parametrize("what", ADVICE)
def test_following_the_advice_gives_the_promised_bubble(what):
    settings, expected, followed = ADVICE[what]
    before, after = (plan(MESH, **each).simulation for each in (settings, followed))
    assert after.bubble < before.bubble and before.bubble > 0.2
    advice = plan(MESH, **settings).advice
    ways = advice.removeprefix(". It would be smaller with ").rstrip(".").split(" or ")
    assert f"{expected} ({100 * after.bubble:.1f} %)" in ways


def test_there_is_no_advice_that_would_not_help():
    assert plan("pipe=2", num_microbatches=4).advice == ""  # the bubble is a fifth
    # One microbatch passes the chunks in sequence, and more chunks need more layers.
    assert "interleaved" not in plan(MESH, batch_size=2).advice
    assert "interleaved" not in plan(MESH, num_layers=4).advice
    assert "chunks" not in plan(MESH, "interleaved", batch_size=4).advice


REFUSED = {
    "layers that 3 stages do not divide": (
        lambda: plan("pipe=3"),
        "mesh axis pipe=3: 8 layers cannot be divided into 3 equal stages. Use 6 or 9",
    ),
    "layers that the chunks do not divide": (
        lambda: plan(MESH, "interleaved", num_layers=4),
        "mesh axis pipe=4: 4 layers .* stages of 2 chunks each. Use 8 layers",
    ),
    "a plan without the axis": (
        lambda: plan(MESH, plan="data+fsdp"),
        r"pipe=4: the rules do not shard layers over it. Add \+pipeline to the plan",
    ),
    "no stack": (
        lambda: plan(MESH, model=DIGITS.model),
        "pipe=4: Classifier is not a stack of equal blocks .* Set pipe=1",
    ),
    "microbatches between two divisors": (
        lambda: plan("pipe=2", batch_size=24, num_microbatches=5),
        "batch_size 24 is not divisible by num_microbatches 5; 25 would be",
    ),
    "microbatches that a device cannot take part in": (
        lambda: plan("pipe=2,data=2", batch_size=24, num_microbatches=8),
        "num_microbatches 8 does not divide the 12 examples per device of batch_size "
        "24. Set it to 6 or 12, or change batch_size",
    ),
    "more microbatches than examples of a device": (
        lambda: plan(MESH, num_microbatches=16),
        "num_microbatches 16 does not divide the 8 examples .* Set it to 8, or change",
    ),
    "a batch that the mesh does not divide": (
        lambda: plan(MESH, batch_size=15),
        "batch_size 15: dimension 'batch' of size 15 cannot be sharded 2 ways",
    ),
    "a schedule that is not there": (
        lambda: Pipelining(schedule="zero"),
        "schedule must be one of gpipe, 1f1b, interleaved, auto, got 'zero'",
    ),
    "a gather that is not there": (
        lambda: Pipelining(gather="layer"),
        "gather must be one of step, microbatch, auto, got 'layer'",
    ),
    "no chunk": (
        lambda: Pipelining(schedule="interleaved", num_chunks=0),
        "num_chunks must be >= 1, got 0",
    ),
    "chunks of another schedule": (
        lambda: Pipelining(schedule="gpipe", num_chunks=2),
        "num_chunks 2: schedule gpipe has one chunk .* or use schedule interleaved",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_bad_settings_are_errors(what):
    build, message = REFUSED[what]
    with pytest.raises(ValueError, match=message):
        build()


def test_settings_without_a_pipe_axis_are_said_to_have_no_effect():
    line = "The pipeline settings have no effect: the mesh has pipe=1"
    pipeline = Pipelining(schedule="gpipe")
    assert line in short_runs.prepare(tiny(), "data=1", pipeline=pipeline).describe()
    assert line not in short_runs.prepare(tiny(), "data=1").describe()
