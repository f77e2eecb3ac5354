import pytest
from jax.sharding import PartitionSpec as P

from meshloom.sharding import MeshSpec, Rules
from meshloom.sharding.resolve import Indivisible, resolve_dimensions, spec_of

SIZES = {"data": 2, "fsdp": 4, "tensor": 2, "pipe": 1}


def run(table, axes, shape, *, strict=True, mesh=SIZES):
    rules = Rules.of(table, plan="mine")
    rules = rules if strict else rules.lenient()
    return resolve_dimensions(axes, shape, rules, mesh, name="w")


def reasons(dimension):
    return [(lost.candidate, lost.reason) for lost in dimension.lost]


def test_a_row_may_have_one_axis_several_axes_or_none():
    table = {"embed": "fsdp", "batch": ("data", "tensor"), "norm": None}
    dims = run(table, ("embed", "batch", "norm", None), (8, 4, 7, 5))
    assert spec_of(dims) == P("fsdp", ("data", "tensor"), None, None)
    assert [d.plan for d in dims] == ["mine", "mine", "mine", ""]


def test_dimensions_are_resolved_left_to_right():
    table = {"a": "tensor", "b": ["tensor", "data"]}
    dims = run(table, ("a", "b"), (4, 4))
    assert spec_of(dims) == P("tensor", "data")
    assert str(dims[1].lost[0]) == "tensor: axis-taken (tensor shards 'a')"
    # In the other order b comes first and takes tensor, and a is replicated.
    dims = run(table, ("b", "a"), (4, 4))
    assert spec_of(dims) == P("tensor", None)
    assert reasons(dims[1]) == [(("tensor",), "axis-taken")]


def test_candidates_are_tried_in_order():
    dims = run({"a": [("data", "fsdp"), "fsdp", "data"]}, ("a",), (12,))
    assert spec_of(dims) == P("fsdp")
    assert str(dims[0].lost[0]) == "data+fsdp: indivisible (12 by 8)"


def test_a_candidate_applies_with_all_its_axes_or_not_at_all():
    dims = run({"a": "fsdp", "b": [("data", "fsdp"), "data"]}, ("a", "b"), (8, 8))
    assert spec_of(dims) == P("fsdp", "data")
    assert reasons(dims[1]) == [(("data", "fsdp"), "axis-taken")]


def test_axes_of_size_one_are_dropped_from_the_spec():
    dims = run({"a": ("pipe", "data"), "b": "pipe"}, ("a", "b"), (4, 4))
    assert spec_of(dims) == P("data", None)
    assert reasons(dims[1]) == [(("pipe",), "size-1")]


def test_a_name_used_twice_in_an_array_shards_the_first():
    dims = run({"a": "data"}, ("a", "a"), (4, 4))
    assert spec_of(dims) == P("data", None)


def test_indivisible_is_an_error_that_names_the_padded_size():
    with pytest.raises(ValueError) as error:
        run({"vocab": ("data", "fsdp")}, ("vocab",), (50257,))
    assert str(error.value) == (
        "w: dimension 'vocab' of size 50257 cannot be sharded 8 ways (data=2,fsdp=4, "
        "plan mine). Pad it to 50264, use a mesh axis size that divides 50257, or let "
        "the rule end in None to replicate it."
    )


def test_a_row_with_none_allows_replication():
    dims = run({"heads": ["fsdp", None]}, ("heads",), (6,))
    assert spec_of(dims) == P(None)
    assert reasons(dims[0]) == [(("fsdp",), "indivisible")]
    assert dims[0].plan == "mine"
    # None ends the search wherever it comes.
    assert spec_of(run({"h": ["fsdp", None, "data"]}, ("h",), (6,))) == P(None)


def test_a_taken_axis_is_not_an_error_but_an_indivisible_one_is():
    table = {"a": "tensor", "b": ["tensor", "fsdp"]}
    assert spec_of(run(table, ("a", "b"), (2, 8))) == P("tensor", "fsdp")
    with pytest.raises(
        ValueError, match=r"'b' of size 7 cannot be sharded 4 ways \(fsdp=4"
    ):
        run(table, ("a", "b"), (2, 7))


def test_a_candidate_with_fewer_axes_is_a_way_out_also_where_these_have_size_1():
    """As the plan of a pipeline has it: over fsdp and pipe, or over fsdp alone."""
    table = {"embed": [("fsdp", "pipe"), "fsdp"]}
    for sizes, spec in (
        ({"fsdp": 2, "pipe": 3}, P("fsdp")),
        ({"fsdp": 1, "pipe": 3}, P(None)),
        ({"fsdp": 1, "pipe": 2}, P("pipe")),
    ):
        assert spec_of(run(table, ("embed",), (8,), mesh=sizes)) == spec
    # An unrelated axis of size 1 is not a fallback.
    with pytest.raises(Indivisible, match="cannot be sharded 3 ways"):
        run({"embed": ["pipe", "fsdp"]}, ("embed",), (8,), mesh={"fsdp": 1, "pipe": 3})


def test_an_unknown_name_is_an_error():
    with pytest.raises(ValueError) as error:
        run({"mlp": None, "embed": None}, ("mpl",), (8,))
    assert str(error.value) == (
        "w: no rule for logical axis 'mpl' (role param). Known names: embed, mlp. Add "
        "a row, for instance Rules.of({'mpl': None}) to replicate it."
    )
    with pytest.raises(ValueError, match="Known names: none. Add"):
        run({}, ("mpl",), (8,))


def test_an_unknown_mesh_axis_is_an_error():
    with pytest.raises(ValueError) as error:
        run({"mlp": "model"}, ("mlp",), (8,))
    assert str(error.value) == (
        "w: rule mlp -> model  [mine] names mesh axis 'model', but the mesh has data, "
        "fsdp, tensor, pipe. Name one of these, or add the axis to the mesh."
    )


def test_every_dimension_must_be_named():
    with pytest.raises(ValueError) as error:
        run({"mlp": None}, ("mlp",), (8, 4))
    assert str(error.value) == (
        "w: logical axes ('mlp',) name 1 dimensions, but its shape (8, 4) has 2. Name "
        "each dimension; use None for one that is never sharded."
    )


def test_lenient_rules_record_the_reason_instead():
    table = {"vocab": "fsdp", "mlp": ["model", "tensor"]}
    dims = run(table, ("vocab", "mpl", "mlp"), (7, 8, 8), strict=False)
    assert spec_of(dims) == P(None, None, "tensor")
    assert [reasons(d) for d in dims] == [
        [(("fsdp",), "indivisible")],
        [((), "no-rule")],
        [(("model",), "no-axis")],
    ]


def test_a_mesh_an_abstract_mesh_and_sizes_resolve_alike():
    spec = MeshSpec(fsdp=4, tensor=2)
    table = {"embed": "fsdp", "mlp": "tensor"}
    results = [
        run(table, ("embed", "mlp"), (8, 8), mesh=mesh)
        for mesh in (spec.make(), spec.abstract(), spec.sizes(8))
    ]
    assert results[0] == results[1] == results[2]
    assert spec_of(results[0]) == P("fsdp", "tensor")


def test_a_scalar_has_an_empty_spec():
    assert spec_of(run({}, (), ())) == P()


def fused(shape, mesh=SIZES, candidates="fsdp", name="heads*64", **kwargs):
    table = {"embed": None, "heads": candidates}
    return run(table, ("embed", name), shape, mesh=mesh, **kwargs)


def test_a_fused_dimension_is_sharded_between_its_units():
    dims = fused((8, 12 * 64))
    assert spec_of(dims) == P(None, "fsdp")
    assert dims[1].name == "heads*64" and dims[1].size == 768


def test_a_fused_dimension_is_never_sharded_inside_a_unit():
    # 6 * 64 is divisible by 4, but a shard would end inside a head.
    with pytest.raises(Indivisible) as error:
        fused((8, 6 * 64))
    assert str(error.value) == (
        "w: dimension 'heads*64' of size 384 is 6 heads of 64 each, which cannot be "
        "sharded 4 ways (fsdp=4, plan mine) without splitting one. Use a mesh axis "
        "size that divides 6, or let the rule end in None to replicate it."
    )
    dims = fused((8, 6 * 64), candidates=["fsdp", "data"])
    assert spec_of(dims) == P(None, "data")
    assert str(dims[1].lost[0]) == "fsdp: indivisible (6 heads of 64 by 4)"
    assert spec_of(fused((8, 6 * 64), strict=False)) == P(None, None)
    assert spec_of(fused((8, 6 * 64), name="heads")) == P(None, "fsdp")


def test_a_wrong_unit_is_an_error():
    with pytest.raises(ValueError) as error:
        fused((8, 100))
    assert str(error.value) == (
        "w: dimension 'heads*64' of size 100 is not a multiple of its unit 64. Fix "
        "the unit."
    )
    for name in ("heads*head_dim", "heads*0", "*64", "heads*"):
        with pytest.raises(ValueError, match="expected a name, or name[*]unit for a f"):
            fused((8, 128), name=name)


def test_a_standard_axis_that_the_mesh_does_not_have_counts_as_size_one():
    dims = run(
        {"a": ("replica", "data"), "b": "context"}, ("a", "b"), (4, 4), mesh={"data": 2}
    )
    assert spec_of(dims) == P("data", None)
    assert reasons(dims[1]) == [(("context",), "size-1")]
