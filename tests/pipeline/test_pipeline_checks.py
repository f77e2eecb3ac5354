"""What a pipeline refuses, before anything is compiled."""

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
    """The message with which a pipeline refuses its inputs."""
    params, batch = shapes(case.model), case.model.batch(case.num_rows) | batch
    with pytest.raises(ValueError) as error:
        jax.eval_shape((pipeline or case.pipeline).value_and_grad, params, batch)
    return str(error.value)


def test_unknown_gather():
    with pytest.raises(ValueError) as error:
        _ = replace(TOY, gather="layer").pipeline
    assert str(error.value) == "gather must be one of step, microbatch, got 'layer'"


@pytest.mark.parametrize(("mesh", "found"), [("pipe=4", 4), ("pipe=1", 1)])
def test_a_mesh_of_other_stages(mesh, found):
    with pytest.raises(ValueError) as error:
        replace(TOY.pipeline, mesh=MeshSpec.parse(mesh).make(jax.devices()[:found]))
    assert str(error.value) == (
        f"the schedule has 2 stages, but the mesh axis 'pipe' has size {found}; they "
        "must be equal, and at least 2"
    )


def test_one_stage_is_no_pipeline():
    mesh = MeshSpec.parse("pipe=1").make(jax.devices()[:1])
    with pytest.raises(ValueError, match="has 1 stages, .* size 1; .* at least 2"):
        replace(TOY.pipeline, mesh=mesh, schedule=make("1f1b", 1, 4))


@pytest.mark.parametrize(
    ("num_layers", "num_chunks", "message"),
    [
        (7, 1, "7 layers cannot be cut into 4 equal stages. Take 4 or 8 layers, or "),
        (3, 1, "3 layers cannot be cut into 4 equal stages. Take 4 layers, or other "),
        (
            12,
            2,
            "12 layers cannot be cut into 4 equal stages of 2 chunks each. Take 8 or "
            "16 layers, or other numbers of stages and chunks whose product divides",
        ),
    ],
)
def test_layers_that_the_stages_do_not_divide(num_layers, num_chunks, message):
    with pytest.raises(ValueError) as error:
        layer_order(num_layers, 4, num_chunks)
    assert str(error.value).startswith(message)


def test_a_stack_that_the_stages_do_not_divide():
    case = replace(TOY, model=Classifier(num_layers=7))
    assert refused(case).startswith(
        "7 layers cannot be cut into 2 equal stages. Take 6"
    )


def test_rows_that_are_no_microbatches():
    assert refused(replace(CUT, num_rows=36)) == (
        "batch array 'image' of 36 examples cannot be cut into 4 microbatches over 2 "
        "devices; the number of examples must be a multiple of 8"
    )


def test_examples_that_the_stages_cannot_share():
    assert refused(replace(CUT, num_rows=24)) == (
        "batch array 'image': 3 places of dimension 0 cannot be divided among 2 "
        "stages, which share the work outside the blocks. Make it a multiple of 2."
    )


def test_a_length_that_the_stages_cannot_share():
    case = Case(model=GPT, mesh="pipe=4", schedule="gpipe", num_microbatches=2)
    tokens = jax.ShapeDtypeStruct((4, 6), "int32")
    batch = {"inputs": tokens, "targets": tokens, "weights": tokens}
    with pytest.raises(ValueError) as error:
        jax.eval_shape(case.pipeline.sums, shapes(GPT), batch)
    assert str(error.value) == (
        "batch array 'inputs': 6 places of dimension 1 cannot be divided among 4 "
        "stages, which share the work outside the blocks. Make it a multiple of 4."
    )


def test_a_batch_array_without_names():
    assert refused(TOY, colour=jax.numpy.zeros(48)) == (
        "batch array 'colour': batch_axes does not name its dimensions, it has image, "
        "label, importance. Add 'colour'."
    )


def test_batch_arrays_that_are_not_all_of_examples():
    axes = TOY.model.batch_axes() | {"palette": (None,)}
    pipeline = replace(CUT.pipeline, batch_axes=axes)
    message = refused(CUT, pipeline, palette=jax.numpy.zeros(48))
    assert message.startswith("batch: its arrays are cut differently along their first")
    assert "'palette': ()" in message


def test_a_plan_that_computes_in_pieces_along_the_batch():
    rules = parse_plan("data+pipeline") + Rules.of({"mlp": "fsdp"})
    message = refused(CUT, replace(CUT.pipeline, rules=rules))
    assert message.startswith("trunk/bias: the plan computes with it cut as ")
    assert message.endswith(
        "over axes that also cut the batch; a pipeline needs it whole along these. "
        "Change the plan."
    )


STORED = Rules.of({"embed": "fsdp"}, role="param")


@pytest.mark.parametrize(
    "rules",
    [
        # Stored in pieces, summed whole.
        STORED + Rules.of({"embed": None}, role="optimizer"),
        # By stage first, so that a piece of fsdp is no piece of the whole.
        Rules.of({"embed": ("pipe", "fsdp")}, role="param")
        + Rules.of({"embed": ("pipe", "fsdp")}, role="optimizer"),
    ],
    ids=["unlike", "pipe first"],
)
def test_weights_that_cannot_be_gathered_once_a_microbatch(rules):
    rules = parse_plan("data+pipeline") + rules
    case = replace(CUT, gather="microbatch")
    message = refused(case, replace(case.pipeline, rules=rules))
    assert message.startswith("enter/bias: it is stored as ")
    assert message.endswith(
        "weights gathered once a microbatch need both cut alike over the axes of the "
        "batch, and by these before any other. Gather once a step."
    )
