"""What the backward pass recomputes, by name.

none        keep everything that the backward pass reads
full        keep each block's input only, recompute the block
save-dots   keep the results of weight matmuls, recompute the rest
save-named  keep the values that the model names (SAVED_NAMES), also what the kernel
            of attention gave, so that it runs once
"""

from collections.abc import Callable
from typing import Literal

import jax

Remat = Literal["none", "full", "save-dots", "save-named"]
SPLASH = "splash"
SAVED_NAMES = ("qkv", "attended", SPLASH, "middle", "hidden")


def rematerialize(block: Callable, remat: Remat, *, in_loop: bool = True) -> Callable:
    """Wraps the body of a scan over blocks.

    Args:
      in_loop: whether each turn of the scan's loop holds one block.
    """
    policies = jax.checkpoint_policies
    if remat == "none":
        return block
    policy = {
        "full": policies.nothing_saveable,
        "save-dots": policies.dots_with_no_batch_dims_saveable,
        "save-named": policies.save_only_these_names(*SAVED_NAMES),
    }[remat]
    # Inside a scan nothing can be merged across the forward and backward loops, so
    # the guard against common-subexpression elimination is only a cost.
    return jax.checkpoint(block, policy=policy, prevent_cse=not in_loop)
