"""What a model's step multiplies and keeps, as arrays and products with logical axes.

`meshloom plan` asks a model for its `Costs` and shards them by the rules that shard the
model itself: nothing here names a mesh, and nothing in `trainer/plan` names an array of
a model. transformer_costs.py is the example to follow.
"""

import dataclasses
import math

Axes = tuple[str | None, ...]


@dataclasses.dataclass(frozen=True)
class Array:
    """An array of one block or of the head, for all examples of a microbatch.

    Attributes:
      count: how many arrays of this shape there are.
      rows: whether its last dimension must lie along the rows of a tile, as kernels
        require.
      unfused: whether it is stored only because no kernel fuses the products around
        it, such as attention scores.
      room: of an array that devices exchange along a logical axis, (the axis, its size,
        a limit): each has room for what all of them could send, `limit` times as much
        as there is at most.
    """

    name: str
    shape: tuple[int, ...]
    axes: Axes
    itemsize: int
    count: int = 1
    rows: bool = False
    unfused: bool = False
    room: tuple[str, int, float] | None = None

    @property
    def bytes(self) -> int:
        return self.count * self.itemsize * math.prod(self.shape)


@dataclasses.dataclass(frozen=True)
class Product:
    """A matrix product, with every dimension that it runs over, contracted ones too.

    Attributes:
      weight: path of the parameter that it multiplies by; "" for a product of
        activations.
      summed: the contracted logical axis; where it is sharded, each device holds a
        partial sum. `spread` is the axis of the result for which the same is true of
        the input's gradient.
      share: the part that is really multiplied, where a kernel skips blocks.
      backward: how many products of this size the backward pass runs, without those
        that a remat policy recomputes.
    """

    name: str
    shape: tuple[int, ...]
    axes: Axes
    weight: str = ""
    summed: str = ""
    spread: str = ""
    share: float = 1.0
    backward: float = 2

    @property
    def flops(self) -> float:
        return 2.0 * self.share * math.prod(self.shape)


@dataclasses.dataclass(frozen=True)
class Working:
    """Arrays alive at once in one phase of a block's backward pass, beside `kept`.

    Attributes:
      if_split: further arrays where the block's products are split over devices.
    """

    name: str
    arrays: tuple[Array, ...]
    if_split: tuple[Array, ...] = ()


@dataclasses.dataclass(frozen=True)
class Exchange:
    """What devices along the positions send each other for one block.

    Attributes:
      kind: of the collective.
      array: gathered, what is received; otherwise what a device has of it.
      forward, backward: how often, in either pass.
    """

    kind: str
    array: Array
    forward: float
    backward: float


@dataclasses.dataclass(frozen=True)
class Costs:
    """Costs of `rows` examples of `length` positions.

    Attributes:
      products: of one block, forward.
      recomputed: names of the products that the backward pass runs again.
      head: the product of the head.
      stack: path prefix of the parameters of the stacked blocks.
      table: path of the parameter in which inputs are looked up; "" without one.
      residual: the array between two blocks.
      gathered: the residual as products read it, with all positions.
      kept: what one block keeps for its backward pass, its input included.
      kept_once: what the stack keeps once for all blocks, such as masks. The compiler
        recreates these where it needs them, unless a pipeline carries them.
      keeps_weights: whether the gathered, cast weights are kept too.
      working: the phases of a block's backward pass, at least one. Under full remat
        the block has been recomputed first, so what a later phase needs is there.
      waiting: operands of weight gradients that stay alive where the compiler runs
        those products last in a block, as XLA does for GPUs; () where it does not.
      logits: in the compute dtype; float32 logits are never stored.
      head_block: tokens of a device whose logits exist at once; 0 for all.
      fused: whether attention is one kernel.
      exchanges: between devices that share the positions of a sequence.
      exchanged: arrays that each block sends by all-to-all along `exchanged_along`, as
        often as their count; `exchanged_share` is the share of blocks that do.
    """

    products: tuple[Product, ...]
    recomputed: frozenset[str]
    head: Product
    stack: str
    table: str
    residual: Array
    gathered: Array
    kept: tuple[Array, ...]
    kept_once: tuple[Array, ...]
    keeps_weights: bool
    working: tuple[Working, ...]
    waiting: tuple[Array, ...]
    logits: Array
    fused: bool = False
    head_block: int = 0
    exchanges: tuple[Exchange, ...] = ()
    exchanged: tuple[Array, ...] = ()
    exchanged_along: tuple[str, int] = ("", 1)
    exchanged_share: float = 1.0

    @property
    def is_tied(self) -> bool:
        """Whether the table is the weight of the head too."""
        return self.table == self.head.weight

    @property
    def repeats_sums(self) -> bool:
        """Whether the backward pass recomputes products whose results are sums."""
        return any(p.summed and p.name in self.recomputed for p in self.products)
