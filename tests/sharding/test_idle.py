"""Mesh axes that shard nothing, in the library and in training."""

import jax
import jax.numpy as jnp
import pytest
import tiny_runs

from meshloom.sharding import (
    MeshSpec,
    Rules,
    Sharder,
    data,
    fsdp,
    idle_axes,
    resolve,
    sequence,
    tensor,
)

TREE = {"up": jax.ShapeDtypeStruct((8, 24), "float32")}
AXES = {"up": ("embed", "mlp")}
BATCH = {"batch": {"x": jax.ShapeDtypeStruct((16, 48, 8), "float32")}}
BATCH_AXES = {"batch": {"x": ("batch", "residual_length", "embed")}}


def layouts(rules: Rules, mesh):
    batch = resolve(BATCH, rules, mesh, axes=BATCH_AXES, role="compute")
    return [resolve(TREE, rules, mesh, axes=AXES), batch]


def find(rules: Rules, **sizes):
    return idle_axes(rules, layouts(rules, MeshSpec(**sizes).abstract()))


def test_an_axis_that_shards_anything_is_not_idle():
    rules = data() + fsdp() + tensor()
    assert find(rules, data=2, fsdp=2, tensor=2) == {}
    assert find(rules, replica=2, expert=2) == {}  # the batch
    assert find(rules) == {}
    assert idle_axes(rules, []) == {}


def test_the_reason_names_rules_and_dimensions():
    assert find(data() + fsdp(), data=2, context=6) == {
        "context": "no array is sharded over it, so its 6 ways would duplicate work. "
        "No rule names it; plans that do: context, sequence. Unsharded dimensions that "
        "it divides: mlp of up (24), residual_length of batch/x (48)"
    }
    assert (
        "No rule names it; plans that do: tensor, tensor2d, sequence. Unsh"
        in (find(data(), tensor=4)["tensor"])
    )
    rules = data() + Rules.of({"mlp": ["tensor", None]})
    assert (
        "Rules that name it did not apply: mlp of up: tensor: indivisible (24 by 5). U"
        in (find(rules, tensor=5)["tensor"])
    )
    rules = data() + Rules.of({"experts": "expert", "batch": "data"})
    assert (
        "No array has a logical axis whose rule names it (lookup_batch, exper"
        in (find(rules, data=2, expert=2)["expert"])
    )


def test_an_axis_that_shards_only_activations_is_not_idle():
    rules = data() + sequence()
    mesh = MeshSpec(data=2, tensor=4).make()
    shard = Sharder(mesh, rules)

    @jax.jit
    def step(x):
        def body(x, _):
            return jax.checkpoint(lambda x: shard(x, (None, "residual_length")))(x), ()

        return jnp.sum(jax.lax.scan(body, x, length=2)[0])

    layout = [resolve(TREE, rules, mesh, axes=AXES)]
    assert set(idle_axes(rules, layout)) == {"data", "tensor"}
    traced = jax.jit(jax.grad(step)).trace(jnp.ones((4, 8)))
    assert set(idle_axes(rules, layout, traced)) == {"data"}
    assert set(idle_axes(rules, layout, traced.jaxpr)) == {"data"}


@pytest.mark.parametrize(
    ("mesh", "message"),
    [
        (
            "context=8",
            "mesh axis context=8: no array is sharded over it, so its 8 ways "
            "would duplicate work. No rule names it; plans that do: context, sequence. "
            "Unsharded dimensions that it divides: ",
        ),
        ("data=2,context=4", "mesh axis context=4: no array is sharded ov"),
    ],
)
def test_training_refuses_an_idle_axis(tmp_path, capfd, mesh, message):
    plan = ("--set", 'plan="data+fsdp+tensor+pipeline"')
    line = tiny_runs.refused(
        capfd, tiny_runs.train(tmp_path / "run", "--mesh", mesh, "--dry-run", *plan)
    )
    assert line.startswith(message)
    assert "length of batch/inputs" in line
    assert (
        "an axis that the plan 'data+fsdp+tensor+pipeline' uses, such as data" in line
    )


def test_training_accepts_an_axis_that_the_plan_uses(tmp_path):
    flags = ("--mesh", "data=4,tensor=2", "--dry-run")
    assert tiny_runs.main(tiny_runs.train(tmp_path / "run", *flags)) == 0
    plan = ("--set", 'plan="data"')
    assert tiny_runs.main(tiny_runs.train(tmp_path / "run", *flags, *plan)) == 2
