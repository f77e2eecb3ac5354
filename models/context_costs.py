"""What attention keeps, multiplies and sends where positions are sharded.

Derived from context.py and ring.py; transformer_costs.py has the rest of a block.
"""

from dataclasses import replace
from typing import Any

from .context import Form
from .costs import Array, Exchange
from .online_softmax import TILE
from .ring import STRIPES

FLOAT32 = 4
KEYS = ("batch", "length", None, "kv_heads", "head_dim")


def in_blocks(arrays: Any, form: Form, recomputed: frozenset[str]) -> dict[str, Any]:
    """Returns the costs of attention in blocks (transformer_costs._Attention)."""
    config = arrays.config
    out, sums = replace(arrays.by_head, name="attended"), arrays.sums
    share = _share(form.num) if config.causal else 1.0
    keys = replace(_keys(arrays), itemsize=FLOAT32)
    if form.name == "gather":
        gathered = replace(_keys(arrays), axes=("batch", None, *KEYS[2:]))
        of_keys = (
            replace(gathered, name="gathered keys"),
            replace(keys, name="gradients of keys, float32", axes=gathered.axes),
        )
    else:
        of_keys = (
            replace(_keys(arrays), name="travelling keys", count=2),
            replace(keys, name="gradients of keys, float32", count=3),
        )
    tile = Array(
        "scores of a tile, float32",
        (arrays.B, config.num_heads, min(TILE, (arrays.L // form.num) ** 2)),
        ("batch", "heads", None),
        FLOAT32,
        count=3,
    )
    of_queries = replace(
        arrays.by_head, name="gradients of queries, float32", itemsize=FLOAT32, count=2
    )
    return {
        "recomputed": recomputed,
        "kept": (out, sums),
        "named": (out, sums),
        "working": (*of_keys, of_queries, tile),
        "waiting": (arrays.qkv, out),
        # Scores are computed again, and each operand has its gradient.
        "backward": (3, 2),
        "share": share,
    }


def exchanges(arrays: Any, form: Form, recomputes: bool) -> tuple[Exchange, ...]:
    """Returns what one block's attention sends.

    Args:
      recomputes: whether the backward pass runs attention forward again.
    """
    keys, again = _keys(arrays), 1 + recomputes
    exact = replace(keys, itemsize=FLOAT32)
    if form.name == "ring":
        sent = form.num - 1
        return (
            Exchange("collective-permute", keys, sent, again * sent),
            Exchange("collective-permute", exact, 0, form.num),
        )
    if form.name == "gather":
        whole = ("batch", None, *KEYS[2:])
        return (
            Exchange("all-gather", replace(keys, axes=whole), 1, again),
            Exchange("reduce-scatter", replace(exact, axes=whole), 0, 1),
        )
    copied = replace(keys, shape=(*keys.shape[:2], 2 * form.copies, *keys.shape[3:]))
    # Without remat the exchanged queries and keys are kept.
    more = 2 if arrays.config.remat != "none" else 1
    return (
        Exchange("all-to-all", copied, 1, more),
        Exchange("all-to-all", arrays.attended, 1, more),
        Exchange("all-to-all", arrays.attended, 1, 1 + recomputes),
    )


def _keys(arrays: Any) -> Array:
    """Keys and values, as one array."""
    config = arrays.config
    shape = (arrays.B, arrays.L, 2, config.kv_heads, config.head_width)
    return arrays.make("keys", shape, KEYS)


def _share(num: int) -> float:
    """Returns the share of the scores that causal attention in blocks computes.

    Of its own chunks a device computes one pair, and of two the stripes up to the
    diagonal; of every other device's, two pairs of four.
    """
    diagonal = (STRIPES + 1) / (2 * STRIPES)
    return (2 * (num - 1) + 1 + 2 * diagonal) / (4 * num)
