"""The audit of compiled steps, against collectives counted by hand."""

import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from paths import ROOT

from meshloom.sharding.audit import Audit, audit

HERE = pathlib.Path(__file__)


def make_mesh(devices=None, **sizes: int) -> Mesh:
    devices = jax.devices() if devices is None else devices
    shape = tuple(sizes.values())
    auto = (AxisType.Auto,) * len(sizes)
    return Mesh(np.array(devices).reshape(shape), tuple(sizes), axis_types=auto)


def abstract(mesh: Mesh, shape, *spec) -> jax.ShapeDtypeStruct:
    sharding = NamedSharding(mesh, P(*spec))
    return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding)


def constrain(x, mesh: Mesh, *spec):
    return lax.with_sharding_constraint(x, NamedSharding(mesh, P(*spec)))


def mlp_loss(params, x):
    return jnp.mean((jnp.tanh(x @ params["up"]) @ params["down"]) ** 2)


def compile_mlp_gradient(mesh: Mesh) -> jax.stages.Compiled:
    replicated = NamedSharding(mesh, P())
    params = {
        "up": abstract(mesh, (32, 64)),
        "down": abstract(mesh, (64, 16)),
    }
    step = jax.jit(jax.value_and_grad(mlp_loss), out_shardings=replicated)
    return step.lower(params, abstract(mesh, (128, 32), "data")).compile()


def test_data_parallel_reduces_the_gradient_and_the_loss():
    mesh = make_mesh(data=8)
    result = audit(compile_mlp_gradient(mesh), mesh)
    gradient_bytes = 4 * (32 * 64 + 64 * 16)
    # The compiler combines all of them into one.
    result.expect({("all-reduce", ("data",)): (1, gradient_bytes + 4)})
    result.expect({("all-reduce", ("data",)): 1}, small=8)
    (reduce,) = result.collectives
    assert (reduce.dtype, reduce.shape) == ("f32", (gradient_bytes // 4 + 1,))


def test_every_collective_names_its_source_line():
    mesh = make_mesh(data=8)
    lines = HERE.read_text().splitlines()
    for c in audit(compile_mlp_gradient(mesh), mesh).collectives:
        file, line = c.source.rsplit(":", 1)
        assert pathlib.Path(file).name == HERE.name
        assert "jnp.mean" in lines[int(line) - 1]
        assert c.op_name.startswith("jit(mlp_loss)")


def compile_scanned(mesh: Mesh, num_layers: int, num_micro: int = 0):
    """Compiles the gradient of layers sharded over fsdp, or its microbatched sum."""
    batch = ("data", "fsdp") if "data" in mesh.shape else "fsdp"

    def loss(w, x):
        def layer(h, w):
            w = constrain(w, mesh)
            return constrain(jnp.tanh(h @ w), mesh, batch), None

        # Without remat, the gathered weights would be kept for the backward pass.
        return jnp.mean(lax.scan(jax.checkpoint(layer), x, w)[0] ** 2)

    def accumulated(w, xs):
        def micro(total, x):
            return total + jax.grad(loss)(w, x), None

        return lax.scan(micro, jnp.zeros_like(w), xs)[0]

    w = abstract(mesh, (num_layers, 64, 64), None, "fsdp")
    if not num_micro:
        return jax.jit(loss).lower(w, abstract(mesh, (16, 64), batch)).compile()
    x = abstract(mesh, (num_micro, 16, 64), None, batch)
    return jax.jit(accumulated, out_shardings=w.sharding).lower(w, x).compile()


@pytest.mark.parametrize("num_layers", [4, 32])
def test_fsdp_gathers_every_layer_once(num_layers):
    mesh = make_mesh(fsdp=8)
    result = audit(compile_scanned(mesh, num_layers), mesh)
    result.expect(
        {("all-gather", ("fsdp",)): (num_layers, num_layers * 64 * 64 * 4)}, small=8
    )
    (gather,) = [c for c in result.collectives if c.kind == "all-gather"]
    assert (gather.dtype, gather.shape) == ("f32", (1, 64, 64))


def test_nested_loops_multiply():
    mesh = make_mesh(data=2, fsdp=4)
    result = audit(compile_scanned(mesh, num_layers=5, num_micro=3), mesh)
    layer_bytes = 64 * 64 * 4
    count, num_bytes = result.total("all-gather", "fsdp")
    # Forward and backward, for every layer of every microbatch.
    assert count == 2 * 5 * 3
    assert num_bytes == count * layer_bytes
    count, num_bytes = result.total("all-reduce", "data")
    assert (count, num_bytes) == (15, 15 * layer_bytes)


def test_tensor_parallel_reduces_once():
    mesh = make_mesh(data=2, tensor=4)
    params = {
        "up": abstract(mesh, (32, 64), None, "tensor"),
        "down": abstract(mesh, (64, 16), "tensor"),
    }

    def forward(params, x):
        y = jnp.tanh(x @ params["up"]) @ params["down"]
        return constrain(y, mesh, "data")

    x = abstract(mesh, (8, 32), "data")
    result = audit(jax.jit(forward).lower(params, x).compile(), mesh)
    result.expect({("all-reduce", ("tensor",)): (1, 4 * 16 * 4)})


AXES = [
    ("a",),
    ("b",),
    ("c",),
    ("a", "b"),
    ("a", "c"),
    ("b", "c"),
    ("a", "b", "c"),
]


def compile_psum(mesh: Mesh, axes) -> jax.stages.Compiled:
    spec = P(("a", "b", "c"))

    @jax.shard_map(mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    def reduce(x):
        return lax.psum(x, axes)

    return jax.jit(reduce).lower(abstract(mesh, (16,), ("a", "b", "c"))).compile()


@pytest.mark.parametrize("axes", AXES)
def test_groups_are_mapped_to_axes_even_if_strided(axes):
    mesh = make_mesh(a=2, b=2, c=2)
    result = audit(compile_psum(mesh, axes), mesh)
    assert result.by_kind_and_axes() == {("all-reduce", axes): (1, 8)}


@pytest.mark.parametrize("axes", [("a",), ("b",), ("b", "c")])
def test_ids_are_positions_in_the_mesh(axes):
    order = [5, 0, 3, 6, 1, 7, 2, 4]
    mesh = make_mesh([jax.devices()[i] for i in order], a=2, b=2, c=2)
    compiled = compile_psum(mesh, axes)
    assert audit(compiled, mesh).by_kind_and_axes() == {("all-reduce", axes): (1, 8)}
    # The program really reduces along the axes of the permuted mesh.
    x = jax.device_put(jnp.arange(16.0), NamedSharding(mesh, P(("a", "b", "c"))))
    cube = np.arange(16.0).reshape(2, 2, 2, 2)
    summed = cube.sum(tuple("abc".index(axis) for axis in axes), keepdims=True)
    expected = np.broadcast_to(summed, cube.shape).ravel()
    np.testing.assert_array_equal(compiled(x), expected)
    with pytest.raises(ValueError, match="pass the mesh of its shardings"):
        audit(compiled, make_mesh(a=2, b=2, c=2))


def test_axes_of_size_one_are_not_named():
    mesh = make_mesh(replica=1, data=8, tensor=1)
    assert audit(compile_mlp_gradient(mesh), mesh).by_kind_and_axes().keys() == {
        ("all-reduce", ("data",))
    }


def test_every_kind_of_collective_is_recognized():
    mesh = make_mesh(data=2, pipe=4)
    spec = P(("data", "pipe"))

    @jax.shard_map(mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    def exchange(x):
        def tick(_, x):
            return lax.ppermute(x, "pipe", [(i, (i + 1) % 4) for i in range(4)])

        x = lax.fori_loop(2, 9, tick, x)
        x = lax.all_to_all(x, "data", 0, 1, tiled=True)
        x = lax.psum_scatter(x, "pipe", tiled=True)
        return lax.all_gather(x, ("data", "pipe"), tiled=True)

    x = abstract(mesh, (64, 16), ("data", "pipe"))
    result = audit(jax.jit(exchange).lower(x).compile(), mesh)
    local = 8 * 16 * 4
    result.expect(
        {
            ("collective-permute", ("pipe",)): (7, 7 * local),
            ("all-to-all", ("data",)): (1, local),
            ("reduce-scatter", ("pipe",)): (1, local),
            ("all-gather", ("data", "pipe")): (1, 2 * local),
        }
    )


GROUPS = """HloModule hand, num_partitions=8

%add (x: f32[], y: f32[]) -> f32[] {
  %x = f32[] parameter(0)
  %y = f32[] parameter(1)
  ROOT %sum = f32[] add(%x, %y)
}

ENTRY %main (p: f32[6]) -> f32[6] {
  %p = f32[6]{0} parameter(0)
  ROOT %r = f32[6]{0} all-reduce(%p), channel_id=1, GROUPS, to_apply=%add
}
"""


@pytest.mark.parametrize(
    ("groups", "axes"),
    [
        ("replica_groups={{0,1,2,3},{4,5,6,7}}", ("b",)),
        ("replica_groups={{0,4},{1,5},{2,6},{3,7}}", ("a",)),
        ("replica_groups={}", ("a", "b")),
        ("replica_groups=[4,2]<=[2,4]T(1,0)", ("a",)),
        # Halves of an axis, a diagonal, groups of different sizes, missing devices.
        ("replica_groups={{0,1},{2,3},{4,5},{6,7}}", ("?",)),
        ("replica_groups={{0,5},{1,4},{2,7},{3,6}}", ("?",)),
        ("replica_groups={{0,1,2},{3,4,5,6,7}}", ("?",)),
        ("replica_groups={{0,1,2,3}}", ("?",)),
    ],
)
def test_groups_that_match_no_axes_are_unknown(groups, axes):
    text = GROUPS.replace("GROUPS", groups + ", use_global_device_ids=true")
    result = audit(text, make_mesh(a=2, b=4))
    assert result.by_kind_and_axes() == {("all-reduce", axes): (1, 24)}


def test_groups_of_one_device_are_left_out():
    one = "replica_groups={{0},{1},{2},{3},{4},{5},{6},{7}}"
    mesh = make_mesh(a=2, b=4)
    text = GROUPS.replace("GROUPS", one + ", use_global_device_ids=true")
    assert audit(text, mesh) == Audit(())
    assert str(audit(text, mesh)) == "no collectives"
    # Without a channel, ids are replica ids, and there is one replica.
    text = GROUPS.replace("channel_id=1, GROUPS", "replica_groups={}")
    assert audit(text, mesh) == Audit(())
    # With a channel and replica ids, a group has all partitions of its replicas.
    text = GROUPS.replace("GROUPS", "replica_groups={{0}}")
    assert audit(text, mesh).total() == (1, 24)


def test_expect_lists_the_differences():
    mesh = make_mesh(data=8)
    result = audit(compile_mlp_gradient(mesh), mesh)
    with pytest.raises(ValueError, match=r"unexpected:\n.*\n.*all-reduce.*test_audit"):
        result.expect({})
    with pytest.raises(ValueError, match="missing: all-gather over data"):
        result.expect({("all-reduce", ("data",)): None, ("all-gather", ("data",)): 3})
    with pytest.raises(ValueError, match="expected 99 of them, found"):
        result.expect({("all-reduce", ("data",)): 99})
    result.expect({}, small=10**6)


def test_the_table_and_json_have_all_collectives():
    mesh = make_mesh(data=2, fsdp=4)
    result = audit(compile_scanned(mesh, num_layers=5, num_micro=3), mesh)
    lines = str(result).splitlines()
    assert lines[0].split() == ["kind", "axes", "count", "bytes", "source"]
    assert any("240.0 KiB  sharding/test_audit.py:" in line for line in lines)
    assert len({line.index(line.split()[1]) for line in lines}) == 1
    loaded = json.loads(result.to_json())
    assert sum(row["bytes"] for row in loaded["totals"]) == result.total()[1]
    assert len(loaded["collectives"]) == len(result.collectives)


def compile_while(mesh: Mesh) -> jax.stages.Compiled:
    @jax.shard_map(mesh=mesh, in_specs=P("data"), out_specs=P("data"))
    def halve(x):
        def large(x):
            return lax.psum(jnp.sum(x), "data") > 1

        return lax.while_loop(large, lambda x: x / 2, x)

    return jax.jit(halve).lower(abstract(mesh, (8,), "data")).compile()


def test_a_loop_without_a_trip_count_is_an_error():
    mesh = make_mesh(data=8)
    compiled = compile_while(mesh)
    with pytest.raises(ValueError, match=r"test_audit.py:\d+\), whose trip count"):
        audit(compiled, mesh)
    # The condition runs once more than the body.
    result = audit(compiled, mesh, count_unknown_loops_as=4)
    assert result.total("all-reduce", "data") == (5, 20)


def test_a_mesh_of_another_size_is_an_error():
    text = GROUPS.replace("GROUPS", "replica_groups={}")
    with pytest.raises(ValueError, match="runs on 8 devices, but the mesh"):
        audit(text, make_mesh(jax.devices()[:4], data=4))
    lowered = jax.jit(jnp.sin).lower(1.0).as_text()
    with pytest.raises(ValueError, match="not of a lowered one"):
        audit(lowered, make_mesh(data=8))


def test_the_example_in_the_docs_runs():
    page = (ROOT / "docs" / "audit.md").read_text()
    exec(page.split("```python\n")[1].split("```")[0], {})
