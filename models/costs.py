"""How a model tells a plan what its step multiplies and keeps.

As arrays and products with logical axes; nothing here names a mesh, so a plan cuts
them by the same rules as the model cuts its own. transformer_costs.py fills them in.
"""

import dataclasses
import math

Axes = tuple[str | None, ...]


@dataclasses.dataclass(frozen=True)
class Array:
    """Of one block or of the head, for all examples of a microbatch together.

    Attributes:
      rows: whether its last dimension must lie along a row of a tile, as kernels ask.
    """

    name: str
    shape: tuple[int, ...]
    axes: Axes
    itemsize: int
    count: int = 1
    rows: bool = False

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
      share: the part of it that is really multiplied, where blocks are skipped.
      backward: products of this size that its backward pass does, without those that
        a policy recomputes.
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
