"""Which settings may change when a run is continued."""

import json
from typing import TYPE_CHECKING

from etils import epath

from ..checkpoint import manifest
from ..checkpoint.manager import latest_step
from ..config import tree as config_tree
from ..program import contract
from ..record.failures import CorruptCheckpoint
from ..record.run_folder import RunFolder
from . import extending
from .exchange import PLACE

if TYPE_CHECKING:
    from .train import Config

# Of a mixture: may change for steps that are still to come.
WEIGHTS_FROM = "data.weights_from"
# Fields that change how a run is computed, saved or shown, but not what it computes: a
# run may be continued with other values of these.
FREE_FIELDS = (
    extending.FIELD,  # has a check of its own
    "mesh",
    "plan",
    "rules",
    "num_microbatches",
    "pipeline",
    "log_every",
    "eval_every",
    "eval_batches",
    "test_batches",
    "stop_patience",
    "stop_min_change",
    "save_every",
    "keep_checkpoints",
    "rewind_after",
    "max_rewinds",
    "stall_seconds",
    "keep_every",
    "keep_best",
    "check_replicas_every",
    "follow",
    "follow_seconds",
    "publish_every",
    "publish_seconds",
    "writers",
    "compiler_options",
    "probe_network",
    "sample_prompt",
    "sample_tokens",
    *(f"exchange.{name}" for name in PLACE),
)


def free_fields(config: "Config") -> tuple[str, ...]:
    """Returns the fields that may change.

    With variables, the number of microbatches may not: a batch norm depends on it.
    """
    fixed = ("num_microbatches",) if contract.has_variables(config.model) else ()
    return tuple(name for name in FREE_FIELDS if name not in fixed)


def check(
    config: "Config", folder: RunFolder, saved: epath.Path, *, insist: bool
) -> list[str]:
    """Returns lines that describe how a config differs from the folder's.

    Args:
      saved: the folder of the checkpoints.
      insist: accept a config that computes something else.

    Raises:
      ValueError: it computes something else, and `insist` is false.
    """
    done = latest_step(saved)
    if done == 0:  # a run saves its first checkpoint after a step
        raise ValueError(
            f"{saved} holds weights without a run, as `meshloom import` writes them. "
            f"Choose another --workdir, and start with them: init_from='{saved}'"
        )
    free = (*free_fields(config), *_future_weights(config, folder, saved, done))
    changes = folder.check(config, free=free, insist=insist)
    if not changes:
        return []
    lines = extending.check(changes, config.schedule, done, insist=insist)
    text = config_tree.format_diff(changes)
    return [f"Continuing with different settings:\n{text}", *lines]


def _future_weights(
    config: "Config", folder: RunFolder, saved: epath.Path, done: int | None
) -> tuple[str, ...]:
    """Returns the field of a mixture's weights if they differ in future steps only."""
    before, now = ({}, {})
    if (previous := folder.previous_values()) is not None:
        before = previous.get(WEIGHTS_FROM)
        now = config_tree.flatten(config).get(WEIGHTS_FROM)
    if before is None or now is None:
        return ()
    first = _next_batch(config, saved, done)
    past = ({k: v for k, v in each.items() if int(k) < first} for each in (before, now))
    return (WEIGHTS_FROM,) if len({json.dumps(each) for each in past}) == 1 else ()


def _next_batch(config: "Config", saved: epath.Path, done: int | None) -> int:
    """Returns the number of the next batch; rewinds may have skipped some."""
    if done is None:
        return 0
    try:
        example = manifest.read(saved, done)["data"]["next_example"]
    except CorruptCheckpoint:
        return done  # the restore reports it and takes another one
    return -(-example // config.batch_size)
