"""What a learner tells the service about its job, and how it reaches it."""

import dataclasses
import importlib.metadata
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ...service.blocks.layout import Layout
from ...service.learner.mover import Mover
from ...service.learner.servers import Servers
from ...service.wire.calls import Channel
from ...service.wire.coordinators import Caller
from ...service.wire.credentials import Tls
from ..config import tree as config_tree
from . import exchange as exchange_lib
from .continuing import free_fields
from .exchange_update import update_spec
from .prepare import Prepared

ASK_SECONDS = 5.0


def job_spec(prepared: Prepared, layout: Layout) -> dict[str, Any]:
    """Returns what all learners of a job must agree on."""
    config = prepared.config
    exchange = config.exchange
    identity = prepared.identity
    return {
        "job": exchange.job,
        "policy": exchange.policy.to_json(),
        "num_learners": exchange.learners,
        "num_rounds": exchange.policy.num_rounds(config.num_steps),
        "layout": layout.to_json(),
        "update": update_spec(config),
        "max_grad_norm": config.max_grad_norm
        if exchange.policy.outer is None
        else None,
        "skip_grad_norm": (
            config.skip_grad_norm if exchange.policy.outer is None else None
        ),
        "compression": {
            "push": str(exchange.push_codec),
            "pull": str(exchange.pull_codec),
        },
        "copies": exchange.copies,
        "data": {
            "digest": identity.splits["train"].digest if identity else None,
            "num_examples": len(prepared.train_data),
            "batch_size": config.batch_size,
            "seed": config.seed,
            **prepared.order.facts(),
        },
        "stop": dataclasses.asdict(config.stop_rule) if config.stop_rule else None,
        "config_digest": _shared_digest(config),
        "version": importlib.metadata.version("meshloom"),
    }


def _shared_digest(config: Any) -> str:
    """Returns the digest of everything but where and as whom this learner runs."""
    free = {*free_fields(config), "init_from", "checkpoint_folder"}
    values = {
        path: value
        for path, value in config_tree.flatten(config).items()
        if not config_tree.is_below(path, free)
    }
    return config_tree.digest_of(values)


def credentials(config: exchange_lib.Config) -> dict[str, Any]:
    """Reads the token and names the TLS files of a config."""
    token = None
    if config.token_file is not None:
        token = Path(config.token_file).read_text().strip()
    files = {
        "ca": config.tls_ca_file,
        "cert": config.tls_cert_file,
        "key": config.tls_key_file,
    }
    given = {name: file for name, file in files.items() if file is not None}
    if given and len(given) < len(files):
        missing = next(name for name in files if name not in given)
        raise ValueError(
            f"mutual TLS needs three files: set exchange.tls_{missing}_file"
        )
    return {"token": token, "tls": Tls(**given) if given else None}


def make_mover(
    job: str,
    layout: Layout,
    opened: Mapping[str, Any],
    connect: Callable[[str], Channel],
    center: Caller,
    reached: Callable[[str], None],
) -> Mover:
    """Connects to the servers of a job that was opened.

    Args:
      center: the coordinator, which is asked again when a server is lost.
      reached: see Mover.
    """

    def ask() -> dict[str, Any]:
        return center.call("Servers", {"job": job}, ASK_SECONDS)

    return Mover(job, layout, Servers(job, layout, opened, connect, ask), reached)
