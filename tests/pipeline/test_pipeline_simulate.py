"""The simulator against closed forms and against counts by hand."""

import json
from types import SimpleNamespace
from typing import get_args

import jax
import jax.numpy as jnp
import pytest

from meshloom.models.remat import Remat
from meshloom.sharding.pipeline import Sizes, best_microbatches, compare, make, simulate
from meshloom.sharding.pipeline.chunks import Chunks
from meshloom.sharding.pipeline.simulate import BACKWARD_COST

pytestmark = pytest.mark.compiles_anew

MIB = 2**20
SIZES = Sizes(
    activation_bytes=MIB,
    layers_per_stage=4,
    residual_bytes={"none": 10 * MIB, "save-named": 5 * MIB, "save-dots": 6 * MIB},
    weight_bytes=80 * MIB,
    fsdp=4,
)


@pytest.mark.parametrize("S", [1, 2, 4, 8])
@pytest.mark.parametrize("M", [1, 4, 5, 8, 24])
@pytest.mark.parametrize("remat", BACKWARD_COST)
def test_gpipe_and_1f1b_have_the_bubble_of_the_closed_form(S, M, remat):
    for name in ("gpipe", "1f1b"):
        result = simulate(make(name, S, M), remat=remat)
        assert result.ratio == pytest.approx((M + S - 1) / M)
        assert result.bubble == pytest.approx((S - 1) / (M + S - 1))
        assert result.ideal == M * (1 + BACKWARD_COST[remat])


@pytest.mark.parametrize("S", [1, 2, 4])
@pytest.mark.parametrize("R", [1, 2, 3, 4])
@pytest.mark.parametrize("groups", [1, 2, 5])
def test_interleaved_has_the_bubble_of_the_closed_form(S, R, groups):
    M = groups * S
    result = simulate(make("interleaved", S, M, R))
    assert result.ratio == pytest.approx((M + (S - 1) / R) / M)


def test_an_incomplete_group_costs_as_much_as_a_full_one():
    # The last of 5 microbatches goes around 4 stages alone, twice: 16 ticks, not 13.
    result = simulate(make("interleaved", 4, 5, 2), remat="none")
    assert (result.forward_ticks, result.backward_ticks) == (16, 16)
    assert result.cost == 16 / 2 * (1 + 2)


def test_policies_are_those_of_the_models():
    assert set(BACKWARD_COST) == set(get_args(Remat))
    totals = {remat: 1 + cost for remat, cost in BACKWARD_COST.items()}
    assert totals == {"none": 3, "save-named": 4, "save-dots": 4, "full": 5}


def test_live_inputs_by_stage():
    assert simulate(make("1f1b", 4, 16)).live == (7, 5, 3, 1)
    assert simulate(make("gpipe", 4, 16)).live == (16, 16, 16, 16)
    result = simulate(make("interleaved", 4, 16, 2))
    assert result.live == (11, 9, 7, 5) and result.slots == 11


def test_traffic_counts_sends_and_boundary_transfers():
    result = simulate(make("1f1b", 4, 16), sizes=SIZES)
    assert result.sends == (19, 19)
    assert result.traffic.ring == 38 * MIB
    assert result.boundary_transfers == 4 * 16
    assert result.traffic.boundary == 4 * 16 * 3 / 4 * MIB
    # Every chunk is sent: the ring carries R times as much.
    assert simulate(make("interleaved", 4, 16, 2)).sends == (35, 35)


def test_one_stage_sends_nothing():
    result = simulate(make("1f1b", 1, 3), sizes=SIZES)
    assert result.sends == (0, 0) and result.boundary_transfers == 0
    assert result.traffic.ring == result.traffic.boundary == 0
    assert result.bubble == 0


@pytest.mark.parametrize(
    "remat, inputs, kept_layers, residuals",
    [
        # 11 slots, chunks of 2 of the 4 layers.
        ("none", 11, 11 * 2, 22 * 10),
        ("save-named", 11, 2, 2 * 5),
        ("save-dots", 11, 2, 2 * 6),
        ("full", 11 + 2, 1, 10),
    ],
)
def test_memory_of_each_policy(remat, inputs, kept_layers, residuals):
    schedule = make("interleaved", 4, 16, 2)
    result = simulate(schedule, remat=remat, sizes=SIZES)
    assert result.kept_layers == kept_layers
    assert result.memory.inputs == inputs * MIB
    assert result.memory.residuals == residuals * MIB


@pytest.mark.parametrize(
    "remat, in_a_backward",
    [("none", 1), ("save-named", 2), ("save-dots", 2), ("full", 2)],
)
@pytest.mark.parametrize("R, ticks", [(1, 19), (2, 35)])
def test_gathers_per_microbatch_are_counted_per_pass(remat, in_a_backward, R, ticks):
    schedule = make("interleaved", 4, 16, R)
    result = simulate(schedule, remat=remat, gather="microbatch", sizes=SIZES)
    assert result.weight_gathers == ticks * (1 + in_a_backward) / R
    assert result.weight_scatters == ticks / R
    transfers = ticks * (2 + in_a_backward) / R
    assert result.traffic.weights == transfers * 80 * MIB * 3 / 4
    # A quarter is stored; one of the 4 layers is gathered.
    assert result.memory.weights == result.memory.gradients == (20 + 20) * MIB


def test_gathers_per_step_are_counted_once():
    result = simulate(make("interleaved", 4, 16, 2), sizes=SIZES)
    assert (result.weight_gathers, result.weight_scatters) == (1, 1)
    assert result.traffic.weights == 2 * 80 * MIB * 3 / 4
    assert result.memory.weights == (20 + 80) * MIB
    assert result.memory.gradients == 80 * MIB


@pytest.mark.parametrize("gather", ["step", "microbatch"])
def test_weights_without_fsdp_are_not_gathered(gather):
    sizes = Sizes(weight_bytes=80, layers_per_stage=4)
    result = simulate(make("1f1b", 2, 4), gather=gather, sizes=sizes)
    assert result.traffic.weights == 0
    assert result.memory.weights == result.memory.gradients == 80


def test_bytes_are_unknown_without_sizes():
    result = simulate(make("1f1b", 2, 4), remat="full", gather="microbatch")
    assert set(vars(result.memory).values()) == {None}
    assert set(vars(result.traffic).values()) == {None}
    partly = simulate(make("1f1b", 2, 4), sizes=Sizes(activation_bytes=5))
    assert partly.memory.inputs == 15 and partly.memory.residuals is None


def test_compare_simulates_every_schedule():
    rows = compare(4, 16, 2, remat="none", sizes=SIZES)
    assert [row.name for row in rows] == ["gpipe", "1f1b", "interleaved"]
    assert [row.slots for row in rows] == [16, 7, 11]
    assert [row.cost for row in rows] == [57, 57, 52.5]
    assert {row.remat for row in rows} == {"none"}
    assert [row.name for row in compare(4, 16, names=["1f1b"])] == ["1f1b"]


def test_json_includes_bubble_and_ratio():
    document = json.loads(
        json.dumps(simulate(make("1f1b", 4, 9), sizes=SIZES).to_json())
    )
    assert document["bubble"] == 0.25 and document["ratio"] == pytest.approx(4 / 3)
    assert document["memory"]["inputs"] == 7 * MIB


@pytest.mark.parametrize(
    "name, S, R, allowed, goal, best",
    [
        ("1f1b", 4, None, [64, 32, 16, 8], 0.1, 32),
        ("1f1b", 4, None, [28, 27, 26], 0.1, 27),  # a bubble of exactly 3/30
        ("1f1b", 4, None, [8, 7, 6], 0.3, 7),  # exactly 3/10, which 1 - 7/10 is not
        ("1f1b", 4, None, [4, 8, 2], 0.1, 8),
        ("interleaved", 4, 2, [8, 16, 32], 0.1, 16),
        # 5 is worse than 4, because its last microbatch goes around alone.
        ("interleaved", 4, 2, [4, 5], 0.1, 4),
        ("1f1b", 1, None, [4, 2, 8], 0.1, 2),
        ("gpipe", 1, None, [3, 3], 0.0, 3),
    ],
)
def test_best_microbatches_is_the_smallest_that_reaches_the_goal(
    name, S, R, allowed, goal, best
):
    assert best_microbatches(name, S, R, allowed, goal) == best


@pytest.mark.parametrize(
    "call, message",
    [
        (
            lambda s: simulate(s, remat="some"),
            "remat must be one of none, .* got 'some'",
        ),
        (
            lambda s: simulate(s, gather="never"),
            "gather must be one of step, microbatch, got 'nev",
        ),
        (lambda s: Sizes(fsdp=0), "size fsdp must be >= 1, got 0"),
        (lambda s: Sizes(residual_bytes={"none": 0}), "size none must be >= 1"),
        (lambda s: Sizes(residual_bytes={"full": 3}), "must be none, .* got 'full'"),
        (
            lambda s: best_microbatches("1f1b", 4, None, []),
            "with 4 stages: allowed must",
        ),
        (
            lambda s: simulate(s, sizes=Sizes(layers_per_stage=3)),
            "interleaved: 3 layers per stage cannot be divided into 2 chunks",
        ),
    ],
)
def test_bad_arguments_are_errors(call, message):
    with pytest.raises(ValueError, match=message):
        call(make("interleaved", 2, 4, 2))


def test_a_chunk_of_one_layer_is_gathered_once_per_backward():
    """The compiler merges its two computations."""
    sizes = Sizes(layers_per_stage=8)
    result = simulate(
        make("interleaved", 4, 8, 8), remat="full", gather="microbatch", sizes=sizes
    )
    assert result.weight_gathers == 2 * 67 / 8


@pytest.mark.parametrize(
    ("remat", "layers", "is_wrapped", "forwards"),
    [("full", 1, False, 4), ("full", 2, True, 5), ("save-named", 1, True, 4)],
)
def test_a_layer_is_recomputed_once(remat, layers, is_wrapped, forwards):
    """In a chunk of one layer, full remat recomputes nothing a second time."""
    calls = []

    def rematerialize(body):
        calls.append(body)
        return jax.checkpoint(body)

    stack = SimpleNamespace(
        remat=remat,
        rematerialize=rematerialize,
        block=lambda params, x, batch, shard: jnp.tanh(x @ params["w"]),
    )
    keeps = SimpleNamespace(gather=lambda w, **_: w)
    params = {"w": jnp.full((2 * layers, 3, 3), 0.1)}
    chunks = Chunks(stack, params, {"w": keeps}, 2, None)  # type: ignore
    _, pull = chunks.backward(1, jnp.ones((4, 3)), {})
    assert bool(calls) == is_wrapped
    result = simulate(
        make("interleaved", 2, 4, 2),
        remat=remat,
        sizes=Sizes(layers_per_stage=2 * layers),
    )
    assert 1 + result.backward_cost == forwards
    grads, _ = pull(jnp.ones((4, 3)))

    def plain(w):
        x = jnp.ones((4, 3))
        for layer in range(layers, 2 * layers):
            x = jnp.tanh(x @ w[layer])
        return jnp.sum(x)

    expected = jax.grad(plain)(params["w"])[layers:]
    assert jnp.array_equal(grads["w"], expected)
