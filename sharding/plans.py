"""Plans: named sets of rules that compose with `+`, the later one having its say.

    rules = data() + fsdp() + tensor()

`data` comes first: it knows every standard logical name and replicates the weights;
the plans after it shard more. The standard names (a model may add its own):

  batch            examples
  lookup_batch     examples, while they are looked up in a table or its gradient summed
  length           positions, where heads or hidden units are sharded (inside a block)
  residual_length  positions of the residual stream, between the blocks' parts
  layer            the stack of equal blocks
  embed            the width of the residual stream, one side of every weight matrix
  mlp heads kv_heads vocab      the other side
  head_dim norm position        small or not worth sharding
"""

import functools
from collections.abc import Callable

from .rules import Rules

STANDARD_NAMES: tuple[str, ...] = (
    "length",
    "residual_length",
    "layer",
    "embed",
    "mlp",
    "heads",
    "kv_heads",
    "vocab",
    "head_dim",
    "norm",
    "position",
)
BATCH_AXES = ("replica", "data", "fsdp", "expert")
# What "auto" stands for: every mesh axis used in the usual way. A trainer may know the
# devices and add to it.
AUTO, STANDARD = "auto", "data+fsdp+tensor+pipeline"
WITH_SEQUENCE = "data+fsdp+tensor+sequence+pipeline"


def data() -> Rules:
    """Data parallel: the batch is sharded over every axis that carries data.

    The fsdp and expert axes carry data too; where a mesh leaves them at size 1 they
    cost nothing.
    """
    replicated = dict.fromkeys(STANDARD_NAMES)
    batch = dict.fromkeys(("batch", "lookup_batch"), BATCH_AXES)
    return Rules.of(batch | replicated, plan="data")


def fsdp(stage: int = 3) -> Rules:
    """Shards what is stored for each weight over the fsdp axis (ZeRO).

    Args:
      stage: 3 shards parameters, gradients and optimizer state, and the step gathers
        each layer's weights when it comes to it. 1 shards the optimizer state only.
    """
    if stage not in (1, 3):
        raise ValueError(
            f"fsdp stage must be 3 (parameters and optimizer state) or 1 (optimizer "
            f"state only), got {stage}"
        )
    # Where the fsdp axis shards the width of a table, it shards no examples there.
    others = tuple(axis for axis in BATCH_AXES if axis != "fsdp")
    stored = {"embed": "fsdp", "lookup_batch": others}
    # Stage 1 says "replicated" aloud, so that it wins over an earlier fsdp().
    params = stored if stage == 3 else {"embed": None, "lookup_batch": BATCH_AXES}
    return Rules.of(stored, role="optimizer", plan="fsdp") + Rules.of(
        params, role="param", plan="fsdp"
    )


def tensor() -> Rules:
    """Shards one side of each weight matrix over tensor (columns, then rows)."""
    names = ("mlp", "heads", "kv_heads", "vocab")
    return Rules.of(dict.fromkeys(names, "tensor"), plan="tensor")


def tensor2d() -> Rules:
    """Shards both sides of each weight matrix into blocks: embed over fsdp, the other
    over tensor. Weights are never gathered; the residual stream is sharded by embed,
    and the batch only over the replica and data axes.
    """
    table = dict.fromkeys(("mlp", "heads", "kv_heads", "vocab"), "tensor")
    batch = dict.fromkeys(("batch", "lookup_batch"), ("replica", "data"))
    return Rules.of(table | batch | {"embed": "fsdp"}, plan="tensor2d")


def sequence() -> Rules:
    """Shards the residual stream by position over the tensor axis, between the parts of
    a block where tensor() would replicate it.
    """
    return Rules.of({"residual_length": "tensor"}, plan="sequence")


def pipe() -> Rules:
    """Shards the stack of blocks over the pipe axis, and what is stored of the weights
    outside it too: there the step gathers them once.
    """
    rules = Rules.of({"layer": "pipe"}, plan="pipeline")
    for role in ("param", "optimizer"):
        rules += Rules.of({"embed": "pipe"}, role=role, plan="pipeline", also=True)
    return rules


PLANS: dict[str, Callable[[], Rules]] = {
    "data": data,
    "fsdp": fsdp,
    "zero1": lambda: fsdp(stage=1),
    "tensor": tensor,
    "tensor2d": tensor2d,
    "sequence": sequence,
    "pipeline": pipe,
}


@functools.lru_cache(maxsize=64)
def parse_plan(text: str) -> Rules:
    """Rules from "data+fsdp+tensor", as configs and the command line write them.

    "auto" gives the rules of STANDARD.
    """
    rules = Rules()
    names = STANDARD if text == AUTO else text
    for name in (part.strip() for part in names.split("+")):
        if name not in PLANS:
            raise ValueError(
                f"plan {text!r}: {name!r} is not a plan. Plans: {', '.join(PLANS)}."
            )
        rules += PLANS[name]()
    return rules
