"""Plans: named sets of rules that compose with `+`; later plans take precedence.

    rules = data() + fsdp() + tensor()

`data` comes first: it has a row for every standard logical axis and replicates the
weights. Later plans shard more. The standard logical axes (a model may add its own):

  batch            examples
  lookup_batch     examples in an embedding lookup and its gradient
  length           positions of a batch, and inside attention and MLP, where heads or
                   hidden units are sharded
  residual_length  positions of the residual stream, between attention and MLP
  layer            the stack of equal blocks
  embed            the width of the residual stream, one side of every weight matrix
  mlp heads kv_heads vocab      the other side
  experts          the experts of a layer
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
    "experts",
    "head_dim",
    "norm",
    "position",
)
BATCH_AXES = ("replica", "data", "fsdp", "expert")
# "auto" means STANDARD, with `context` where the mesh has such an axis: it uses every
# mesh axis in the usual way. A trainer that knows the devices may add to it.
AUTO, STANDARD = "auto", "data+fsdp+tensor+pipeline"
WITH_SEQUENCE = "data+fsdp+tensor+sequence+pipeline"


def data() -> Rules:
    """Shards the batch over every data-parallel axis and replicates the weights.

    The fsdp and expert axes are data-parallel too. Experts, where a model has some, are
    sharded over the expert axis, along which devices then exchange tokens.
    """
    replicated = dict.fromkeys(STANDARD_NAMES)
    batch = dict.fromkeys(("batch", "lookup_batch"), BATCH_AXES)
    return Rules.of(batch | replicated | {"experts": "expert"}, plan="data")


def fsdp(stage: int = 3) -> Rules:
    """Shards parameters and optimizer state over the fsdp axis (ZeRO).

    Args:
      stage: 3 shards parameters, gradients and optimizer state; the step gathers the
        weights of each layer just before it uses them. 1 shards only the optimizer
        state.
    """
    if stage not in (1, 3):
        raise ValueError(
            f"fsdp stage must be 3 (parameters and optimizer state) or 1 (optimizer "
            f"state only), got {stage}"
        )
    # The fsdp axis shards the width of a looked-up table, so not its examples.
    others = tuple(axis for axis in BATCH_AXES if axis != "fsdp")
    stored = {"embed": "fsdp", "lookup_batch": others}
    # Stage 1 replicates parameters explicitly, to override an earlier fsdp().
    params = stored if stage == 3 else {"embed": None, "lookup_batch": BATCH_AXES}
    return Rules.of(stored, role="optimizer", plan="fsdp") + Rules.of(
        params, role="param", plan="fsdp"
    )


def tensor() -> Rules:
    """Shards one side of each weight matrix over the tensor axis (Megatron style)."""
    names = ("mlp", "heads", "kv_heads", "vocab")
    return Rules.of(dict.fromkeys(names, "tensor"), plan="tensor")


def tensor2d() -> Rules:
    """Shards both sides of each weight matrix: embed over fsdp, the other over tensor.

    Weights are never gathered. The residual stream is sharded along embed, and the
    batch only over the replica and data axes.
    """
    table = dict.fromkeys(("mlp", "heads", "kv_heads", "vocab"), "tensor")
    batch = dict.fromkeys(("batch", "lookup_batch"), ("replica", "data"))
    return Rules.of(table | batch | {"embed": "fsdp"}, plan="tensor2d")


def sequence() -> Rules:
    """Shards the positions of the residual stream over the tensor axis.

    This is sequence parallelism: tensor() alone would replicate the residual stream.
    Positions that context() has sharded are sharded further.
    """
    return Rules.of({"residual_length": ("context", "tensor")}, plan="sequence")


def context() -> Rules:
    """Shards the positions of batch and activations over the context axis.

    Everything but attention treats each position independently. Attention exchanges
    queries, keys and values between the devices of the axis.
    """
    rules = Rules.of({"length": "context"}, plan="context")
    return rules + Rules.of(
        {"residual_length": "context"}, role="compute", plan="context", also=True
    )


def pipe() -> Rules:
    """Shards the stack of blocks over the pipe axis.

    Weights outside the stack are stored sharded over it too; a step gathers them once.
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
    "context": context,
    "sequence": sequence,
    "pipeline": pipe,
}


def with_context(plan: str) -> str:
    """Returns STANDARD or WITH_SEQUENCE with the plan `context` added."""
    return plan.replace("+tensor", "+tensor+context")


@functools.lru_cache(maxsize=64)
def parse_plan(text: str) -> Rules:
    """Returns the rules of a plan string such as "data+fsdp+tensor".

    "auto" means STANDARD with context.
    """
    rules = Rules()
    names = with_context(STANDARD) if text == AUTO else text
    for name in (part.strip() for part in names.split("+")):
        if name not in PLANS:
            raise ValueError(
                f"plan {text!r}: {name!r} is not a plan. Plans: {', '.join(PLANS)}."
            )
        rules += PLANS[name]()
    return rules
