"""Where each tensor of a Hugging Face model is in our arrays.

Theirs has one tensor a layer and projection, [out, in] (GPT-2: [in, out]). Ours has
stacked layers, and queries, keys and values of a layer in one array [D, G, R + 2, K].

Letters: V vocabulary, D width, H heads, G key-value heads, R heads of each, K head
width, F hidden width, P positions.
"""

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from ...models.transformer import Config
from .families import GPT2, Family

HEAD = "lm_head.weight"
# Saved by earlier versions, and computed from the config here.
BUFFERS = (".rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias")


@dataclasses.dataclass(frozen=True)
class Piece:
    """A tensor of theirs, and the part of one of our arrays that it is.

    Attributes:
      leaf: the path of our array, which is [layer, ...] if `layer` is not None.
      view: shape to give the tensor, before its dimensions are permuted.
      order: of the dimensions of the view, in ours.
      start: where it begins in our array, without the layer.
    """

    name: str
    leaf: str
    shape: tuple[int, ...]
    view: tuple[int, ...]
    order: tuple[int, ...]
    start: tuple[int, ...]
    layer: int | None

    @property
    def size(self) -> tuple[int, ...]:
        """The shape of the part, without the layer."""
        return tuple(self.view[i] for i in self.order)

    def ours(self, tensor: np.ndarray) -> np.ndarray:
        """Returns the tensor as the part of our array, without a copy."""
        return tensor.reshape(self.view).transpose(self.order)

    def theirs(self, array: np.ndarray) -> np.ndarray:
        """Returns the tensor of our array, which may have a padded vocabulary."""
        if self.layer is not None:
            array = array[self.layer]
        ends = zip(self.start, self.size, strict=True)
        part = array[tuple(slice(a, a + n) for a, n in ends)]
        inverse = np.argsort(self.order)
        return np.ascontiguousarray(part.transpose(inverse)).reshape(self.shape)


def pieces(model: Config, family: Family) -> list[Piece]:
    """Returns every tensor of a model of theirs, layer by layer."""
    make = _gpt2 if family.model_type == GPT2.model_type else _llama
    return list(make(model, family.stem))


def _piece(
    name: str,
    leaf: str,
    view: tuple[int, ...],
    order: tuple[int, ...] | None = None,
    *,
    layer: int | None = None,
    join: tuple[int, ...] = (),
    start: tuple[int, ...] | None = None,
) -> Piece:
    """Makes a piece whose tensor joins dimensions of the view, in groups of `join`."""
    groups, shape = iter(view), []
    for count in join or (1,) * len(view):
        shape.append(math.prod(next(groups) for _ in range(count)))
    order = order or tuple(range(len(view)))
    start = start or (0,) * len(view)
    return Piece(name, leaf, tuple(shape), view, order, start, layer)


def _llama(c: Config, stem: str) -> Iterator[Piece]:
    V, D, G, K, F = c.vocab_size, c.d_model, c.kv_heads, c.head_width, c.d_ff
    H, R = c.num_heads, c.num_heads // c.kv_heads
    yield _piece(f"{stem}embed_tokens.weight", "embedding", (V, D))
    for i in range(c.num_layers):
        at = f"{stem}layers.{i}."
        to: dict[str, Any] = {"layer": i}
        norm, post = "input_layernorm", "post_attention_layernorm"
        yield _piece(f"{at}{norm}.weight", "blocks/attention_norm/scale", (D,), **to)
        for name, heads, first in (("q", R, 0), ("k", 1, R), ("v", 1, R + 1)):
            own, view = f"{at}self_attn.{name}_proj.", (G, heads, K)
            leaf, begin = "blocks/attention/qkv", (0, first, 0)
            yield _piece(
                *(f"{own}weight", leaf, (*view, D), (3, 0, 1, 2)),
                join=(3, 1),
                start=(0, *begin),
                **to,
            )
            if c.qkv_bias:
                yield _piece(
                    *(f"{own}bias", f"{leaf}_bias", view),
                    join=(3,),
                    start=begin,
                    **to,
                )
            if c.qk_norm and name != "v":
                own, leaf = f"{at}self_attn.{name}_norm.weight", f"{name}_norm/scale"
                yield _piece(own, f"blocks/attention/{leaf}", (K,), **to)
        out = (f"{at}self_attn.o_proj.weight", "blocks/attention/out")
        yield _piece(*out, (D, H, K), (1, 2, 0), join=(1, 2), **to)
        yield _piece(f"{at}{post}.weight", "blocks/mlp_norm/scale", (D,), **to)
        for name, view in (("gate", (F, D)), ("up", (F, D)), ("down", (D, F))):
            own = f"{at}mlp.{name}_proj.weight"
            yield _piece(own, f"blocks/mlp/{name}", view, (1, 0), **to)
    yield _piece(f"{stem}norm.weight", "final_norm/scale", (D,))
    if not c.tied_head:
        yield _piece(HEAD, "head", (V, D), (1, 0))


def _gpt2(c: Config, stem: str) -> Iterator[Piece]:
    V, D, H, K, F = c.vocab_size, c.d_model, c.num_heads, c.head_width, c.d_ff
    yield _piece(f"{stem}wte.weight", "embedding", (V, D))
    yield _piece(f"{stem}wpe.weight", "position", (c.max_length, D))
    for i in range(c.num_layers):
        at = f"{stem}h.{i}."
        to: dict[str, Any] = {"layer": i}
        yield from _norm(f"{at}ln_1.", "blocks/attention_norm/", D, i)
        own, leaf = f"{at}attn.c_attn.", "blocks/attention/qkv"
        yield _piece(
            *(f"{own}weight", leaf, (D, 3, H, K), (0, 2, 1, 3)), join=(1, 3), **to
        )
        yield _piece(
            *(f"{own}bias", f"{leaf}_bias", (3, H, K), (1, 0, 2)), join=(3,), **to
        )
        own, leaf = f"{at}attn.c_proj.", "blocks/attention/out"
        yield _piece(f"{own}weight", leaf, (H, K, D), join=(2, 1), **to)
        yield _piece(f"{own}bias", f"{leaf}_bias", (D,), **to)
        yield from _norm(f"{at}ln_2.", "blocks/mlp_norm/", D, i)
        for name, ours, view in (("c_fc", "up", (D, F)), ("c_proj", "down", (F, D))):
            own, leaf = f"{at}mlp.{name}.", f"blocks/mlp/{ours}"
            yield _piece(f"{own}weight", leaf, view, **to)
            yield _piece(f"{own}bias", f"{leaf}_bias", view[1:], **to)
    yield from _norm(f"{stem}ln_f.", "final_norm/", D, None)
    if not c.tied_head:
        yield _piece(HEAD, "head", (V, D), (1, 0))


def _norm(own: str, leaf: str, width: int, layer: int | None) -> Iterator[Piece]:
    yield _piece(f"{own}weight", f"{leaf}scale", (width,), layer=layer)
    yield _piece(f"{own}bias", f"{leaf}bias", (width,), layer=layer)
