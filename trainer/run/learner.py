"""A run as one of several learners: its steps end in exchanges with the service."""

import dataclasses
import functools
import importlib.metadata
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ...service.blocks.hashing import owners
from ...service.blocks.layout import Layout
from ...service.learner.client import Client
from ...service.learner.exchange import Exchange, Turn
from ...service.learner.mover import Mover
from ...service.wire.calls import Channel
from ...service.wire.credentials import Tls
from ..config import tree as config_tree
from ..job.group import Group
from ..program.state import State
from ..program.step import WEIGHT, Gradients
from ..record.ledger import Ledger
from . import exchange as exchange_lib
from .exchange_update import update_spec
from .loop import StepFn
from .prepare import Prepared


@dataclasses.dataclass
class _Round:
    """What the local steps of the current round have seen so far.

    Attributes:
      metrics: of each local step, still on the devices.
    """

    metrics: list[dict[str, jax.Array]] = dataclasses.field(default_factory=list)

    def sums(self) -> dict[str, float]:
        """Returns the sums over the round, from the means of its steps."""
        totals: dict[str, float] = {WEIGHT: 0.0}
        for row in jax.device_get(self.metrics):
            weight = float(row[WEIGHT])
            totals[WEIGHT] += weight
            for name in row.keys() - NOT_SUMMED:
                totals[name] = totals.get(name, 0.0) + float(row[name]) * weight
        return totals


NOT_SUMMED = {WEIGHT, "samples_0", "samples_1", "skipped", "learning_rate"}


class Learner:
    """Makes the steps of a run exchange parameters; every process must have one.

    Args:
      owner: who this is to the service: the same owner may take its place again at
        once, another one only after it was not heard of for a while.
      on_wait: called while waiting for others.

    Attributes:
      step: the number of local steps done; rounds may skip some.
      is_done: whether the service has ended the training.
    """

    def __init__(
        self,
        prepared: Prepared,
        group: Group,
        ledger: Ledger,
        *,
        owner: str,
        on_wait: Callable[[], None],
    ):
        config = prepared.config
        self._owner = owner
        self._prepared, self._ledger = prepared, ledger
        self._config, self.policy = config.exchange, config.exchange.policy
        layout = prepared.layout
        shapes, axes = layout.abstract.params, layout.axes.params
        self._layout = exchange_lib.block_layout(
            self._config, config.optimizer, shapes, axes
        )
        self._parameters = Exchanged(prepared, self._config)
        self._group = group.named(f"{group.name}-exchange")
        address = self._config.address
        assert address is not None
        connect = functools.partial(Channel, **credentials(self._config))
        client = Client(connect(address), self._config.job, self._config.learner)
        self._exchange = Exchange(
            client,
            self._group,
            self._parameters,
            self._layout,
            self.policy,
            connect=lambda opened: _mover(
                self._config.job, self._layout, opened["servers"], connect
            ),
            seed=config.seed,
            on_wait=on_wait,
        )
        self._rate = config.schedule.make(config.num_steps)
        self.step, self.is_done, self._has_moved = 0, False, False
        self._round = _Round()

    def describe(self) -> str:
        config = self._config
        return (
            f"Learner {config.learner} of {config.learners} in job {config.job!r} at "
            f"{config.address}, mode {config.mode}: "
            f"{self.policy.local_steps} local steps per exchange of "
            f"{len(self._layout.blocks)} blocks"
        )

    def begin(self, initial: Callable[[], State]) -> int:
        """Joins the training; returns the step that this learner continues from.

        Args:
          initial: makes the state of step 0, which learner 0 may have to send.
        """
        first, size = self._config.learner, self._prepared.batch_size
        facts = {
            "owner": self._owner,
            "rows": [first * size, (first + 1) * size],
            "mesh": dict(self._prepared.layout.params.mesh),
            "processes": self._group.size,
        }
        turn = self._exchange.begin(
            job_spec(self._prepared, self._layout), lambda: initial().params, facts
        )
        self.step, self.is_done = self.policy.steps_before(turn.round), turn.is_done
        if turn.is_done:
            self.step = self._prepared.config.num_steps
        return self.step

    def joined(self, state: State, optimizer_step: int) -> State:
        """Returns the state with the shared parameters of the first round.

        Args:
          optimizer_step: of the checkpoint that the optimizer state came from; 0 if it
            is new.
        """
        turn = self._exchange.turn
        self._ledger.event(
            "joined",
            **self._exchange.who,
            round=turn.round,
            version=turn.version,
            step=self.step,
            optimizer_step=optimizer_step,
        )
        self._round = _Round()
        return self._parameters.at_step(self._exchange.pull(state), self.step)

    def leave(self, reason: str) -> None:
        self._exchange.leave(reason)

    def has_moved(self, step: int) -> bool:
        """Whether the run does not continue with the step after `step`."""
        del step
        return self._has_moved

    def resume(self) -> int:
        """Returns where a run that has moved continues."""
        self._has_moved = False
        return self.step

    def step_fn(self, step_fn: StepFn) -> StepFn:
        """Returns the step of this learner, given the compiled ordinary one."""
        if self.policy.outer is None:
            return self._gradient_step

        def local_step(state: State, batch: Any) -> tuple[State, dict[str, Any]]:
            state, metrics = step_fn(state, batch)
            return self._after_local_step(state, metrics), metrics

        return local_step

    def _gradient_step(self, state: State, batch: Any) -> tuple[State, dict]:
        """Sends one gradient; the servers run the optimizer."""
        grads: Gradients = self._prepared.program.gradients(state, batch)
        rate = np.asarray(self._rate(self.step), np.float32)
        sums = {k: float(v) for k, v in jax.device_get(grads.sums).items()}
        send = functools.partial(self._exchange.send_gradients, grads.params, sums)
        turn = self._end_round(send)
        commit = turn.commit
        weight = sums[WEIGHT] or 1.0
        metrics: dict[str, Any] = {
            k: v / weight for k, v in sums.items() if k != WEIGHT
        }
        metrics |= {
            "learning_rate": rate,
            "skipped": float(bool(commit.get("skipped"))),
            "version": turn.version,
            **({"grad_norm": commit["norm"]} if "norm" in commit else {}),
            **self._exchange.traffic.metrics(),
            **grads.samples,
        }
        metrics["loss"] = jnp.float32(metrics["loss"])  # the watchdog waits for it
        state = self._exchange.pull(state)
        return self._parameters.at_step(state, self.step), metrics

    def _after_local_step(self, state: State, metrics: dict[str, Any]) -> State:
        """Ends the round if this was its last local step."""
        self._round.metrics.append(metrics)
        number = self._exchange.turn.round
        if self.step + len(self._round.metrics) < self.policy.steps_before(number + 1):
            return state
        sums = self._round.sums()
        send = functools.partial(self._exchange.send_change, state.params, sums)
        turn = self._end_round(send)
        metrics |= {"version": turn.version, **self._exchange.traffic.metrics()}
        state = self._exchange.pull(state)
        return self._parameters.at_step(state, self.step)

    def _end_round(self, send: Callable[[Mapping[str, Any]], Turn]) -> Turn:
        """Contributes the current round, and goes where the coordinator says."""
        before = self._exchange.turn
        ended = self.policy.steps_before(before.round + 1)
        turn = send({"steps": ended - self.step, "samples": self._samples(ended)})
        self._ledger.event(
            "round",
            **self._exchange.who,
            round=before.round,
            base=before.version,
            first_step=self.step + 1,
            step=ended,
        )
        self.is_done = turn.is_done
        self.step = ended if turn.is_done else self.policy.steps_before(turn.round)
        is_last = ended == self._prepared.config.num_steps
        self._has_moved = self.step != ended or (turn.is_done and not is_last)
        self._round = _Round()
        return turn

    def _samples(self, stop: int) -> list[int] | str:
        """Returns the examples of the round: a range, or which batches they are."""
        share, size = self._config.share, self._prepared.batch_size
        first = share.number(self.step)
        if stop - self.step == 1:
            return [first * size, (first + 1) * size]
        return f"batches {first} to {share.number(stop - 1)} by {share.count} of {size}"


class Exchanged:
    """The exchanged parameters of a state, in canonical order, by leaf."""

    def __init__(self, prepared: Prepared, config: exchange_lib.Config):
        self._layout, self._mesh = prepared.layout, prepared.mesh
        shapes = prepared.layout.abstract.params
        found = exchange_lib.exchanged(config, shapes, prepared.layout.axes.params)
        self._positions = [position for position, _ in found]
        placed = jax.tree.leaves(prepared.program.abstract_state.params)
        self.like: Mapping[int, Any] = {
            leaf: placed[position] for leaf, position in enumerate(self._positions)
        }
        self._step = prepared.program.shardings.step

    def of(self, tree: Any) -> dict[int, jax.Array]:
        """Returns the exchanged arrays of a tree like the parameters."""
        tree = self._reordered(tree, self._layout.canonical)
        leaves = jax.tree.leaves(tree)
        return {leaf: leaves[p] for leaf, p in enumerate(self._positions)}

    def put(self, state: State, arrays: Mapping[int, jax.Array]) -> State:
        """Returns the state with these arrays instead of its own."""
        leaves, structure = jax.tree.flatten(state.params)
        if self._layout.order is not None:
            canonical = self._reordered(state.params, self._layout.canonical)
            leaves = jax.tree.leaves(canonical)
        for leaf, position in enumerate(self._positions):
            leaves[position] = arrays[leaf]
        params = jax.tree.unflatten(structure, leaves)
        return state._replace(params=self._reordered(params, self._layout.arranged))

    def at_step(self, state: State, step: int) -> State:
        """Returns the state with another step number."""
        number = jax.make_array_from_callback((), self._step, lambda _: np.int32(step))
        return state._replace(step=number)

    def _reordered(self, params: Any, reorder: Callable) -> Any:
        if self._layout.order is None:
            return params
        empty = State(np.int32(0), params, {}, {})
        return reorder(empty, self._mesh).params


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
        "data": {
            "digest": identity.splits["train"].digest if identity else None,
            "num_examples": len(prepared.train_data),
            "batch_size": config.batch_size,
            "seed": config.seed,
        },
        "config_digest": _shared_digest(config),
        "version": importlib.metadata.version("meshloom"),
    }


def _shared_digest(config: Any) -> str:
    """Returns the digest of everything but where and as whom this learner runs."""
    from .continuing import free_fields

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


def _mover(
    job: str,
    layout: Layout,
    servers: Mapping[str, str],
    connect: Callable[[str], Channel],
) -> Mover:
    """Connects to all servers, given their addresses by name."""
    channels = {name: connect(address) for name, address in servers.items()}
    return Mover(job, layout, owners(layout, job, sorted(servers)), channels)
