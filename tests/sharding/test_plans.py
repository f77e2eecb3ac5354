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


def test_data_replicates_weights_in_every_role():
    for role in ("param", "compute", "optimizer"):
        result = specs(data(), role)
        assert result["up"] == P(None, None)
        assert result["hidden"] == P(("data", "fsdp"), None, None)
    assert {row.name for row in data().rows} == {
        *STANDARD_NAMES,
        "batch",
        "lookup_batch",
    }


def test_zero_3_stores_weights_sharded_and_computes_with_them_gathered():
    rules = data() + fsdp()
    for role in ("param", "optimizer"):
        assert specs(rules, role)["up"] == P("fsdp", None)
        assert specs(rules, role)["down"] == P(None, "fsdp")
        assert specs(rules, role)["query"] == P(None, "fsdp", None, None)
    assert specs(rules, "compute")["up"] == P(None, None)
    assert specs(rules, "compute")["residual"] == P(("data", "fsdp"), None, None)


def test_zero_1_shards_only_the_optimizer_state():
    rules = data() + fsdp(stage=1)
    assert specs(rules, "param")["up"] == P(None, None)
    assert specs(rules, "compute")["up"] == P(None, None)
    assert specs(rules, "optimizer")["up"] == P("fsdp", None)
    assert parse_plan("data+zero1") == rules


def test_a_later_stage_1_overrides_stage_3():
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


def test_tensor_shards_one_side_of_each_matrix():
    result = specs(data() + fsdp() + tensor(), "param")
    assert result["up"] == P("fsdp", "tensor")
    assert result["down"] == P("tensor", "fsdp")
    assert result["query"] == P(None, "fsdp", "tensor", None)
    assert result["table"] == P("tensor", "fsdp")
    assert result["scale"] == P(None)
    compute = specs(data() + fsdp() + tensor(), "compute")
    assert compute["up"] == P(None, "tensor")
    assert compute["hidden"] == P(("data", "fsdp"), None, "tensor")
    assert compute["residual"] == P(("data", "fsdp"), None, None)


def test_tensor2d_computes_with_both_sides_sharded():
    for role in ("param", "compute", "optimizer"):
        result = specs(data() + tensor2d(), role)
        assert result["up"] == P("fsdp", "tensor")
        assert result["down"] == P("tensor", "fsdp")
        assert result["residual"] == P("data", None, "fsdp")
        assert result["hidden"] == P("data", None, "tensor")


def test_tensor2d_overrides_an_earlier_fsdp():
    assert specs(data() + fsdp() + tensor2d(), "compute") == specs(
        data() + tensor2d(), "compute"
    )


def test_sequence_shards_only_the_residual_stream():
    before = specs(data() + tensor(), "compute")
    after = specs(data() + tensor() + sequence(), "compute")
    assert after.pop("residual") == P(("data", "fsdp"), "tensor", None)
    assert before.pop("residual") == P(("data", "fsdp"), None, None)
    assert after == before


def test_fsdp_shards_the_width_of_a_lookup_and_not_its_examples():
    axes = {"g": ("lookup_batch", "embed")}
    tree = {"g": jax.ShapeDtypeStruct((8, 8), "float32")}
    rules = data() + fsdp()
    gradient = resolve(tree, rules, MESH, axes=axes, role="optimizer").specs()
    assert gradient["g"] == P("data", "fsdp")


PIPE = MeshSpec(pipe=2, fsdp=2, tensor=2).abstract()


def piped(plan: str, role) -> dict[str, P]:
    return resolve(TREE, parse_plan(plan), PIPE, axes=AXES, role=role).specs()


def test_pipeline_shards_layers_and_the_weights_stored_outside_them():
    for role in ("param", "optimizer"):
        result = piped("data+pipeline", role)
        assert result["query"] == P("pipe", None, None, None)
        assert result["table"] == P(None, "pipe")
        assert result["up"] == P("pipe", None)
        assert result["scale"] == P(None)
    result = piped("data+pipeline", "compute")
    assert result["query"] == P("pipe", None, None, None)
    # The stages share the work outside the layers, with gathered weights.
    assert result["table"] == P(None, None)
    assert result["residual"] == P("fsdp", None, None)


def test_pipeline_combines_with_fsdp_and_tensor():
    result = piped("data+fsdp+tensor+pipeline", "param")
    # The layers use the pipe axis, so the width is sharded over fsdp only.
    assert result["query"] == P("pipe", "fsdp", "tensor", None)
    assert result["table"] == P("tensor", ("fsdp", "pipe"))
    assert piped("data+fsdp+tensor+pipeline", "compute")["table"] == P("tensor", None)


def test_pipeline_after_zero_1_shards_more_of_the_optimizer_state_only():
    assert piped("data+zero1+pipeline", "param")["table"] == P(None, "pipe")
    assert piped("data+zero1+pipeline", "optimizer")["table"] == P(
        None, ("fsdp", "pipe")
    )


def test_pipeline_keeps_the_sharding_of_tensor2d():
    result = piped("data+tensor2d+pipeline", "param")
    assert result["query"] == P("pipe", "fsdp", "tensor", None)
    assert result["table"] == P("tensor", ("fsdp", "pipe"))
    compute = piped("data+tensor2d+pipeline", "compute")
    assert compute["table"] == P("tensor", "fsdp")


def test_pipeline_skips_a_width_that_all_axes_together_do_not_divide():
    tree = {"table": jax.ShapeDtypeStruct((8, 6), "float32")}
    axes = {"table": ("vocab", "embed")}
    rules = parse_plan("data+fsdp+tensor+pipeline")
    result = resolve(tree, rules, PIPE, axes=axes, role="param").specs()
    assert result["table"] == P("tensor", "fsdp")


def test_pipeline_replaces_nothing():
    rules = parse_plan("data+fsdp+tensor+pipeline")
    replaced = [old for old, _ in rules.replaced if old.candidates != ((),)]
    assert not replaced


@pytest.mark.parametrize("name", PLANS)
def test_every_plan_adds_to_data_and_names_real_axes(name):
    rules = parse_plan(f"data + {name}")
    for role in ("param", "compute", "optimizer"):
        result = resolve(TREE, rules, MESH, axes=AXES, role=role)
        assert all(array.ways >= 1 for array in result.arrays)
    assert set(rules.names) == set(parse_plan("data").names)


def test_an_unknown_plan_is_an_error():
    with pytest.raises(ValueError) as error:
        parse_plan("data+tesnor")
    assert str(error.value) == (
        "plan 'data+tesnor': 'tesnor' is not a plan. Plans: data, fsdp, zero1, tensor, "
        "tensor2d, context, sequence, pipeline."
    )
    with pytest.raises(ValueError, match="plan '': '' is not a plan"):
        parse_plan("")


def test_the_pipeline_plan_is_the_function_pipe():
    rules = data() + pipe()
    assert rules == parse_plan("data+pipeline")
    result = resolve(TREE, rules, MeshSpec(pipe=8).abstract(), axes=AXES)
    assert result.specs()["query"] == P("pipe", None, None, None)


def test_calling_the_pipeline_package_names_the_plan():
    from meshloom.sharding import pipeline

    assert pipeline.make and pipeline.__name__ == "meshloom.sharding.pipeline"
    with pytest.raises(TypeError, match="The plan .* is meshloom.sharding.pipe()"):
        pipeline()  # pyright: ignore
