"""Rematerialization policies: what the backward pass recomputes.

none        keep everything that the backward pass reads
full        keep only the input of each block, recompute the block
save-dots   keep the results of weight matmuls, recompute the rest
save-named  keep the values named by the model (SAVED_NAMES), including the results of
            the attention kernel, which then runs only once
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
      in_loop: whether each iteration of the scan's loop runs one block.
    """
    policies = jax.checkpoint_policies
    if remat == "none":
        return block
    policy = {
        "full": policies.nothing_saveable,
        "save-dots": policies.dots_with_no_batch_dims_saveable,
        "save-named": policies.save_only_these_names(*SAVED_NAMES),
    }[remat]
    # In a scan, XLA cannot merge the forward and backward loops, so the guard against
    # common-subexpression elimination would only cost time.
    return jax.checkpoint(block, policy=policy, prevent_cse=not in_loop)
