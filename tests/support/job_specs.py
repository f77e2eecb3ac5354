"""The spec of a job, as a learner sends it to a coordinator."""

from typing import Any

from meshloom.service.blocks.layout import Layout
from meshloom.service.rounds.policy import Policy


def job_spec(policy: Policy, layout: Layout, **changes) -> dict[str, Any]:
    """Returns the spec of a job of two learners.

    Args:
      changes: at least the number of rounds and the version of meshloom.
    """
    return {
        "job": "run",
        "policy": policy.to_json(),
        "num_learners": 2,
        "layout": layout.to_json(),
        "update": {"kind": "optimizer" if policy.outer is None else "outer"},
        "max_grad_norm": None,
        "skip_grad_norm": None,
        "compression": {"push": "float32", "pull": "float32"},
        "copies": 1,
        "config_digest": "c0ffee",
        "data": {},
        "stop": None,
        **changes,
    }
