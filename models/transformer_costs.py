"""What a transformer's step multiplies and keeps.

Derived from layers.py, remat.py and splash.py, and checked against them: a block keeps
what jax's own differentiation of it keeps, and the products are those of the compiled
step (tests/models/test_costs.py, tests/plan/test_plan_tpu.py).

Shape letters: B batch, L length, D width, H heads, G key-value heads, K head width,
F hidden width.
"""

import dataclasses
from dataclasses import replace
from typing import TYPE_CHECKING, Literal

from ..sharding.hlo.kernels import causal_blocks
from .attention import block_size, key_block_size
from .context_costs import exchanges, in_blocks
from .costs import Array, Axes, Costs, Product, Working
from .layers import RESIDUAL

if TYPE_CHECKING:
    from .context import Form
    from .transformer import Config

Kernel = Literal["xla", "cudnn", "splash"]
WHOLE = ("batch", "length", "embed")
STACK, TABLE = "blocks/", "embedding"
POSITIONS = ("batch", "length")
FLOAT32 = 4
# Rows of a tile: a kernel stores sums over keys once for each.
SUBLANES = 8

# The last product of a block only adds to the residual stream, so the block's own
# backward pass does not need it.
RECOMPUTED = {
    "none": (),
    "full": ("qkv", "scores", "attend", "out", "gate", "up"),
    "save-dots": ("scores", "attend"),
    "save-named": ("scores",),
}


def costs(
    config: "Config",
    rows: int,
    length: int,
    kernel: Kernel,
    form: "Form | None" = None,
) -> Costs:
    """Returns the costs of a microbatch of `rows` examples, with this attention.

    Args:
      form: how devices exchange keys where they share the positions of a sequence.
    """
    if form is not None and form.name != "ulysses":
        kernel = "xla"  # or rather blocks, see below
    arrays = _Arrays(config, rows, length, by_rows=kernel == "splash")
    head = Product(
        "head",
        (rows, length, config.d_model, config.padded_vocab),
        (*POSITIONS, "embed", "vocab"),
        TABLE if config.tied_head else "head",
        spread="vocab",
    )
    attention = {"xla": _plain, "cudnn": _cudnn, "splash": _splash}[kernel](arrays)
    if form is not None and form.name != "ulysses":
        again = RECOMPUTED[config.remat] if config.remat != "save-named" else ()
        attention = _Attention(**in_blocks(arrays, form, frozenset(again)))
    repeats = "attend" in attention.recomputed
    everything, again = config.remat == "none", config.remat == "full"
    qkv, hidden, half = arrays.qkv, arrays.hidden, arrays.half
    fused = kernel != "xla"
    return Costs(
        products=_products(arrays, attention),
        recomputed=attention.recomputed,
        head=head,
        stack=STACK,
        table=TABLE,
        residual=arrays.residual,
        gathered=replace(arrays.residual, name="normed", axes=WHOLE),
        kept=_kept(arrays, attention),
        kept_once=attention.kept_once if everything else (),
        keeps_weights=everything,
        working=(
            Working(
                "attention",
                (*attention.working, replace(qkv, count=2), arrays.attended),
                attention.working_if_split,
            ),
            Working(
                "mlp",
                (
                    *(attention.waiting if again else ()),
                    hidden,
                    replace(hidden, name="gradients of hidden"),
                    half,
                ),
            ),
        ),
        waiting=()
        if not fused
        else (hidden, hidden, half, qkv, arrays.attended)
        if again
        else (hidden, half, qkv),
        logits=arrays.make(
            "logits", (rows, length, config.padded_vocab), (*POSITIONS, "vocab")
        ),
        fused=fused,
        head_block=config.head_block or 0,
        exchanges=exchanges(arrays, form, repeats) if form else (),
    )


@dataclasses.dataclass(frozen=True)
class _Arrays:
    """The arrays of one block, named as in remat.py.

    Attributes:
      by_rows: whether the width of a head lies along rows of tiles (Array.rows).
    """

    config: "Config"
    B: int
    L: int
    by_rows: bool = False

    def make(self, name: str, shape: tuple[int, ...], axes: Axes) -> Array:
        size = 2 if self.config.compute_dtype == "bfloat16" else FLOAT32
        return Array(name, shape, axes, size)

    def _of_heads(self, name: str, shape: tuple[int, ...], axes: Axes) -> Array:
        return replace(self.make(name, shape, axes), rows=self.by_rows)

    @property
    def grouped(self) -> tuple[int, int, int]:
        c = self.config
        return c.kv_heads, c.num_heads // c.kv_heads + 2, c.head_width

    @property
    def residual(self) -> Array:
        return self.make("block input", (self.B, self.L, self.config.d_model), RESIDUAL)

    @property
    def qkv(self) -> Array:
        axes = (*POSITIONS, "kv_heads", None, "head_dim")
        return self._of_heads("qkv", (self.B, self.L, *self.grouped), axes)

    @property
    def head_norms(self) -> Array:
        """What the norms of queries and keys keep."""
        G, per_group, K = self.grouped
        name, shape = "norms of heads, float32", (self.B, self.L, G, per_group - 1, K)
        axes = (*POSITIONS, "kv_heads", None, "head_dim")
        return Array(name, shape, axes, FLOAT32, count=3)

    @property
    def attended(self) -> Array:
        c = self.config
        shape = (self.B, self.L, c.num_heads, c.head_width)
        return self._of_heads("attended", shape, (*POSITIONS, "heads", "head_dim"))

    @property
    def by_head(self) -> Array:
        """As `attended`, positions next to the width, as kernels have it."""
        c = self.config
        shape = (self.B, c.num_heads, self.L, c.head_width)
        axes = ("batch", "heads", "length", "head_dim")
        return self._of_heads("queries", shape, axes)

    @property
    def sums(self) -> Array:
        shape, axes = self.by_head.shape[:3], self.by_head.axes[:3]
        return Array("sums of shares, float32", shape, axes, FLOAT32)

    @property
    def hidden(self) -> Array:
        count = 2 if self.config.mlp == "swiglu" else 1
        return replace(self.half, name="hidden", count=count)

    @property
    def half(self) -> Array:
        shape = (self.B, self.L, self.config.d_ff)
        return self.make("activated", shape, (*POSITIONS, "mlp"))

    @property
    def scores(self) -> Array:
        shape = (self.B, self.config.num_heads, self.L, self.L)
        made = self.make("scores", shape, ("batch", "heads", "length", None))
        return replace(made, unfused=True)


@dataclasses.dataclass(frozen=True)
class _Attention:
    """The part of a block's costs that depends on the attention kernel.

    Attributes:
      backward: products of the backward pass (of scores, of their product with values).
      share: the share of the scores that is computed.
      kept: without remat, beside queries, keys and values; `named` under save-named.
      working, working_if_split: see costs.Working.
      waiting: what full remat has recomputed for attention while the MLP's backward
        pass runs.
    """

    recomputed: frozenset[str]
    kept: tuple[Array, ...]
    named: tuple[Array, ...]
    working: tuple[Array, ...]
    working_if_split: tuple[Array, ...] = ()
    waiting: tuple[Array, ...] = ()
    kept_once: tuple[Array, ...] = ()
    backward: tuple[float, float] = (2, 2)
    share: float = 1.0


def _products(a: _Arrays, attention: _Attention) -> tuple[Product, ...]:
    c = a.config
    D, H, K, F = c.d_model, c.num_heads, c.head_width, c.d_ff
    tokens, kv = (a.B, a.L), ("kv_heads", None, "head_dim")
    squares = (a.B, H, a.L, a.L, K)
    by_head = ("batch", "heads", "length", None, "head_dim")
    share, backward = attention.share, attention.backward
    up = Product(
        "up",
        (*tokens, D, F),
        (*POSITIONS, "embed", "mlp"),
        f"{STACK}mlp/up",
        spread="mlp",
    )
    # The gradients of the input from gate and up are one sum.
    gate = replace(up, name="gate", weight=f"{STACK}mlp/gate", spread="")
    return (
        Product(
            "qkv",
            (*tokens, D, *a.grouped),
            (*POSITIONS, "embed", *kv),
            f"{STACK}attention/qkv",
            spread="kv_heads",
        ),
        Product("scores", squares, by_head, share=share, backward=backward[0]),
        Product("attend", squares, by_head, share=share, backward=backward[1]),
        Product(
            "out",
            (*tokens, H, K, D),
            (*POSITIONS, "heads", "head_dim", "embed"),
            f"{STACK}attention/out",
            summed="heads",
        ),
        *((gate,) if c.mlp == "swiglu" else ()),
        up,
        Product(
            "down",
            (*tokens, F, D),
            (*POSITIONS, "mlp", "embed"),
            f"{STACK}mlp/down",
            summed="mlp",
        ),
    )


def _kept(a: _Arrays, attention: _Attention) -> tuple[Array, ...]:
    stream = (a.B, a.L, a.config.d_model)
    if a.config.remat == "full":
        return (a.residual,)
    if a.config.remat == "save-dots":
        return (a.residual, a.qkv, a.make("out", stream, WHOLE), a.hidden)
    if a.config.remat == "save-named":
        middle = a.make("middle", stream, RESIDUAL)
        return (a.residual, a.qkv, *attention.named, middle, a.hidden)
    # Without remat, all that differentiation needs, some of it twice.
    # Each norm keeps three arrays in float32 and its result; the activation keeps
    # every factor.
    return (
        replace(a.residual, name="norms, float32", count=6, itemsize=FLOAT32),
        replace(a.residual, name="normed", axes=WHOLE, count=2),
        a.qkv,
        *((a.head_norms,) if a.config.qk_norm else ()),
        a.attended,
        *attention.kept,
        replace(a.half, name="hidden and activation", count=6),
    )


def _plain(a: _Arrays) -> _Attention:
    """Attention as plain products, which store their scores.

    What the backward pass stores at once was read off compiled programs: the softmax's
    result and its gradient, both in float32; where heads share keys, the gradient in
    the compute dtype. Where attention itself is recomputed, its result waits too, for
    the gradient of the values: always under save-dots; under full the compiler runs
    that product first, unless heads are sharded.
    """
    c, scores = a.config, a.scores
    exact = replace(scores, name="scores, float32", itemsize=FLOAT32)
    shared = c.num_heads > c.kv_heads
    least = (scores, exact) if shared else (replace(exact, count=2),)
    masks = (
        replace(exact, name="masks, float32"),
        replace(scores, name="masks", itemsize=1),
    )
    return _Attention(
        recomputed=frozenset(RECOMPUTED[c.remat]),
        kept=(scores, exact),
        named=(a.attended,),
        working=(*least, scores) if c.remat == "save-dots" else least,
        working_if_split=(scores,) if c.remat == "full" else (),
        waiting=(scores, exact),
        kept_once=masks if c.causal else (),
    )


def _cudnn(a: _Arrays) -> _Attention:
    """cuDNN's kernel, of whose scores a causal mask leaves half.

    Its backward pass recomputes the scores. No policy keeps the sums over keys that it
    needs, so with any remat it runs forward again too.
    """
    again = RECOMPUTED[a.config.remat]
    return _Attention(
        frozenset({*again, "scores", "attend"} if again else ()),
        kept=(),
        named=(a.attended,),
        working=(),
        backward=(3, 2),
        share=0.5 if a.config.causal else 1.0,
    )


def _splash(a: _Arrays) -> _Attention:
    """Splash attention: blocks above the diagonal are skipped, scores never stored.

    Its backward pass recomputes the scores and stores gradients of all queries for each
    block of keys; sums over keys are stored for 8 rows of a tile.
    """
    c = a.config
    block, key_block = block_size(a.L), key_block_size(a.L)
    assert block and key_block, a.L
    out = replace(a.by_head, name="attended")
    again = RECOMPUTED[c.remat] if c.remat != "save-named" else ()

    def share(keys: int) -> float:
        if not c.causal:
            return 1.0
        blocks = causal_blocks(a.L // block, a.L // keys, block, keys)
        return blocks * block * keys / a.L**2

    more = share(key_block) / share(block)
    wide = replace(
        a.sums,
        shape=(*a.sums.shape[:2], SUBLANES, a.L),
        axes=("batch", "heads", None, "length"),
    )
    return _Attention(
        recomputed=frozenset(again),
        kept=(out, a.sums),
        named=(out, a.sums),
        working=(
            replace(out, name="gradients of queries", count=a.L // key_block),
            replace(wide, count=2),
        ),
        waiting=(a.qkv, out),
        backward=(3 * more, 2 * more),
        share=share(block),
    )
