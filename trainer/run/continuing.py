"""What may differ when a run is continued: settings, and how long it is."""

from typing import TYPE_CHECKING

from etils import epath

from ..checkpoint.manager import latest_step
from ..config import tree as config_tree
from ..program import contract
from ..record.run_folder import RunFolder
from . import prolonging

if TYPE_CHECKING:
    from .train import Config

# Fields that change how a run is computed, saved or shown, and not what it computes:
# a run folder may be continued with other values of these.
FREE_FIELDS = (
    prolonging.FIELD,  # with a check of its own
    "mesh",
    "plan",
    "rules",
    "num_microbatches",
    "pipeline",
    "log_every",
    "eval_every",
    "eval_batches",
    "test_batches",
    "save_every",
    "keep_checkpoints",
    "rewind_after",
    "max_rewinds",
    "stall_seconds",
    "keep_every",
    "keep_best",
    "check_replicas_every",
    "writers",
    "compiler_options",
    "probe_network",
    "sample_prompt",
    "sample_tokens",
)


def free_fields(config: "Config") -> tuple[str, ...]:
    """Those that may change: by microbatch, a batch norm computes something else."""
    fixed = ("num_microbatches",) if contract.has_variables(config.model) else ()
    return tuple(name for name in FREE_FIELDS if name not in fixed)


def check(
    config: "Config", folder: RunFolder, saved: epath.Path, *, insist: bool
) -> list[str]:
    """Returns what to say of a config that differs from the folder's.

    Raises where it would compute something else, unless told to `insist`.

    Args:
      saved: where the checkpoints are.
    """
    changes = folder.check(config, free=free_fields(config), insist=insist)
    if not changes:
        return []
    done = latest_step(saved)
    lines = prolonging.check(changes, config.schedule, done, insist=insist)
    text = config_tree.format_diff(changes)
    return [f"Continued with other settings:\n{text}", *lines]
