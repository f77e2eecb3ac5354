"""Generates text with a trained model, if the model and the data support it."""

import functools
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from ...sharding import Sharder, resolve
from ..config.tree import label
from ..program import contract

if TYPE_CHECKING:
    from .train import Config


def sample(
    config: "Config",
    mesh: Mesh,
    params: Any,
    prompt: str,
    num_tokens: int,
    *,
    variables: Any = None,
    temperature: float = 0.8,
    top_k: int | None = None,
    seed: int = 0,
) -> str:
    """Returns the prompt and its continuation. Every process must call this.

    Args:
      params: with layers in their canonical order.
      variables: of a model that has some.
    """
    # A batch of one row cannot be sharded, and there is no pipeline to shard layers
    # for: only the other shardings of the weights stay.
    rules = config.make_rules().without("batch", "lookup_batch", "layer")
    shard = Sharder(mesh, rules)
    layout = resolve(params, rules, mesh, axes=config.model.axes())
    params = jax.jit(lambda x: x, out_shardings=layout.shardings(mesh))(params)
    generate, tokens = _generate_fn(config, prompt, num_tokens, shard)
    generate = functools.partial(generate, temperature=temperature, top_k=top_k)
    replicated = NamedSharding(mesh, P())
    options: Any = {}
    if contract.has_variables(config.model):
        options["variables"] = variables
    result = jax.jit(generate, out_shardings=replicated)(
        params, tokens, key=jax.random.key(seed), **options
    )
    return _tokenizer(config).decode(jax.device_get(result)[0])


def _tokenizer(config: "Config") -> Any:
    """Returns the tokenizer of the data; None if it is not text."""
    make = getattr(config.data, "tokenizer", None)
    return None if make is None else make()


def check(config: "Config", prompt: str, num_tokens: int) -> None:
    """Raises what `sample` would raise after training, using shapes alone."""
    generate, tokens = _generate_fn(config, prompt, num_tokens, Sharder())
    key, options = jax.random.key(0), {}
    params = jax.eval_shape(config.model.init, key)
    if contract.has_variables(config.model):
        init = functools.partial(contract.init_variables, config.model)
        options["variables"] = jax.eval_shape(init, key)
    jax.eval_shape(functools.partial(generate, key=key), params, tokens, **options)


def _generate_fn(config: "Config", prompt: str, num_tokens: int, shard: Sharder) -> Any:
    """Returns the model's `generate`, and the prompt as tokens [1, P]."""
    model, tokenizer = config.model, _tokenizer(config)
    if tokenizer is None or not hasattr(model, "generate"):
        raise ValueError(
            f"{label(type(model))} with data {type(config.data).__name__} cannot "
            "generate text: the model needs a method `generate` and the data a method "
            "`tokenizer`. Train on text, or leave sample_prompt unset."
        )
    ids = tokenizer.encode(prompt)
    if len(ids) == 0:
        raise ValueError("the prompt is empty; give at least one character")
    generate = functools.partial(
        model.generate,  # type: ignore
        num_tokens=num_tokens,
        shard=shard,
    )
    return generate, jnp.asarray(ids, jnp.int32)[None]
