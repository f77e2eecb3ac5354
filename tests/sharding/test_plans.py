import jax
import pytest
from jax.sharding import PartitionSpec as P

from meshloom.sharding import (
    MeshSpec,
    Rules,
    data,
    fsdp,
    parse_plan,
    pipe,
    resolve,
    sequence,
    tensor,
    tensor2d,
)
from meshloom.sharding.plans import PLANS, STANDARD_NAMES

MESH = MeshSpec(data=2, fsdp=2, tensor=2).abstract()
AXES = {
    "up": ("embed", "mlp"),
    "down": ("mlp", "embed"),
    "query": ("layer", "embed", "heads", "head_dim"),
    "table": ("vocab", "embed"),
    "scale": ("norm",),
    "residual": ("batch", "residual_length", "embed"),
    "hidden": ("batch", "length", "mlp"),
}
TREE = {k: jax.ShapeDtypeStruct((8,) * len(v), "float32") for k, v in AXES.items()}


def specs(rules: Rules, role) -> dict[str, P]:
    return resolve(TREE, rules, MESH, axes=AXES, role=role).specs()


def test_data_leaves_weights_whole_in_every_role():
    for role in ("param", "compute", "optimizer"):
        found = specs(data(), role)
        assert found["up"] == P(None, None)
        assert found["hidden"] == P(("data", "fsdp"), None, None)
    assert {row.name for row in data().rows} == {
        *STANDARD_NAMES,
        "batch",
        "lookup_batch",
    }


def test_zero_stage_3_stores_everything_cut_and_computes_whole():
    rules = data() + fsdp()
    for role in ("param", "optimizer"):
        assert specs(rules, role)["up"] == P("fsdp", None)
        assert specs(rules, role)["down"] == P(None, "fsdp")
        assert specs(rules, role)["query"] == P(None, "fsdp", None, None)
    assert specs(rules, "compute")["up"] == P(None, None)
    assert specs(rules, "compute")["residual"] == P(("data", "fsdp"), None, None)


def test_zero_stage_1_cuts_the_optimizer_only():
    rules = data() + fsdp(stage=1)
    assert specs(rules, "param")["up"] == P(None, None)
    assert specs(rules, "compute")["up"] == P(None, None)
    assert specs(rules, "optimizer")["up"] == P("fsdp", None)
    assert parse_plan("data+zero1") == rules


def test_a_later_stage_1_has_its_say():
    rules = data() + fsdp() + fsdp(stage=1)
    assert specs(rules, "param")["up"] == P(None, None)
    assert [str(old) for old, _ in rules.replaced] == [
        "embed (param) -> fsdp  [fsdp]",
        "lookup_batch (param) -> replica+data+expert  [fsdp]",
    ]


def test_stage_2_is_refused():
    with pytest.raises(ValueError) as error:
        fsdp(stage=2)
    assert str(error.value) == (
        "fsdp stage must be 3 (parameters and optimizer state) or 1 (optimizer state "
        "only), got 2"
    )


def test_tensor_cuts_one_side_of_each_matrix():
    found = specs(data() + fsdp() + tensor(), "param")
    assert found["up"] == P("fsdp", "tensor")
    assert found["down"] == P("tensor", "fsdp")
    assert found["query"] == P(None, "fsdp", "tensor", None)
    assert found["table"] == P("tensor", "fsdp")
    assert found["scale"] == P(None)
    compute = specs(data() + fsdp() + tensor(), "compute")
    assert compute["up"] == P(None, "tensor")
    assert compute["hidden"] == P(("data", "fsdp"), None, "tensor")
    assert compute["residual"] == P(("data", "fsdp"), None, None)


def test_tensor2d_computes_with_blocks():
    for role in ("param", "compute", "optimizer"):
        found = specs(data() + tensor2d(), role)
        assert found["up"] == P("fsdp", "tensor")
        assert found["down"] == P("tensor", "fsdp")
        assert found["residual"] == P("data", None, "fsdp")
        assert found["hidden"] == P("data", None, "tensor")


def test_tensor2d_after_fsdp_takes_over():
    assert specs(data() + fsdp() + tensor2d(), "compute") == specs(
        data() + tensor2d(), "compute"
    )


def test_sequence_cuts_the_residual_stream_and_nothing_else():
    before = specs(data() + tensor(), "compute")
    after = specs(data() + tensor() + sequence(), "compute")
    assert after.pop("residual") == P(("data", "fsdp"), "tensor", None)
    assert before.pop("residual") == P(("data", "fsdp"), None, None)
    assert after == before


def test_the_summed_gradient_of_a_look_up_gives_its_fsdp_axis_to_the_width():
    axes = {"g": ("lookup_batch", "embed")}
    tree = {"g": jax.ShapeDtypeStruct((8, 8), "float32")}
    rules = data() + fsdp()
    gradient = resolve(tree, rules, MESH, axes=axes, role="optimizer").specs()
    assert gradient["g"] == P("data", "fsdp")


PIPE = MeshSpec(pipe=2, fsdp=2, tensor=2).abstract()


def piped(plan: str, role) -> dict[str, P]:
    return resolve(TREE, parse_plan(plan), PIPE, axes=AXES, role=role).specs()


def test_pipeline_cuts_layers_and_what_is_stored_outside_them():
    for role in ("param", "optimizer"):
        found = piped("data+pipeline", role)
        assert found["query"] == P("pipe", None, None, None)
        assert found["table"] == P(None, "pipe")
        assert found["up"] == P("pipe", None)
        assert found["scale"] == P(None)
    found = piped("data+pipeline", "compute")
    assert found["query"] == P("pipe", None, None, None)
    # Work outside the layers is done with whole weights, by all stages together.
    assert found["table"] == P(None, None)
    assert found["residual"] == P("fsdp", None, None)


def test_pipeline_cuts_beside_fsdp_and_tensor():
    found = piped("data+fsdp+tensor+pipeline", "param")
    # Layers have taken the pipe axis, so the width has fsdp alone.
    assert found["query"] == P("pipe", "fsdp", "tensor", None)
    assert found["table"] == P("tensor", ("fsdp", "pipe"))
    assert piped("data+fsdp+tensor+pipeline", "compute")["table"] == P("tensor", None)


def test_pipeline_after_zero_stage_1_cuts_more_of_the_optimizer_only():
    assert piped("data+zero1+pipeline", "param")["table"] == P(None, "pipe")
    assert piped("data+zero1+pipeline", "optimizer")["table"] == P(
        None, ("fsdp", "pipe")
    )


def test_pipeline_keeps_the_blocks_of_tensor2d():
    found = piped("data+tensor2d+pipeline", "param")
    assert found["query"] == P("pipe", "fsdp", "tensor", None)
    assert found["table"] == P("tensor", ("fsdp", "pipe"))
    compute = piped("data+tensor2d+pipeline", "compute")
    assert compute["table"] == P("tensor", "fsdp")


def test_pipeline_leaves_a_width_alone_that_all_axes_together_do_not_divide():
    tree = {"table": jax.ShapeDtypeStruct((8, 6), "float32")}
    axes = {"table": ("vocab", "embed")}
    rules = parse_plan("data+fsdp+tensor+pipeline")
    found = resolve(tree, rules, PIPE, axes=axes, role="param").specs()
    assert found["table"] == P("tensor", "fsdp")


def test_pipeline_replaces_nothing():
    rules = parse_plan("data+fsdp+tensor+pipeline")
    replaced = [old for old, _ in rules.replaced if old.candidates != ((),)]
    assert not replaced


@pytest.mark.parametrize("name", PLANS)
def test_every_plan_adds_to_data_and_names_real_axes(name):
    rules = parse_plan(f"data + {name}")
    for role in ("param", "compute", "optimizer"):
        found = resolve(TREE, rules, MESH, axes=AXES, role=role)
        assert all(array.ways >= 1 for array in found.arrays)
    assert set(rules.names) == set(parse_plan("data").names)


def test_unknown_plan():
    with pytest.raises(ValueError) as error:
        parse_plan("data+tesnor")
    assert str(error.value) == (
        "plan 'data+tesnor': 'tesnor' is not a plan. Plans: data, fsdp, zero1, tensor, "
        "tensor2d, sequence, pipeline."
    )
    with pytest.raises(ValueError, match="plan '': '' is not a plan"):
        parse_plan("")


def test_the_plan_of_a_pipeline_has_the_name_of_its_axis():
    rules = data() + pipe()
    assert rules == parse_plan("data+pipeline")
    found = resolve(TREE, rules, MeshSpec(pipe=8).abstract(), axes=AXES)
    assert found.specs()["query"] == P("pipe", None, None, None)


def test_the_package_of_schedules_called_as_a_plan_names_the_plan():
    from meshloom.sharding import pipeline

    assert pipeline.make and pipeline.__name__ == "meshloom.sharding.pipeline"
    with pytest.raises(TypeError, match="The plan .* is meshloom.sharding.pipe()"):
        pipeline()  # pyright: ignore
