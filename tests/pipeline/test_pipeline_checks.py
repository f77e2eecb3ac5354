"""Errors of a pipeline, before anything is compiled."""

import dataclasses

import jax
import pytest
from pipelines import GPT, Case
from toy_stack import Classifier

from meshloom.sharding import MeshSpec, Rules, parse_plan
from meshloom.sharding.pipeline import layer_order, make

pytestmark = pytest.mark.compiles_anew

TOY = Case(model=Classifier(), mesh="pipe=2", schedule="1f1b", num_microbatches=4)
CUT = dataclasses.replace(TOY, mesh="pipe=2,fsdp=2")
replace = dataclasses.replace


def shapes(model):
    return jax.eval_shape(model.init, jax.random.key(0))


def refused(case: Case, pipeline=None, **batch) -> str:
    """Returns the message with which a pipeline refuses its inputs."""
    params, batch = shapes(case.model), case.model.batch(case.num_rows) | batch
    with pytest.raises(ValueError) as error:
        jax.eval_shape((pipeline or case.pipeline).value_and_grad, params, batch)
    return str(error.value)


def test_an_unknown_gather_is_an_error():
    with pytest.raises(ValueError) as error:
        _ = replace(TOY, gather="layer").pipeline
    assert str(error.value) == "gather must be one of step, microbatch, got 'layer'"


@pytest.mark.parametrize(("mesh", "size"), [("pipe=4", 4), ("pipe=1", 1)])
def test_the_mesh_must_have_as_many_stages_as_the_schedule(mesh, size):
    with pytest.raises(ValueError) as error:
        replace(TOY.pipeline, mesh=MeshSpec.parse(mesh).make(jax.devices()[:size]))
    assert str(error.value) == (
        f"the schedule has 2 stages, but the mesh axis 'pipe' has size {size}; they "
        "must be equal and >= 2"
    )


def test_a_pipeline_needs_two_stages():
    mesh = MeshSpec.parse("pipe=1").make(jax.devices()[:1])
    with pytest.raises(ValueError, match="has 1 stages, .* size 1; .* >= 2"):
        replace(TOY.pipeline, mesh=mesh, schedule=make("1f1b", 1, 4))


@pytest.mark.parametrize(
    ("num_layers", "num_chunks", "message"),
    [
        (
            7,
            1,
            "7 layers cannot be divided into 4 equal stages. Use 4 or 8 layers, or ",
        ),
        (3, 1, "3 layers cannot be divided into 4 equal stages. Use 4 layers, or num"),
        (
            12,
            2,
            "12 layers cannot be divided into 4 equal stages of 2 chunks each. Use 8 "
            "or 16 layers, or numbers of stages and chunks whose product divides",
        ),
    ],
)
def test_stages_and_chunks_must_divide_the_layers(num_layers, num_chunks, message):
    with pytest.raises(ValueError) as error:
        layer_order(num_layers, 4, num_chunks)
    assert str(error.value).startswith(message)


def test_stages_must_divide_the_stack_of_a_model():
    case = replace(TOY, model=Classifier(num_layers=7))
    assert refused(case).startswith(
        "7 layers cannot be divided into 2 equal stages. Use 6"
    )


def test_microbatches_must_divide_the_batch():
    assert refused(replace(CUT, num_rows=36)) == (
        "batch array 'image': 36 examples cannot be split into 4 microbatches over 2 "
        "devices; the number of examples must be a multiple of 8"
    )


def test_stages_must_divide_the_examples_of_a_microbatch():
    assert refused(replace(CUT, num_rows=24)) == (
        "batch array 'image': dimension 0 of size 3 cannot be divided among 2 stages, "
        "which share the work outside the blocks. Make it a multiple of 2."
    )


def test_stages_must_divide_the_length():
    case = Case(model=GPT, mesh="pipe=4", schedule="gpipe", num_microbatches=2)
    tokens = jax.ShapeDtypeStruct((4, 6), "int32")
    batch = {"inputs": tokens, "targets": tokens, "weights": tokens}
    with pytest.raises(ValueError) as error:
        jax.eval_shape(case.pipeline.sums, shapes(GPT), batch)
    assert str(error.value) == (
        "batch array 'inputs': dimension 1 of size 6 cannot be divided among 4 stages, "
        "which share the work outside the blocks. Make it a multiple of 4."
    )


def test_every_batch_array_must_be_named():
    assert refused(TOY, colour=jax.numpy.zeros(48)) == (
        "batch array 'colour': batch_axes does not name its dimensions, only those of "
        "image, label, importance. Add 'colour'."
    )


def test_every_batch_array_must_start_with_the_examples():
    axes = TOY.model.batch_axes() | {"palette": (None,)}
    pipeline = replace(CUT.pipeline, batch_axes=axes)
    message = refused(CUT, pipeline, palette=jax.numpy.zeros(48))
    assert message.startswith("batch: the first dimensions of its arrays are sharded")
    assert "'palette': ()" in message


def test_weights_must_not_be_computed_with_sharded_over_the_batch_axes():
    rules = parse_plan("data+pipeline") + Rules.of({"mlp": "fsdp"})
    message = refused(CUT, replace(CUT.pipeline, rules=rules))
    assert message.startswith("trunk/bias: in computation the plan shards it as ")
    assert message.endswith(
        "over axes that also shard the batch; a pipeline needs it replicated over "
        "these. Change the plan."
    )


STORED = Rules.of({"embed": "fsdp"}, role="param")


@pytest.mark.parametrize(
    "rules",
    [
        # The weight is sharded, its gradient replicated.
        STORED + Rules.of({"embed": None}, role="optimizer"),
        # pipe is major to fsdp, so fsdp cannot be gathered last.
        Rules.of({"embed": ("pipe", "fsdp")}, role="param")
        + Rules.of({"embed": ("pipe", "fsdp")}, role="optimizer"),
    ],
    ids=["unlike", "pipe first"],
)
def test_weights_that_cannot_be_gathered_per_microbatch_are_an_error(rules):
    rules = parse_plan("data+pipeline") + rules
    case = replace(CUT, gather="microbatch")
    message = refused(case, replace(case.pipeline, rules=rules))
    assert message.startswith("enter/bias: it is stored as ")
    assert message.endswith(
        "to gather weights once per microbatch, both must be sharded alike over the "
        'axes of the batch, with these major to all others. Set gather="step".'
    )
