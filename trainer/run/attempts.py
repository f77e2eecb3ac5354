"""What the ledger says about each attempt at a run, when it starts."""

from typing import TYPE_CHECKING

import jax

from ..config import tree as config_tree

if TYPE_CHECKING:
    from .run import Run


def record_start(run: "Run") -> None:
    """Records in the ledger what this attempt is, and what ended the last one."""
    config, data = run.prepared.config, run.prepared.train_data
    before = [row for row in run.ledger.read() if row["event"] == "start"]
    if reason := run.invocation.restart_reason:
        run.ledger.event("death", reason=reason)
    count = run.group.size
    if before and before[-1]["processes"] != count:
        run.ledger.event("resize", processes=count, before=before[-1]["processes"])
    identity = run.prepared.identity
    for change in identity.changes if identity else ():
        run.ledger.event("data_changed", **change)
    run.ledger.event(
        "start",
        processes=count,
        devices=jax.device_count(),
        mesh={k: v for k, v in run.prepared.layout.params.mesh.items() if v > 1},
        attempt=run.invocation.attempt,
        config_digest=config_tree.digest(config),
        batch_size=run.prepared.batch_size,
        seed=config.seed,
        num_examples=len(data),
        data=identity.train_digest if identity else None,
        **run.prepared.order.facts(),
        **_learner_facts(run),
    )


def _learner_facts(run: "Run") -> dict[str, list[int]]:
    """Returns which learner of how many this is, if it is one of several."""
    share = run.prepared.config.exchange.share
    return {"learner": [share.index, share.count]} if share.count > 1 else {}
