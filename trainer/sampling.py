"""Text from a trained model, for models that can generate and data that can decode."""

import functools
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from ..sharding import Sharder, parse_plan

if TYPE_CHECKING:
    from .train import Config


def sample(
    config: "Config",
    mesh: Mesh,
    params: Any,
    prompt: str,
    num_tokens: int,
    *,
    temperature: float = 0.8,
    top_k: int | None = None,
    seed: int = 0,
) -> str:
    """The prompt and its continuation. All processes of a job must call it."""
    model = config.model
    tokenizer = config.data.tokenizer()
    if tokenizer is None or not hasattr(model, "generate"):
        raise ValueError(
            f"{type(model).__qualname__} with data {type(config.data).__name__} "
            "cannot write text: the model needs a `generate` method and the data a "
            "tokenizer. Leave sample_prompt unset."
        )
    ids = tokenizer.encode(prompt)
    if len(ids) == 0:
        raise ValueError("the prompt is empty; give at least one character")
    # One row of batch cannot be cut: only the cuts of the weights stay.
    shard = Sharder(mesh, parse_plan(config.plan).without("batch", "lookup_batch"))
    whole = NamedSharding(mesh, P())
    generate = jax.jit(
        functools.partial(
            model.generate,  # type: ignore
            num_tokens=num_tokens,
            temperature=temperature,
            top_k=top_k,
            shard=shard,
        ),
        out_shardings=whole,
    )
    tokens = generate(
        params, jnp.asarray(ids, jnp.int32)[None], key=jax.random.key(seed)
    )
    return tokenizer.decode(jax.device_get(tokens)[0])
