"""What a transformer's step multiplies and keeps, as arrays with logical axes.

Read off layers.py and remat.py, and checked against them: what a block keeps is what
jax's own differentiation of it keeps, the products are those of the compiled step
(tests/test_costs.py, tests/test_plan_tpu.py). Nothing here names a mesh, so a plan
cuts these arrays by the same rules as the model cuts its own.
"""

import dataclasses
import math
from dataclasses import replace
from typing import TYPE_CHECKING

from .layers import RESIDUAL

if TYPE_CHECKING:
    from .transformer import Config

Axes = tuple[str | None, ...]
WHOLE = ("batch", "length", "embed")
FLOAT32 = 4


@dataclasses.dataclass(frozen=True)
class Array:
    """Of one block or of the head, for all examples of a microbatch together."""

    name: str
    shape: tuple[int, ...]
    axes: Axes
    itemsize: int
    count: int = 1

    @property
    def bytes(self) -> int:
        return self.count * self.itemsize * math.prod(self.shape)


@dataclasses.dataclass(frozen=True)
class Product:
    """A matrix product: every dimension that it runs over, contracted ones too.

    Attributes:
      weight: the parameter that it multiplies with; "" for activations alone.
      summed: the logical axis of a weight that is contracted, where cutting it makes
        the results of devices parts of a sum; its gradient then has the same for
        `spread`, the axis of the result.
    """

    name: str
    shape: tuple[int, ...]
    axes: Axes
    weight: str = ""
    summed: str = ""
    spread: str = ""

    @property
    def flops(self) -> float:
        return 2.0 * math.prod(self.shape)


@dataclasses.dataclass(frozen=True)
class Costs:
    """Of `rows` examples of `length` positions.

    Attributes:
      products: of one block, forward.
      recomputed: names of those that its backward pass does again.
      head: the product of the head.
      residual: the array between two blocks.
      kept: what one block keeps for its backward pass, its input included.
      kept_once: what the stack keeps beside, once for all blocks: masks of the scores.
        The compiler makes these up where it needs them, unless a pipeline carries them.
      keeps_weights: whether it also keeps its weights as gathered and cast.
      attention, mlp: what is alive at once while the backward pass of that part of a
        block runs, beside what was kept. Under full remat the block was computed again
        before, so during the MLP's part scores wait for attention's.
      attention_cut: what comes to `attention` where heads are cut over devices.
      logits: in the type of computing; float32 is never stored.
      fused: whether attention is one kernel.
    """

    products: tuple[Product, ...]
    recomputed: frozenset[str]
    head: Product
    residual: Array
    kept: tuple[Array, ...]
    kept_once: tuple[Array, ...]
    keeps_weights: bool
    attention: tuple[Array, ...]
    attention_cut: tuple[Array, ...]
    mlp: tuple[Array, ...]
    logits: Array
    fused: bool = False


# The last product of a block only adds to the residual stream: what comes after needs
# its result, the block's own backward pass does not.
RECOMPUTED = {
    "none": frozenset(),
    "full": frozenset(("qkv", "scores", "attend", "out", "up")),
    "save-dots": frozenset(("scores", "attend")),
    "save-named": frozenset(("scores",)),
}


def costs(config: "Config", rows: int, length: int, *, fused: bool = False) -> Costs:
    """The costs of a microbatch of `rows` examples.

    Args:
      fused: whether attention is one kernel that never stores its scores.
    """
    c, size = config, 2 if config.compute_dtype == "bfloat16" else FLOAT32
    D, H, G, K, F = c.d_model, c.num_heads, c.kv_heads, c.head_width, c.d_ff
    B, L, parts = rows, length, 2 if c.mlp == "swiglu" else 1
    up = "gate_up" if c.mlp == "swiglu" else "up"
    grouped, kv = (G, H // G + 2, K), ("kv_heads", None, "head_dim")
    heads = ("heads", "head_dim")
    tokens, positions = (B, L), ("batch", "length")
    squares, by_head = (B, H, L, L, K), ("batch", "heads", "length", None, "head_dim")
    products = (
        Product(
            "qkv",
            (*tokens, D, *grouped),
            (*positions, "embed", *kv),
            "blocks/attention/qkv",
            spread="kv_heads",
        ),
        Product("scores", squares, by_head),
        Product("attend", squares, by_head),
        Product(
            "out",
            (*tokens, H, K, D),
            (*positions, *heads, "embed"),
            "blocks/attention/out",
            summed="heads",
        ),
        Product(
            "up",
            (*tokens, D, parts, F),
            (*positions, "embed", None, "mlp"),
            f"blocks/mlp/{up}",
            spread="mlp",
        ),
        Product(
            "down",
            (*tokens, F, D),
            (*positions, "mlp", "embed"),
            "blocks/mlp/down",
            summed="mlp",
        ),
    )
    head = Product(
        "head",
        (*tokens, D, c.padded_vocab),
        (*positions, "embed", "vocab"),
        "embedding" if c.tied_head else "head",
        spread="vocab",
    )

    def array(name, shape, axes, itemsize=size, count=1):
        return Array(name, shape, axes, itemsize, count)

    residual = array("block input", (B, L, D), RESIDUAL)
    qkv = array("qkv", (B, L, *grouped), (*positions, *kv))
    attended = array("attended", (B, L, H, K), (*positions, *heads))
    hidden = array("hidden", (B, L, parts, F), (*positions, None, "mlp"))
    half = array("activated", (B, L, F), (*positions, "mlp"))
    scores = array("scores", (B, H, L, L), by_head[:4])
    exact = replace(scores, name="scores, float32", itemsize=FLOAT32)
    kept = {
        "full": (residual,),
        "save-dots": (residual, qkv, array("out", (B, L, D), WHOLE), hidden),
        "save-named": (
            residual,
            qkv,
            attended,
            array("middle", (B, L, D), RESIDUAL),
            hidden,
        ),
    }
    waiting = () if fused else (scores, exact)
    at_once, if_cut = ((), ()) if fused else _scores_at_once(c, scores, exact)
    return Costs(
        products=products,
        recomputed=RECOMPUTED[c.remat],
        head=head,
        residual=residual,
        kept=kept.get(c.remat) or _everything(residual, qkv, attended, half, waiting),
        kept_once=(replace(exact, name="masks, float32"), replace(scores, itemsize=1))
        if c.remat == "none" and not fused
        else (),
        keeps_weights=c.remat == "none",
        attention=(
            *at_once,
            replace(qkv, count=2),
            attended,
        ),
        attention_cut=if_cut,
        mlp=(
            *(waiting if c.remat == "full" else ()),
            replace(hidden, count=2),
            half,
        ),
        logits=array("logits", (B, L, c.padded_vocab), (*positions, "vocab")),
        fused=fused,
    )


def _scores_at_once(
    c: "Config", scores: Array, exact: Array
) -> tuple[tuple[Array, ...], tuple[Array, ...]]:
    """(stored at once in attention's backward pass, and more where heads are cut).

    Read off compiled programs. The softmax's result and its gradient, both in float32;
    where heads share keys, the gradient as it goes into the products. Where attention
    itself is computed again, its result as it went into the product waits too, for the
    gradient of the values: always under save-dots; under full the compiler does that
    product first, unless heads are cut over devices.
    """
    shared = c.num_heads > c.kv_heads
    least = (scores, exact) if shared else (replace(exact, count=2),)
    waits = (scores,)
    if c.remat == "save-dots":
        return (*least, *waits), ()
    return least, waits if c.remat == "full" else ()


def _everything(
    residual: Array,
    qkv: Array,
    attended: Array,
    half: Array,
    scores: tuple[Array, ...],
) -> tuple[Array, ...]:
    """Without remat: all that the rules of differentiation ask for, some of it twice.

    The softmax keeps its result in float32 and as it goes into the product; each norm
    keeps three arrays in float32 and its result; the activation keeps every factor.
    """
    return (
        replace(residual, name="norms, float32", count=6, itemsize=FLOAT32),
        replace(residual, name="normed", axes=WHOLE, count=2),
        qkv,
        attended,
        *scores,
        replace(half, name="hidden and activation", count=6),
    )
