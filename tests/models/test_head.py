"""The head in blocks computes what the head computes at once, and keeps no logits."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshloom.models.head import STREAM, Head
from meshloom.models.transformer import Config
from meshloom.sharding import MeshSpec, Rules, Sharder, audit, parse_plan

replace = dataclasses.replace
ROWS, LENGTH, WIDTH, BLOCK = 8, 16, 16, 4
PLAIN = Config(
    vocab_size=61,
    num_layers=1,
    d_model=WIDTH,
    num_heads=2,
    d_ff=32,
    max_length=LENGTH,
    pad_vocab_to=8,
    z_loss=0.1,
    logit_softcap=5.0,
    compute_dtype="float32",
)
TIED = replace(PLAIN, tied_head=True, logit_softcap=None)
MESH = "data=2,fsdp=2,tensor=2"
LONG = Rules.of({"length": "context"}, plan="context")


def head_of(config: Config, mesh: str = "", rules: Rules | None = None) -> Head:
    shard = Sharder()
    if mesh:
        shard = Sharder(MeshSpec.parse(mesh).make(), rules or parse_plan("auto"))
    return Head(config, shard)


def arrays(config: Config, seed: int = 0):
    rng = np.random.default_rng(seed)
    shape, tokens = (WIDTH, config.padded_vocab), (ROWS, LENGTH)
    w = rng.normal(size=shape[:: -1 if config.tied_head else 1])
    weights = rng.uniform(size=tokens) * rng.integers(0, 2, tokens)
    return (
        rng.normal(size=(*tokens, WIDTH)).astype(np.float32),
        w.astype(np.float32),
        rng.integers(0, config.vocab_size, tokens).astype(np.int32),
        weights.astype(np.float32),
    )


def loss_of(head: Head, scale: float = 1.0):
    """Returns a loss of stored arrays; `scale` is the gradient that arrives at it."""

    def loss(x, w, targets, weights):
        w = head.shard.weight(w, head.axes)
        batch = {"targets": targets, "weights": weights}
        total, z = head.sums(head.shard(x, STREAM), w, batch)
        return scale * total, (total, z)

    return loss


def compiled(head: Head, values):
    step = jax.value_and_grad(loss_of(head, 3.0), argnums=(0, 1, 3), has_aux=True)
    places: list = [None] * 4
    if not head.shard.is_single:
        shapes = dict(enumerate(values))
        axes = {0: STREAM, 1: head.axes, 2: STREAM[:2], 3: STREAM[:2]}
        found = head.shard.shardings(shapes, axes, role="param")
        found |= {0: head.shard.shardings({0: values[0]}, {0: STREAM})[0]}
        places = [found[i] for i in range(4)]
    return jax.jit(step, in_shardings=places).lower(*values).compile()


def run(head: Head, values):
    program = compiled(head, values)
    return jax.device_get(program(*jax.device_put(values, program.input_shardings[0])))


def assert_equal(found, expected):
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=1):
        np.testing.assert_allclose(one, other, atol=1e-6 * np.abs(other).max())


@pytest.mark.parametrize(
    ("config", "mesh", "rules", "block"),
    [
        (PLAIN, "", None, BLOCK),
        (TIED, "", None, 5),  # does not divide the tokens
        (PLAIN, MESH, None, 3),
        (TIED, MESH, parse_plan("data+fsdp+tensor+sequence"), BLOCK),
        (PLAIN, MESH, parse_plan("data+tensor2d"), BLOCK),
        (TIED, "tensor=8", None, BLOCK),
        (PLAIN, "fsdp=2,context=2,tensor=2", parse_plan("auto") + LONG, BLOCK),
    ],
)
def test_sums_and_gradients_are_those_of_all_logits_at_once(config, mesh, rules, block):
    values = arrays(config)
    blocks = head_of(replace(config, head_block=block), mesh, rules)
    assert blocks.num_blocks(values[0].shape) > 2
    assert_equal(run(blocks, values), run(head_of(config), values))


def test_a_block_of_all_tokens_is_not_a_loop():
    tokens = ROWS * LENGTH
    for block, num in ((None, 1), (0, 1), (tokens, 1), (tokens - 1, 2), (1, tokens)):
        head = head_of(replace(PLAIN, head_block=block))
        assert head.num_blocks((ROWS, LENGTH, WIDTH)) == num
    shared = head_of(replace(PLAIN, head_block=tokens // 4), MESH)
    assert shared.num_blocks((ROWS, LENGTH, WIDTH)) == 1


def test_the_gradient_of_the_weight_is_summed_in_float32():
    """The same token 2048 times: a sum in bfloat16 would stop growing at 256."""
    config = replace(
        PLAIN, compute_dtype="bfloat16", head_block=1, z_loss=0.0, logit_softcap=None
    )
    x = jnp.ones((1, 2048, WIDTH), jnp.bfloat16)
    w = jnp.zeros((WIDTH, config.padded_vocab), jnp.bfloat16)
    targets, weights = jnp.zeros((1, 2048), jnp.int32), jnp.ones((1, 2048))
    loss = loss_of(head_of(config))
    grad = jax.jit(jax.grad(loss, argnums=1, has_aux=True))(x, w, targets, weights)[0]
    expected = 2048 * (1 / config.vocab_size - 1)
    np.testing.assert_allclose(grad[:, 0].astype(np.float32), expected, rtol=2**-7)


def products(text: str) -> int:
    return len(re.findall(r"dot_general", text))


def test_without_gradients_only_the_logits_are_multiplied():
    loss = loss_of(head_of(replace(PLAIN, head_block=BLOCK)))
    values = arrays(PLAIN)
    assert products(str(jax.make_jaxpr(loss)(*values))) == 1
    grad = jax.grad(loss, argnums=(0, 1), has_aux=True)
    assert products(str(jax.make_jaxpr(grad)(*values))) == 3


def shapes_in(text: str) -> set[int]:
    """Returns the number of elements of every array of an optimized program."""
    found = re.findall(r"\b(?:f32|bf16|pred|s32)\[([\d,]+)\]", text)
    return {int(np.prod([int(n) for n in dims.split(",")])) for dims in found}


@pytest.mark.parametrize("mesh", ["", MESH])
def test_no_array_of_the_size_of_the_logits_exists(mesh):
    config = replace(PLAIN, vocab_size=1000)
    values = arrays(config)
    at_once, blocks = (
        compiled(head_of(replace(config, head_block=block), mesh), values).as_text()
        for block in (0, BLOCK)
    )
    ways, tensor = (4, 2) if mesh else (1, 1)
    each = config.padded_vocab // tensor
    assert ROWS * LENGTH // ways * each in shapes_in(at_once)
    # The weight and a block's logits are the largest arrays that are left.
    assert max(shapes_in(blocks)) <= max(WIDTH, BLOCK) * config.padded_vocab


def test_the_loop_only_sums_over_the_vocabulary():
    """The weight's gradient is summed over devices once, after the loop."""
    head = head_of(replace(PLAIN, head_block=BLOCK), MESH)
    program = compiled(head, arrays(PLAIN))
    found = audit(program, head.shard.mesh).collectives
    num = head.num_blocks((ROWS, LENGTH, WIDTH))
    in_loop = [c for c in found if c.count >= num]
    assert num == 8 and in_loop
    assert {(c.kind, c.axes) for c in in_loop} == {("all-reduce", ("tensor",))}
    # What is largest in it is the gradient of the input of one block.
    largest = max(c.bytes // c.count for c in in_loop)
    assert BLOCK * WIDTH * 4 <= largest < 2 * BLOCK * WIDTH * 4
    size = WIDTH * PLAIN.padded_vocab // 2 * 4
    summed = [c for c in found if {"data", "fsdp"} & {*c.axes} and c.bytes >= size // 2]
    # Gathered over fsdp, and its gradient summed over both.
    assert sum(c.bytes for c in summed if c.kind == "all-gather") == size
    assert sum(c.bytes for c in summed if c.kind != "all-gather") <= 1.5 * size


def test_a_negative_block_is_refused():
    with pytest.raises(ValueError, match="head_block must be >= 0, got -1; 0 computes"):
        replace(PLAIN, head_block=-1)
