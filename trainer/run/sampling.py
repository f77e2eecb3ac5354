"""Generates text with a trained model, if the model and the data support it."""

import functools
import inspect
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from ...sharding import Sharder, resolve
from ..config.tree import label
from ..data.tokenizer import Tokenizer
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
    temperature: float = 0.8,
    top_k: int | None = None,
    seed: int = 0,
    tokenizer: Tokenizer | None = None,
    variables: Any = None,
) -> str:
    """Returns the prompt and its continuation. Every process must call this.

    Args:
      params: with layers in their canonical order.
      tokenizer: None for that of the data.
      variables: of a model whose `generate` takes them.
    """
    tokenizer = tokenizer or _tokenizer(config)
    # A batch of one row cannot be sharded, and there is no pipeline to shard layers
    # for: only the other shardings of the weights stay.
    rules = config.make_rules().without("batch", "lookup_batch", "layer")
    shard = Sharder(mesh, rules)
    layout = resolve(params, rules, mesh, axes=config.model.axes())
    params = jax.jit(lambda x: x, out_shardings=layout.shardings(mesh))(params)
    if _takes_variables(config):
        axes = contract.variable_axes(config.model)
        layout = resolve(variables, rules, mesh, axes=axes)
        variables = jax.jit(lambda x: x, out_shardings=layout.shardings(mesh))(
            variables
        )
    generate, tokens = _generate_fn(config, prompt, num_tokens, shard, tokenizer)
    generate = functools.partial(generate, temperature=temperature, top_k=top_k)
    replicated = NamedSharding(mesh, P())
    result = jax.jit(generate, out_shardings=replicated)(
        params, tokens, key=jax.random.key(seed), **_given(config, variables)
    )
    assert tokenizer is not None
    return tokenizer.decode(jax.device_get(result)[0])


def _tokenizer(config: "Config") -> Tokenizer | None:
    """Returns the tokenizer of the data; None if it is not text."""
    make = getattr(config.data, "tokenizer", None)
    return None if make is None else make()


def check(config: "Config", prompt: str, num_tokens: int) -> None:
    """Raises what `sample` would raise after training, using shapes alone."""
    tokenizer = _tokenizer(config)
    generate, tokens = _generate_fn(config, prompt, num_tokens, Sharder(), tokenizer)
    key = jax.random.key(0)
    params = jax.eval_shape(config.model.init, key)
    make = functools.partial(contract.init_variables, config.model)
    given = _given(config, jax.eval_shape(make, key))
    jax.eval_shape(functools.partial(generate, key=key), params, tokens, **given)


def _given(config: "Config", variables: Any) -> dict[str, Any]:
    return {"variables": variables} if _takes_variables(config) else {}


def _takes_variables(config: "Config") -> bool:
    generate = getattr(config.model, "generate", None)
    return "variables" in inspect.signature(generate).parameters if generate else False


def _generate_fn(
    config: "Config",
    prompt: str,
    num_tokens: int,
    shard: Sharder,
    tokenizer: Tokenizer | None,
) -> Any:
    """Returns the model's `generate`, and the prompt as tokens [1, P]."""
    model = config.model
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
