"""How a run takes part in a training between groups, as a config node."""

import dataclasses
import fnmatch
from typing import Any

import jax
import optax

from ...service.blocks.layout import BLOCK_BYTES, Layout, Leaf, make_layout
from ...service.rounds.policy import PRESETS, Outer, Policy, make_policy
from ...service.wire import codecs
from ...sharding.logical_axes import path_name
from ..data.batches import Share
from .error_feedback import ErrorFeedback

# Overrides of the preset; None keeps its value.
OVERRIDES = (
    *("local_steps", "quorum", "grace", "staleness", "late", "weights", "wait"),
    *("delay", "mix", "fragments", "compensation", "start_with"),
)
# Fields that say where and as whom a learner runs, not what is computed.
PLACE = (
    "address",
    "learner",
    "token_file",
    "tls_ca_file",
    "tls_cert_file",
    "tls_key_file",
)
UNBOUNDED = "unbounded"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Exchanges parameters with other learners through the service (docs/service.md).

    Attributes:
      address: host:port of the coordinator; of several that stand by for each other,
        with commas between them. None trains alone.
      job: the name of the training at the service.
      mode: how learners wait for each other, see docs/rounds.md.
      learners: how many there are; a step of each takes an n-th of `batch_size`.
      learner: which of them this one is, from 0.
      local_steps, quorum, grace, staleness, late, weights, wait, delay, mix, fragments,
        compensation: override the mode's value; None keeps it. staleness="unbounded"
        means no bound.
      start_with: how many learners must be there before the first round begins; the
        others may come later. None waits for all.
      outer_learning_rate, outer_momentum: of the optimizer that applies the mean change
        of the parameters; None keeps the mode's value.
      push: how contributions are compressed: "float32" (not at all), "bfloat16",
        "int8", "topk:SHARE", or the last with "+bfloat16" or "+int8"; see
        docs/service.md.
      pull: how changes of the parameters are compressed on their way to the learners:
        "float32" (not at all), "bfloat16" or "int8".
      paths: patterns of the parameters that are exchanged, such as "blocks/*"; the
        others stay with each learner.
      block_bytes: the size of the blocks that servers hold; a model that is smaller
        than a few blocks leaves servers idle.
      copies: of each block, on as many servers: 1, or 2 to lose nothing if one dies.
      token_file: a file with the secret that the service expects.
      tls_ca_file, tls_cert_file, tls_key_file: files for mutual TLS.
    """

    address: str | None = None
    job: str = "run"
    mode: str = "sync"
    learners: int = 1
    learner: int = 0
    local_steps: int | None = None
    quorum: int | float | None = None
    grace: float | str | None = None
    staleness: int | str | None = None
    late: str | None = None
    weights: str | None = None
    wait: float | None = None
    delay: int | None = None
    mix: float | None = None
    fragments: int | None = None
    compensation: float | None = None
    start_with: int | None = None
    outer_learning_rate: float | None = None
    outer_momentum: float | None = None
    push: str = str(codecs.PLAIN)
    pull: str = str(codecs.PLAIN)
    paths: tuple[str, ...] = ("*",)
    block_bytes: int = BLOCK_BYTES
    copies: int = 1
    token_file: str | None = None
    tls_ca_file: str | None = None
    tls_cert_file: str | None = None
    tls_key_file: str | None = None

    def __post_init__(self):
        if self.learners < 1:
            raise ValueError(f"learners must be >= 1, got {self.learners}")
        if self.block_bytes < 1:
            raise ValueError(f"block_bytes must be >= 1, got {self.block_bytes}")
        if self.copies not in (1, 2):
            raise ValueError(f"copies must be 1 or 2, got {self.copies}")
        if self.mode not in PRESETS:
            raise ValueError(
                f"mode {self.mode!r} is not a mode; expected one of "
                f"{', '.join(PRESETS)}"
            )
        self.share  # noqa: B018  raises if learner is not one of learners
        policy = self.policy
        for name in ("push", "pull"):
            try:
                codecs.parse(getattr(self, name))
            except ValueError as error:
                raise ValueError(f"{name}={error}") from error
        if self.pull_codec.share is not None:
            raise ValueError(
                f"pull={self.pull!r}: top-k is for `push` only; expected float32, "
                "bfloat16 or int8"
            )
        if self.is_on:
            policy.check_learners(self.learners)
        if policy.outer is None and self.paths != ("*",):
            raise ValueError(
                f"paths={list(self.paths)}: in mode {self.mode!r} the servers run the "
                "optimizer, so parameters that stay with a learner would never be "
                "trained. Exchange all of them, or choose a mode with local steps, "
                "such as diloco."
            )

    @property
    def is_on(self) -> bool:
        return self.address is not None

    @property
    def sends_gradients(self) -> bool:
        """Whether a learner computes gradients only, and servers run the optimizer."""
        return self.is_on and self.policy.outer is None

    @property
    def share(self) -> Share:
        """The rows of every batch that this learner takes."""
        return Share(self.learner, self.learners)

    @property
    def policy(self) -> Policy:
        given: dict[str, Any] = {
            name: getattr(self, name)
            for name in OVERRIDES
            if getattr(self, name) is not None
        }
        if given.get("staleness") == UNBOUNDED:
            given["staleness"] = None
        outer = PRESETS[self.mode].outer
        named = {
            "learning_rate": self.outer_learning_rate,
            "momentum": self.outer_momentum,
        }
        changes: dict[str, Any] = {k: x for k, x in named.items() if x is not None}
        if changes:
            if outer is None and "learning_rate" not in changes:
                raise ValueError(
                    f"mode {self.mode!r} has no outer optimizer: set "
                    "outer_learning_rate too, or remove outer_momentum"
                )
            given["outer"] = (
                Outer(**changes)
                if outer is None
                else dataclasses.replace(outer, **changes)
            )
        return make_policy(self.mode, **given)

    @property
    def push_codec(self) -> codecs.Codec:
        return codecs.parse(self.push)

    @property
    def pull_codec(self) -> codecs.Codec:
        return codecs.parse(self.pull)

    def is_exchanged(self, path: str) -> bool:
        return any(fnmatch.fnmatchcase(path, pattern) for pattern in self.paths)

    def local_optimizer(self, optimizer: Any) -> Any:
        """Returns the optimizer of the learner's own steps.

        Where the servers run it, the learner needs none, and no memory for its state.
        With top-k its state also has what was not sent yet.
        """
        if self.sends_gradients:
            optimizer = optax.identity()
        if self.is_on and self.push_codec.share is not None:
            return ErrorFeedback(optimizer, self.is_exchanged)
        return optimizer


def block_layout(config: Config, optimizer: Any, params: Any, axes: Any) -> Layout:
    """Returns how the exchanged parameters are divided into blocks.

    Args:
      optimizer: of the config; its granularity limits how arrays may be divided.
      params: shapes and dtypes, in model order.
      axes: logical axes of each.
    """
    leaves = [leaf for _, leaf in exchanged(config, params, axes)]
    policy = config.policy
    granularity = "element"
    if policy.outer is None:
        granularity = getattr(type(optimizer), "granularity", None)
        if granularity is None:
            raise ValueError(
                f"mode {config.mode!r} runs the optimizer on the servers, and "
                f"{type(optimizer).__name__} does not say how finely its parameters "
                "may be divided. Give the class an attribute `granularity`: "
                '"element", "matrix" or "leaf"; or choose a mode with local steps, '
                "such as diloco."
            )
    return make_layout(
        leaves,
        granularity=granularity,
        block_bytes=config.block_bytes,
        fragments=policy.fragments,
    )


def exchanged(config: Config, params: Any, axes: Any) -> list[tuple[int, Leaf]]:
    """Returns (position among all parameters, leaf) of those that are exchanged."""
    flat = jax.tree_util.tree_leaves_with_path(params)
    names = jax.tree.leaves(axes, is_leaf=lambda x: isinstance(x, tuple))
    found = [
        (position, Leaf(path_name(path), tuple(x.shape), str(x.dtype), tuple(logical)))
        for position, ((path, x), logical) in enumerate(zip(flat, names, strict=True))
        if config.is_exchanged(path_name(path))
    ]
    for pattern in config.paths:
        if not any(fnmatch.fnmatchcase(leaf.path, pattern) for _, leaf in found):
            raise ValueError(
                f"exchange.paths: {pattern!r} matches no parameter; the first ones are "
                f"{', '.join(path_name(path) for path, _ in flat[:5])}"
            )
    return found
