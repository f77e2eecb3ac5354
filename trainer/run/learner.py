"""A run as one of several learners: its steps end in exchanges with the service."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ...service.learner.client import Client
from ...service.learner.exchange import Exchange
from ...service.rounds.leases import as_ranges
from ...service.wire.calls import Channel
from ...service.wire.coordinators import reach
from ..job.group import Group
from ..job.preemption import Preempted
from ..program import contract
from ..program.schedules import make_rate
from ..program.state import State
from ..program.step import WEIGHT, Gradients
from ..record.ledger import BLOCK, Ledger
from . import exchange as exchange_lib
from .exchange_job import credentials, job_spec, make_mover
from .exchanged import Exchanged
from .loop import StepFn
from .prepare import Prepared

# Errors that do not tell against the data on which a learner was.
NOT_OF_DATA = (Preempted, KeyboardInterrupt, SystemExit, OSError)


@dataclasses.dataclass
class _Round:
    """What the local steps of the current round have seen so far.

    Attributes:
      first, stop: its local steps are first + 1 .. stop.
      blocks: of the data, one for each of them.
      ahead: blocks of the round after it, as far as they are known.
      metrics: of each local step, still on the devices.
    """

    first: int
    stop: int
    blocks: Sequence[int] = ()
    ahead: Sequence[int] = ()
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


OTHERS_ARE_DONE = "enough of the other learners have done all their rounds"
NOT_SUMMED = {WEIGHT, BLOCK, "samples_0", "samples_1", "skipped", "learning_rate"}


class Learner:
    """Makes the steps of a run exchange parameters; every process must have one.

    Args:
      owner: who this is to the service: the same owner may take its place again at
        once, another one only after it has sent no heartbeat for a while.
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
        if contract.has_variables(config.model):
            raise ValueError(
                f"{type(config.model).__name__} has variables besides its parameters, "
                "which learners do not exchange: each would have its own. Train it "
                "without --exchange, or without variables."
            )
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
        secrets = credentials(self._config)
        connect = functools.partial(Channel, **secrets)
        center = reach(address, **secrets)
        client = Client(center, self._config.job, self._config.learner)
        self._exchange = Exchange(
            client,
            self._group,
            self._parameters,
            self._layout,
            self.policy,
            connect=lambda opened: make_mover(
                *(self._config.job, self._layout, opened, connect, center),
                reached=lambda point: group.reached(point, self.step),  # type: ignore
            ),
            push=self._config.push_codec,
            pull=self._config.pull_codec,
            seed=config.seed,
            on_wait=on_wait,
        )
        self._rate = make_rate(config.schedule, config.num_steps)
        self.step, self.is_done, self._has_moved = 0, False, False
        self._round, self._merge_at = _Round(0, 0), 0

    def describe(self) -> str:
        config = self._config
        return (
            f"Learner {config.learner} of {config.learners} in job {config.job!r} at "
            f"{config.address}, mode {config.mode}: "
            f"{self.policy.local_steps} local steps per exchange of "
            f"{len(self._layout.blocks)} blocks, sent as {self._config.push_codec} "
            f"and received as {self._config.pull_codec}"
        )

    @property
    def reports(self) -> bool:
        """Whether this learner's evaluations are those of the training."""
        return self._config.learner == 0

    def begin(self, initial: Callable[[], State]) -> int:
        """Joins the training; returns the step that this learner continues from.

        Args:
          initial: makes the state of step 0, which learner 0 may have to send.
        """
        facts = {
            "owner": self._owner,
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
        self._begin_round(self.step)
        return self._parameters.at_step(self._exchange.start(state), self.step)

    def write(self, kind: str, rows: Sequence[Mapping[str, Any]]) -> None:
        """Reports evaluations of the shared parameters: a writer of metrics.

        In the folder of the training a step is a version.
        """
        for row in rows if kind == "eval" else ():
            version = {"step": self._exchange.turn.version, "local_step": row["step"]}
            self._exchange.report(kind, {**row, **version})

    def close(self) -> None:
        """Does nothing: the run leaves the training when it is over."""

    def leave(self, error: BaseException | None) -> None:
        """Leaves the training: at its end, or because of an error."""
        reason = "done" if error is None else type(error).__name__
        failed = error is not None and not isinstance(error, NOT_OF_DATA)
        self._exchange.leave(reason, failed=failed)

    def has_moved(self) -> bool:
        """Whether the run does not continue with the next step."""
        return self._has_moved

    def has_ended(self) -> bool:
        """Whether the training ended before the last step of this learner."""
        return self.is_done and self._has_moved

    @property
    def why_ended(self) -> str:
        """Why the training was stopped; "" if it was not, or has not ended."""
        turn = self._exchange.turn
        if turn.is_done and turn.reason:
            return turn.reason
        return OTHERS_ARE_DONE if self.has_ended() else ""

    def resume(self) -> int:
        """Returns where a run that has moved continues."""
        self._has_moved = False
        return self.step

    def step_fn(self, step_fn: StepFn) -> StepFn:
        """Returns the step of this learner, given what Prepared.compile returns."""

        def gradient_step(state: State, batch: Any) -> tuple[State, dict[str, Any]]:
            self._group.reached("compute", self.step)
            return self._after_gradients(state, step_fn(state, batch))  # type: ignore

        def local_step(state: State, batch: Any) -> tuple[State, dict[str, Any]]:
            block = self.upcoming()[0]
            self._group.reached("compute", self.step)
            state, metrics = step_fn(state, batch)
            state = self._after_local_step(state, metrics)
            return state, {**metrics, BLOCK: block}

        return gradient_step if self._config.sends_gradients else local_step

    def upcoming(self) -> list[int]:
        """Returns the blocks of data of the next local steps."""
        done = self.step - self._round.first
        return [*self._round.blocks[done:], *self._round.ahead]

    def _after_gradients(self, state: State, grads: Gradients) -> tuple[State, dict]:
        """Sends one gradient; the servers run the optimizer."""
        block = self.upcoming()[0]
        rate = np.asarray(self._rate(self.step), np.float32)
        sums = {k: float(v) for k, v in jax.device_get(grads.sums).items()}
        self.step += 1
        residual = self._parameters.residual(state)
        residual = self._exchange.send_gradients(
            grads.params, sums, self._facts, residual
        )
        state = self._parameters.put_residual(state, residual)
        weight = sums[WEIGHT] or 1.0
        metrics: dict[str, Any] = {
            k: v / weight for k, v in sums.items() if k != WEIGHT
        }
        metrics |= {"learning_rate": rate, **grads.samples}
        metrics["loss"] = jnp.float32(metrics["loss"])  # the watchdog waits for it
        state = self._finish_round(state, metrics)
        commit = self._exchange.turn.commit
        metrics["skipped"] = float(bool(commit.get("skipped")))
        if "norm" in commit:
            metrics["grad_norm"] = commit["norm"]
        return state, {**metrics, BLOCK: block}

    def _after_local_step(self, state: State, metrics: dict[str, Any]) -> State:
        """Sends the round if this was its last step; merges what others have made.

        The merged parameters are taken `delay` steps later, or at once if there are no
        further steps.
        """
        self.step += 1
        self._round.metrics.append(dict(metrics))
        if self._exchange.is_sending and self.step == self._merge_at:
            state = self._finish_round(state, metrics)
        if self._has_moved or self.step < self._round.stop:
            return state
        facts, stop = self._facts, self._round.stop
        residual = self._exchange.send_change(
            state.params, self._round.sums(), facts, self._parameters.residual(state)
        )
        state = self._parameters.put_residual(state, residual)
        if stop == self._prepared.config.num_steps or not self.policy.delay:
            return self._finish_round(state, metrics)
        self._merge_at = stop + self.policy.delay
        self._begin_round(stop, self._exchange.turn.round + 1)
        return state

    def _finish_round(self, state: State, metrics: dict[str, Any]) -> State:
        """Waits for the next turn, and goes where the coordinator says."""
        before = self._exchange.turn
        ended = self.policy.steps_before(before.round + 1)
        outcome = self._exchange.finish()
        turn = outcome.turn
        self._ledger.event(
            "round",
            **self._exchange.who,
            round=before.round,
            base=before.version,
            first_step=self.policy.steps_before(before.round) + 1,
            step=ended,
            blocks=as_ranges(before.blocks),
        )
        metrics |= outcome.metrics()
        self.is_done = turn.is_done
        next_step = ended if turn.is_done else self.policy.steps_before(turn.round)
        is_last = ended == self._prepared.config.num_steps
        self._has_moved = next_step != ended or (turn.is_done and not is_last)
        if self._has_moved or self.step == ended:
            self.step = next_step
            self._begin_round(next_step)
        else:  # it has been in the round of this turn for a while
            assert [*self._round.blocks] == [*turn.blocks], (self._round, turn)
            self._round.ahead = turn.ahead
        return self._parameters.at_step(self._exchange.merge(state, outcome), self.step)

    def _begin_round(self, first: int, number: int = 0) -> None:
        """Args:
        number: of the round, if it is the one after this turn's.
        """
        turn = self._exchange.turn
        leased = (turn.ahead, ()) if number else (turn.blocks, turn.ahead)
        stop = self.policy.steps_before((number or turn.round) + 1)
        self._round = _Round(first, stop, *leased)

    @property
    def _facts(self) -> dict[str, Any]:
        return {"steps": self._round.stop - self._round.first}
