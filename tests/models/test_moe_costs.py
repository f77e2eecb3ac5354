"""What `meshloom plan` knows of experts, against the model and a compiled step."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from test_moe import DEEP, TINY
from tiny_plans import config

from meshloom.sharding import MeshSpec
from meshloom.trainer.plan import scenario
from meshloom.trainer.plan.roofline import flops
from meshloom.trainer.plan.searching.candidates import all_meshes
from meshloom.trainer.plan.traffic import traffic
from meshloom.trainer.program.hardware import parse_target

ROWS, LENGTH = 8, 16
TARGET = parse_target("h100-1x8")


@pytest.mark.parametrize("settings", [{}, DEEP])
def test_products_add_up_to_the_active_flops(settings):
    """model_flops counts the causal half of attention."""
    model = dataclasses.replace(TINY, **settings)
    costs = model.costs(ROWS, LENGTH, platform="cpu")
    squares = {"scores", "attend"}
    causal = sum(p.flops / (2 if p.name in squares else 1) for p in costs.products)
    total = 3 * (model.num_layers * causal + costs.head.flops)
    shapes = jax.ShapeDtypeStruct((ROWS, LENGTH), jnp.int32)
    assert total == pytest.approx(model.model_flops({"inputs": shapes}))


def made(mesh: str, **settings):
    model = dataclasses.replace(TINY, max_length=128, **settings)
    spec = MeshSpec.parse(mesh)
    return dataclasses.replace(config(), model=model, mesh=spec, batch_size=64)


@pytest.mark.parametrize("remat, runs", [("none", 4), ("full", 6)])
def test_tokens_that_travel_are_counted(remat, runs):
    case = scenario.make_case(made("fsdp=4,expert=2", remat=remat), TARGET)
    found = [t for t in traffic(case) if t.axes == ("expert",)]
    (moved,) = [t.bytes for t in found if t.kind == "all-to-all"]
    # For as many rows as there could be: 2 devices, 2 experts of a token on each.
    rows = 2 * 2 * 64 * 128 // 8
    assert moved == TINY.num_layers * runs * rows * TINY.d_model * 4


def test_memory_of_experts_is_sharded_and_of_buffers_is_bounded():
    case = scenario.make_case(made("expert=4,fsdp=2"), TARGET)
    (received,) = case.costs.exchanged
    one = dataclasses.replace(received, count=1)
    tokens = 64 * 128 // 8
    assert case.bytes(one) == 4 * min(2, 4 // 4) * tokens * TINY.d_model * 4
    params = {a.path: a for a in case.sharded.trees["params"].arrays}
    assert params["blocks/mlp/up"].ways == 8


def test_the_search_looks_at_experts_where_there_are_some():
    found = {mesh.expert for mesh in all_meshes(made("fsdp=-1"), TARGET)}
    assert found == {1, 2, 4, 8}
    assert {mesh.expert for mesh in all_meshes(config(), TARGET)} == {1}


def test_gradients_of_experts_are_not_summed_over_their_axis():
    case = scenario.make_case(made("expert=4,data=2"), TARGET)
    dense, experts = 0, 0
    for path, weight in case.sharded.weights.items():
        is_expert = path.split("/")[-1] in ("gate", "up", "down")
        experts += weight.elements * case.itemsize * is_expert
        dense += weight.elements * case.itemsize * (not is_expert)
    found = {t.axes: t.bytes for t in traffic(case) if t.what == "gradients"}
    assert found[("data",)] == experts
    assert found[("data", "expert")] > 0.9 * dense


def test_a_forecast_of_a_pipeline_with_experts():
    found, alone = (
        scenario.make_case(
            dataclasses.replace(made(mesh, remat="full"), num_microbatches=4), TARGET
        )
        for mesh in ("pipe=2,expert=2,fsdp=2", "pipe=2,fsdp=4")
    )
    kinds = {(t.kind, t.axes) for t in traffic(found)}
    assert ("all-to-all", ("expert",)) in kinds
    assert flops(found).executed == flops(alone).executed
