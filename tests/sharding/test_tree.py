import json

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from meshloom.sharding import MeshSpec, Rules, data, diff, fsdp, resolve, tensor

AXES = {"up": ("embed", "mlp"), "scale": ("norm",), "steps": (), "odd": (None, None)}
TREE = {
    "up": jax.ShapeDtypeStruct((8, 64), "float32"),
    "scale": jax.ShapeDtypeStruct((8,), "float32"),
    "steps": jax.ShapeDtypeStruct((), "int32"),
    "odd": jax.ShapeDtypeStruct((3, 5), "bfloat16"),
}
SPEC = MeshSpec(data=2, fsdp=2, tensor=2)
RULES = data() + fsdp() + tensor()


def resolved(rules=RULES, mesh=SPEC, **kwargs):
    return resolve(TREE, rules, mesh.abstract(), axes=AXES, **kwargs)


def test_the_table_shows_shapes_axes_and_specs():
    assert str(resolved()).splitlines() == [
        "parameter  shape   axes       spec            per device  why",
        "odd        3x5     -,-        (-, -)          30 B        no names",
        "scale      8       norm       (-)             32 B        "
        "norm replicated by data",
        "steps      scalar             ()              4 B         scalar",
        "up         8x64    embed,mlp  (fsdp, tensor)  512 B       "
        "embed over fsdp by fsdp, mlp over tensor by tensor",
    ]


def test_the_table_shows_what_lost_and_why():
    rules = Rules.of(
        {"embed": ["fsdp", None], "mlp": ["fsdp", "tensor"], "norm": "pipe"}
    )
    sizes = {"fsdp": 8, "tensor": 3, "pipe": 1}
    tree = {"w": jax.ShapeDtypeStruct((4, 24), "int8"), "s": TREE["scale"]}
    axes = {"w": ("embed", "mlp"), "s": ("norm",)}
    why = {a.path: a.why for a in resolve(tree, rules, sizes, axes=axes).arrays}
    assert why == {
        "w": "embed replicated by rules [fsdp: indivisible (4 by 8)], "
        "mlp over fsdp by rules",
        "s": "norm replicated [pipe: size-1]",
    }


def test_bytes_are_total_and_per_device():
    r = resolved()
    assert r.bytes == 8 * 64 * 4 + 8 * 4 + 4 + 3 * 5 * 2
    assert r.bytes_per_device == 8 * 64 * 4 // 4 + 8 * 4 + 4 + 3 * 5 * 2
    assert {a.path: a.ways for a in r.arrays}["up"] == 4


def test_replicated_largest_first_and_none_on_one_device():
    assert [a.path for a in resolved().replicated()] == ["scale", "odd", "steps"]
    assert resolved(mesh=MeshSpec()).replicated() == []


def test_the_summary_lists_totals_and_replicated_arrays():
    assert resolved().summary(largest=2).splitlines() == [
        "parameters        536 in 4 arrays",
        "bytes             2.1 KiB",
        "bytes per device  578 B",
        "replicated        66 B in 3 arrays",
        "  scale           8  32 B  norm replicated by data",
        "  odd             3x5  30 B  no names",
        "  and 1 smaller",
    ]
    assert resolved(mesh=MeshSpec()).summary().splitlines()[-1] == (
        "replicated        nothing"
    )
    assert resolved(role="optimizer").summary().startswith("elements  ")


def test_json_has_every_array_and_totals():
    result = json.loads(resolved().dumps())
    assert result["role"] == "param"
    assert result["mesh"]["fsdp"] == 2
    assert result["totals"] == {
        "arrays": 4,
        "elements": 536,
        "bytes": 2114,
        "bytes_per_device": 578,
        "replicated_bytes": 66,
    }
    assert result["arrays"][3] == {
        "path": "up",
        "shape": [8, 64],
        "dtype": "float32",
        "axes": ["embed", "mlp"],
        "spec": ["fsdp", "tensor"],
        "bytes": 2048,
        "bytes_per_device": 512,
        "ways": 4,
        "why": "embed over fsdp by fsdp, mlp over tensor by tensor",
    }


def test_json_of_a_dimension_sharded_over_two_axes():
    tree = {"x": jax.ShapeDtypeStruct((8, 4), "float32")}
    axes = {"x": ("batch", "length")}
    r = resolve(tree, data(), SPEC.abstract(), axes=axes, role="compute")
    assert r.to_json()["arrays"][0]["spec"] == [["data", "fsdp"], None]


def test_a_jitted_init_follows_the_shardings():
    mesh = SPEC.make()
    shardings = resolved().shardings(mesh)
    assert shardings["up"] == NamedSharding(mesh, P("fsdp", "tensor"))

    def init():
        return jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), TREE)

    arrays = jax.jit(init, out_shardings=shardings)()
    for a in resolved().arrays:
        shard = arrays[a.path].addressable_shards[0].data
        assert shard.nbytes == a.bytes_per_device, a.path


def test_shardings_for_another_mesh_are_refused():
    with pytest.raises(
        ValueError, match="shardings were requested for mesh .*'data': 8"
    ):
        resolved().shardings(MeshSpec(data=8).make())


def test_diff_lists_changed_added_and_removed_arrays():
    other = resolve(
        TREE | {"new": TREE["scale"]},
        data() + tensor(),
        SPEC.abstract(),
        axes=AXES | {"new": ("norm",)},
    )
    assert diff(resolved(), other) == [
        "~ up: (fsdp, tensor) 512 B -> (-, tensor) 1.0 KiB",
        "+ new",
    ]
    assert diff(other, resolved())[0] == "- new"
    assert diff(other, other) == []


def test_diff_reports_a_different_mesh_size_with_the_same_spec():
    wide = resolved(mesh=MeshSpec(data=2, fsdp=4, tensor=2))
    assert [line.split(":")[0] for line in diff(resolved(), wide)] == ["~ up"]


def test_used_names_carry_their_role():
    assert resolved(role="optimizer").used == {
        ("embed", "optimizer"),
        ("mlp", "optimizer"),
        ("norm", "optimizer"),
    }


def test_an_error_names_the_parameter():
    tree = {"blocks": [{"w": jax.ShapeDtypeStruct((7,), "float32")}]}
    axes = {"blocks": [{"w": ("embed",)}]}
    with pytest.raises(
        ValueError, match="^blocks/0/w: dimension 'embed' of size 7 can"
    ):
        resolve(tree, RULES, SPEC.abstract(), axes=axes)


def test_axes_of_another_structure_are_an_error():
    with pytest.raises(
        ValueError, match="the tree of logical axes does not have the struc"
    ):
        resolve(TREE, RULES, SPEC.abstract(), axes={"up": ("embed", "mlp")})
    with pytest.raises(
        ValueError, match="^scale: its logical axes must be a tuple of n"
    ):
        resolve(TREE, RULES, SPEC.abstract(), axes=AXES | {"scale": "norm"})
    with pytest.raises(
        ValueError, match="^rate: expected an array or a ShapeDtypeStruc"
    ):
        resolve({"rate": 0.1}, RULES, SPEC.abstract(), axes={"rate": ()})


def test_a_large_model_is_resolved_quickly_from_shapes():
    axes = {str(i): ("layer", "embed", "mlp") for i in range(200)}
    tree = {k: jax.ShapeDtypeStruct((80, 8192, 28672), "bfloat16") for k in axes}
    r = resolve(tree, RULES, MeshSpec(fsdp=64, tensor=4).abstract(), axes=axes)
    assert r.bytes_per_device == r.bytes // 256
