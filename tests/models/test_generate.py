"""Generation with a cache against the model's plain forward pass."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from meshloom.models.transformer import Config
from meshloom.sharding import MeshSpec, Sharder, parse_plan, resolve
from meshloom.trainer.data import Text
from meshloom.trainer.program.optimizers import AdamW
from meshloom.trainer.program.schedules import Constant
from meshloom.trainer.run import sampling, train

LLAMA = Config(
    vocab_size=29,
    num_layers=2,
    d_model=16,
    num_heads=4,
    num_kv_heads=2,
    d_ff=24,
    max_length=12,
    pad_vocab_to=8,
    compute_dtype="float32",
)
GPT2 = Config(
    vocab_size=29,
    num_layers=2,
    d_model=16,
    num_heads=4,
    d_ff=24,
    max_length=12,
    norm="layer",
    positions="learned",
    mlp="gelu",
    use_bias=True,
    compute_dtype="float32",
)
PROMPT = jnp.array([[3, 1, 4, 1], [5, 9, 2, 6]], jnp.int32)
KEY = jax.random.key(0)
# Most of the time here is compilation; the programs run only briefly.
jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})


def random_params(config, seed=0):
    rng = np.random.default_rng(seed)
    shapes = jax.eval_shape(config.init, KEY)
    params = jax.tree.map(
        lambda x: jnp.asarray(0.3 * rng.normal(size=x.shape), x.dtype), shapes
    )
    # Otherwise the bias of the last norm would choose every token.
    params["final_norm"]["scale"] += 3
    return params


def generate(config, params, num_tokens=6, key=KEY, shard=None, **options):
    shard = shard or Sharder()
    run = functools.partial(
        config.generate, num_tokens=num_tokens, shard=shard, **options
    )
    return np.asarray(jit(run)(params, PROMPT, key=key))


def greedy_by_repeated_forward(config, params, num_tokens=6):
    """Computes each new token by a forward pass over all tokens before it."""
    logits_of = jit(lambda params, tokens: config.logits(params, tokens, Sharder()))
    tokens = np.pad(PROMPT, ((0, 0), (0, num_tokens)))
    for position in range(PROMPT.shape[1], tokens.shape[1]):
        logits = logits_of(params, jnp.asarray(tokens))
        tokens[:, position] = np.argmax(logits[:, position - 1], axis=-1)
    return tokens


@pytest.mark.parametrize("config", [GPT2, LLAMA], ids=["gpt2", "llama"])
def test_greedy_with_cache_equals_repeated_forward(config):
    params = random_params(config)
    tokens = generate(config, params, temperature=0.0)
    assert np.array_equal(tokens[:, :4], PROMPT)
    assert len(set(tokens[:, 4:].flatten().tolist())) > 1
    assert np.array_equal(tokens, greedy_by_repeated_forward(config, params))


def test_top_1_is_greedy_and_sampling_is_not():
    params = random_params(LLAMA)
    greedy = generate(LLAMA, params, temperature=0.0)
    assert np.array_equal(generate(LLAMA, params, top_k=1), greedy)
    sampled = generate(LLAMA, params, temperature=3.0)
    assert np.array_equal(sampled[:, :4], PROMPT)
    assert not np.array_equal(sampled, greedy)
    assert sampled.max() < LLAMA.vocab_size
    other = generate(LLAMA, params, temperature=3.0, key=jax.random.key(1))
    assert not np.array_equal(sampled, other)


@pytest.mark.parametrize("plan", ["data+fsdp+tensor", "data+fsdp+tensor+sequence"])
def test_generation_on_a_tensor_mesh_is_the_same(plan):
    params = random_params(LLAMA)
    mesh = MeshSpec(tensor=2).make(jax.devices()[:2])
    rules = parse_plan(plan).without("batch", "lookup_batch")
    shardings = resolve(params, rules, mesh, axes=LLAMA.axes()).shardings(mesh)
    sharded = jax.device_put(params, shardings)
    assert not sharded["head"].sharding.is_fully_replicated
    tokens = generate(LLAMA, sharded, temperature=0.0, shard=Sharder(mesh, rules))
    assert np.array_equal(tokens, generate(LLAMA, params, temperature=0.0))


def test_zero_new_tokens_return_the_prompt():
    params = random_params(LLAMA)
    assert np.array_equal(generate(LLAMA, params, num_tokens=0), PROMPT)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        (dict(num_tokens=9), "are 13, but the model's max_length is 12.*at most 8"),
        (dict(temperature=-1.0), "temperature must be >= 0 .*got -1.0"),
        (dict(top_k=0), "top_k must be from 1 .*got 0"),
        (dict(top_k=30), r"top_k must be from 1 to vocab_size \(29\), got 30"),
    ],
)
def test_bad_options_are_errors(how, message):
    params = jax.eval_shape(LLAMA.init, KEY)
    how = {"num_tokens": 6, "key": KEY, "shard": Sharder(), **how}
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(lambda params: LLAMA.generate(params, PROMPT, **how), params)


def test_an_empty_prompt_is_an_error():
    params = jax.eval_shape(LLAMA.init, KEY)
    with pytest.raises(ValueError, match="the prompt is empty"):
        jax.eval_shape(
            lambda params: LLAMA.generate(
                params, PROMPT[:, :0], 4, key=KEY, shard=Sharder()
            ),
            params,
        )


def test_the_result_can_be_replicated():
    """As sampling does, so that every process has the full text."""
    params = random_params(LLAMA)
    mesh = MeshSpec(tensor=2).make(jax.devices()[:2])
    rules = parse_plan("data+fsdp+tensor").without("batch", "lookup_batch")
    run = functools.partial(
        LLAMA.generate, num_tokens=2, temperature=0.0, shard=Sharder(mesh, rules)
    )
    replicated = NamedSharding(mesh, P())
    tokens = jit(run, out_shardings=replicated)(params, PROMPT, key=KEY)
    assert tokens.sharding.is_fully_replicated and tokens.shape == (2, 6)


def test_sampling_continues_a_text(tmp_path):
    """Text in, text out, on a mesh; bad prompts are refused before training."""
    (tmp_path / "a.txt").write_text("some text " * 20)
    config = train.Config(
        model=dataclasses.replace(GPT2, vocab_size=257, pad_vocab_to=2),
        data=Text(path=str(tmp_path), length=8),
        optimizer=AdamW(),
        schedule=Constant(value=0.1),
        batch_size=8,
        num_steps=1,
        plan="data+fsdp+tensor+sequence",
    )
    mesh = MeshSpec(data=2, tensor=2).make(jax.devices()[:4])
    params = random_params(config.model)
    # Makes one token the most likely, whatever came before.
    params["head"] = params["head"] * 0
    params["final_norm"]["bias"] = jnp.ones(16)
    params["head"] = params["head"].at[:, ord("x")].set(10.0)
    text = sampling.sample(config, mesh, params, "abc", 5)
    assert text == "abcxxxxx"
    sampling.check(config, "abc", 9)
    with pytest.raises(ValueError, match="are 13, but the model's max_length is 12"):
        sampling.check(config, "abc", 10)
    with pytest.raises(ValueError, match="the prompt is empty"):
        sampling.check(config, "", 9)
