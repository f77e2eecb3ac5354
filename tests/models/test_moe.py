"""Tests of routing and of the exchange of tokens between experts."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from meshloom.models import experts, moe, nnx_pure, routing
from meshloom.models.moe_layers import STATISTICS, Experts
from meshloom.sharding import MeshSpec, Sharder, parse_plan

T, D, E, K, WAYS = 12, 4, 8, 2, 4
TINY = moe.Config(
    vocab_size=32,
    num_layers=2,
    d_model=16,
    num_heads=2,
    d_ff=24,
    max_length=16,
    compute_dtype="float32",
    num_experts=4,
    experts_per_token=2,
)
# The factor of each expert stands for its weights.
FACTORS = jnp.arange(1.0, E + 1)


def scaled(rows_RD, counts_X, first=0):
    """An expert e that multiplies by e + 1, and NaN for rows that belong to none."""
    ends = jnp.cumsum(counts_X)
    index = jnp.arange(len(rows_RD))
    expert = jnp.sum(index[:, None] >= ends[None], axis=1)
    y = rows_RD * (first + expert + 1.0)[:, None]
    return jnp.where((index < ends[-1])[:, None], y, jnp.nan)


def emulated(operand, output, starts, sizes, out_starts, got, *, axis_name):
    """ragged_all_to_all by gathers, which CPUs have: what the offsets promise."""
    me = lax.axis_index(axis_name)
    gathered = [
        lax.all_gather(x, axis_name) for x in (operand, starts, sizes, out_starts)
    ]
    for source in range(WAYS):
        rows, begin, size, out = (x[source] for x in gathered)
        index = jnp.arange(len(output)) - out[me]
        is_row = (index >= 0) & (index < size[me])
        taken = rows[jnp.clip(begin[me] + index, 0, len(rows) - 1)]
        output = jnp.where(is_row[:, None], taken, output)
    return output


def exchanged(chosen_TK, *, ragged: bool, x_TD):
    """Returns the results, what was kept and rows received, on four devices."""
    mesh = MeshSpec(expert=WAYS).make(jax.devices()[:WAYS])
    ways = experts.Ways(("expert",), WAYS, ragged)

    def device(x, chosen):
        first = lax.axis_index("expert") * (E // WAYS)
        ffn = functools.partial(scaled, first=first)
        y, kept, received = experts.dropless(x, chosen, E, ways, ffn)
        return y, kept, received[None]

    run = jax.shard_map(
        device,
        mesh=mesh,
        in_specs=(P("expert"), P("expert")),
        out_specs=P("expert"),
    )
    return jax.jit(run)(x_TD, chosen_TK)


ROUTES = {
    "random": jax.random.permutation(
        jax.random.key(1), jnp.tile(jnp.arange(E), (T * WAYS, 1)), 1, independent=True
    )[:, :K],
    "one expert": jnp.tile(jnp.array([[6, 7]]), (T * WAYS, 1)),
}


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("ragged", [False, True])
def test_every_token_reaches_its_experts(route, ragged, monkeypatch):
    monkeypatch.setattr(lax, "ragged_all_to_all", emulated)
    x_TD = jax.random.normal(jax.random.key(0), (T * WAYS, D))
    chosen_TK = ROUTES[route]
    y_TKD, kept_TK, received = exchanged(chosen_TK, ragged=ragged, x_TD=x_TD)
    expected = x_TD[:, None] * FACTORS[chosen_TK][..., None]
    np.testing.assert_allclose(y_TKD, expected, rtol=1e-6)
    assert kept_TK.all()
    assert received.sum() == T * WAYS * K
    if route == "one expert":
        assert list(received) == [0, 0, 0, T * WAYS * K]


def test_rows_of_no_expert_do_not_reach_weight_gradients():
    """NaN in a row after the last group: multiplied by zero it would stay NaN."""
    rows = jnp.ones((6, D)).at[4:].set(jnp.nan)
    counts = jnp.array([1, 3])

    def total(w):
        hidden = lambda x, product: product(x, w)  # noqa: E731
        return jnp.sum(experts.grouped(rows, counts, hidden))

    grad = jax.grad(total)(jnp.ones((2, D, D)))
    np.testing.assert_array_equal(grad[:, 0, 0], [1.0, 3.0])


def test_softmax_and_sigmoid_weights():
    logits = jnp.array([[[2.0, 1.0, 0.0, -1.0]]])
    config = dataclasses.replace(TINY, normalize_weights=False)
    routed = routing.route(logits, None, config)
    assert list(routed.experts_BLK[0, 0]) == [0, 1]
    np.testing.assert_allclose(
        routed.weights_BLK[0, 0], jax.nn.softmax(logits[0, 0])[:2], rtol=1e-6
    )
    config = dataclasses.replace(TINY, scores="sigmoid", weight_scale=2.5)
    weights = routing.route(logits, None, config).weights_BLK[0, 0]
    chosen = jax.nn.sigmoid(logits[0, 0, :2])
    np.testing.assert_allclose(weights, 2.5 * chosen / chosen.sum(), rtol=1e-6)


def test_a_bias_changes_the_choice_but_not_the_weights():
    logits = jnp.array([[[2.0, 1.0, 0.0, -1.0]]])
    config = dataclasses.replace(TINY, normalize_weights=False)
    routed = routing.route(logits, jnp.array([-9.0, 0.0, 0.0, 9.0]), config)
    assert list(routed.experts_BLK[0, 0]) == [3, 1]
    expected = jax.nn.softmax(logits[0, 0])[jnp.array([3, 1])]
    np.testing.assert_allclose(routed.weights_BLK[0, 0], expected, rtol=1e-6)


def test_biases_rise_for_experts_with_few_tokens():
    config = dataclasses.replace(TINY, bias_rate=0.1)
    zeros = config.init_variables(jax.random.key(0))
    counts = jnp.array([[3.0, 1.0, 2.0, 2.0], [0.0, 0.0, 0.0, 8.0]])
    new = jax.tree.leaves(config.update_variables(zeros, counts))[0]
    np.testing.assert_allclose(new, [[-0.1, 0.1, 0, 0], [0.1, 0.1, 0.1, -0.1]])
    assert not hasattr(TINY, "init_variables")


def test_the_balance_loss_is_one_if_all_experts_are_used_alike():
    tokens, even = jnp.array([6.0]), jnp.full((1, 4), 3.0)
    assert routing.balance(even, even / 2, tokens)[0] == 6.0
    one = jnp.array([[12.0, 0, 0, 0]])
    assert routing.balance(one, one / 2, tokens)[0] == 4 * 6.0


def batch(config, rows=4, length=8):
    tokens = jax.random.randint(
        jax.random.key(3), (rows, length + 1), 0, config.vocab_size
    )
    weights = jnp.ones((rows, length)).at[0, 3:].set(0)
    return {"inputs": tokens[:, :-1], "targets": tokens[:, 1:], "weights": weights}


def with_zero_router(config):
    """Parameters of which every token goes to the first experts, as ties do."""
    params = config.init(jax.random.key(0))
    params["blocks"]["mlp"]["router"] *= 0
    return params


def test_dropless_drops_nothing_and_capacity_says_what_it_drops():
    params, data = with_zero_router(TINY), batch(TINY)
    _, weight, sums = jax.jit(lambda p: TINY.loss(p, data, Sharder()))(params)
    assert set(STATISTICS) <= set(sums)
    assert sums["dropped"] == 0
    assert sums["expert_imbalance"] / weight == TINY.num_experts / 2
    np.testing.assert_allclose(sums["router_entropy"] / weight, np.log(4), rtol=1e-6)
    config = dataclasses.replace(TINY, capacity_factor=1.0)
    assert config.capacity(8) == 4  # each of 2 experts wants all 8 tokens
    _, weight, sums = jax.jit(lambda p: config.loss(p, data, Sharder()))(params)
    # The second half of each example is dropped; of the first, 3 tokens count.
    assert sums["dropped"] == 3 * 4
    assert weight == 3 + 3 * 8


def test_a_large_capacity_is_dropless():
    config = dataclasses.replace(TINY, capacity_factor=float(TINY.num_experts))
    params, data = TINY.init(jax.random.key(0)), batch(TINY)
    grads = [
        jax.jit(jax.value_and_grad(lambda p, c=c: c.loss(p, data, Sharder())[0]))(
            params
        )
        for c in (TINY, config)
    ]
    compare = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5)
    jax.tree.map(compare, *grads)


@pytest.mark.parametrize("capacity", [None, 4.0])
def test_a_layer_is_the_weighted_sum_of_its_experts(capacity):
    """Against every expert applied to every token, and the weights of the chosen."""
    config = dataclasses.replace(TINY, capacity_factor=capacity)
    make = functools.partial(Experts, config)
    params = nnx_pure.init(make, jax.random.key(0))
    params = jax.tree.map(lambda w: 30 * w, params)
    x = jax.random.normal(jax.random.key(1), (2, 8, config.d_model))
    y, *_ = nnx_pure.bind(make, params)(x, jnp.ones((2, 8)), Sharder())
    gate = jnp.einsum("BLD,EDF->BLEF", x, params["gate"])
    up = jnp.einsum("BLD,EDF->BLEF", x, params["up"])
    each = jnp.einsum("BLEF,EFD->BLED", jax.nn.silu(gate) * up, params["down"])
    scores = jax.nn.softmax(x @ params["router"])
    least = jnp.sort(scores)[..., -config.experts_per_token, None]
    chosen = jnp.where(scores >= least, scores, 0)
    weights = chosen / chosen.sum(-1, keepdims=True)
    expected = jnp.einsum("BLED,BLE->BLD", each, weights)
    np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-5)


DEEP = dict(num_layers=5, first_dense=1, moe_every=2, num_shared_experts=1)


@pytest.mark.parametrize("mesh", ["", "expert=2,tensor=2"])
def test_generation_computes_what_training_did(mesh):
    config = dataclasses.replace(TINY, bias_rate=0.1, **DEEP)
    params = jax.tree.map(lambda w: 4 * w, config.init(jax.random.key(0)))
    variables = config.init_variables(jax.random.key(0))
    variables = jax.tree.map(
        lambda b: jax.random.normal(jax.random.key(1), b.shape), variables
    )
    shard = Sharder()
    if mesh:
        rules = parse_plan("data+fsdp+tensor").without("batch", "lookup_batch")
        shard = Sharder(MeshSpec.parse(mesh).make(jax.devices()[:4]), rules)
    prompt, key = jnp.array([[1, 5, 9]]), jax.random.key(0)
    tokens = jax.jit(
        lambda p, v: config.generate(
            p, prompt, 5, key=key, temperature=0.0, variables=v, shard=shard
        )
    )(params, variables)
    logits = config.logits(params, tokens[:, :-1], Sharder(), variables)
    np.testing.assert_array_equal(jnp.argmax(logits, -1)[0, 2:], tokens[0, 3:])


@pytest.mark.parametrize(
    "settings, message",
    [
        (dict(experts_per_token=5), "5 must not be larger than num_experts 4"),
        (dict(scores="tanh"), "scores must be one of softmax, sigmoid, got 'tanh'"),
        (dict(first_dense=2), "leaves 0, which must be a positive multiple"),
        (dict(moe_every=3), "leaves 2, which must be a positive multiple"),
        (dict(capacity_factor=0.0), "capacity_factor must be positive, or None"),
        (dict(num_experts=0), "num_experts must be positive, got 0"),
    ],
)
def test_settings_that_do_not_fit_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(TINY, **settings)


@pytest.mark.parametrize(
    "mesh, plan, message",
    [
        ("fsdp=2", "data+tensor2d", "the plan shards `embed` over fsdp"),
        ("expert=8", "data", "'experts' of size 4 cannot be sharded 8 ways"),
    ],
)
def test_plans_that_do_not_fit_are_refused(mesh, plan, message):
    shard = Sharder(MeshSpec.parse(mesh).abstract(), parse_plan(plan))
    params = jax.eval_shape(TINY.init, jax.random.key(0))
    data = batch(TINY, rows=8)
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(lambda p: TINY.loss(p, data, shard), params)
