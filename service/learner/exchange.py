"""One learner's side of a training between groups: what happens at the end of a round.

With `local_steps=1` and no outer optimizer a round is one gradient, and the servers
update the parameters. Otherwise a round is several ordinary steps, and what is sent is
the change of the parameters since the version that the round started from.

Every process of the learner must call the methods of an Exchange, in the same order.
"""

import concurrent.futures
import dataclasses
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from ..blocks.layout import Layout
from ..rounds.policy import Policy
from ..wire.errors import Refused, Unavailable
from . import shards
from .client import Client, in_all
from .mover import Mover
from .shards import Arrays, Host


class Parameters(Protocol):
    """The exchanged parameters of a state, canonical, by their leaf in the layout."""

    like: Mapping[int, Any]  # shapes, dtypes and shardings

    def of(self, tree: Any) -> Arrays:
        """Returns the exchanged arrays of a tree like the parameters."""
        ...

    def put(self, state: Any, arrays: Arrays) -> Any:
        """Returns the state with these arrays instead of its own."""
        ...


@dataclasses.dataclass(frozen=True)
class Turn:
    """What the coordinator answered: the round to compute, and where it starts from.

    Attributes:
      round: counted from 1.
      version: of the shared parameters.
      is_done: there is no further round; `version` is the last one.
      commit: facts about the commit that made the version, for metrics.
    """

    round: int
    version: int
    is_done: bool = False
    commit: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass
class Traffic:
    """What the last round cost."""

    pushed: int = 0
    pulled: int = 0
    waited: float = 0.0

    def metrics(self) -> dict[str, float]:
        return {
            "pushed_bytes": self.pushed,
            "pulled_bytes": self.pulled,
            "wait_s": round(self.waited, 4),
        }


class Exchange:
    """Exchanges the parameters of one learner with the service.

    Args:
      client: of the coordinator; only the first process of the group uses it.
      group: the processes of this learner, see trainer/job/group.py.
      connect: makes the Mover, given the coordinator's answer about the servers.
      seed: for the random waits of `half-sync`.
      on_wait: called while waiting for others, at least every 10 s.
    """

    def __init__(
        self,
        client: Client,
        group: Any,
        parameters: Parameters,
        layout: Layout,
        policy: Policy,
        *,
        connect: Callable[[Mapping[str, Any]], Mover],
        seed: int = 0,
        on_wait: Callable[[], None] = lambda: None,
    ):
        self._client, self._group = client, group
        self._parameters, self._layout, self.policy = parameters, layout, policy
        self._connect, self._seed, self._on_wait = connect, seed, on_wait
        self._mover: Mover | None = None
        self._incarnation = 0
        self._background = concurrent.futures.ThreadPoolExecutor(1, "exchange")
        self._base: Host = {}
        self.turn = Turn(0, 0)
        self.traffic = Traffic()

    # Joining and leaving.

    def begin(
        self, spec: Mapping[str, Any], initial: Callable[[], Any], facts: Mapping
    ) -> Turn:
        """Opens the job, joins it, and waits for the first round of this learner.

        Args:
          spec: of the job; the first learner to come defines it for all.
          initial: makes the parameters of version 0, if learner 0 has to send them.
          facts: about this learner, for messages and for the report.
        """
        opened = in_all(
            self._group, "open", dict, lambda _: self._client.open(dict(spec))
        )
        self._mover = self._connect(opened)
        if opened["initialize"] and self._client.learner == 0:
            host = shards.to_host(self._parameters.of(initial()))
            in_all(
                self._group,
                "initial parameters",
                lambda: {"bytes": self._push(host, 0)},
                lambda _: self._client.initialized(),
            )
        joined = in_all(self._group, "join", dict, lambda _: self._client.join(facts))
        self._incarnation = int(joined["incarnation"])
        self.turn = self._wait_for_turn(dict, after=int(joined.get("round", 0)))
        return self.turn

    def leave(self, reason: str) -> None:
        self._background.shutdown()
        if self._group.is_first:
            self._client.leave(reason)
        if self._mover is not None:
            self._mover.close()
        self._client.close()

    @property
    def who(self) -> dict[str, int]:
        """Which learner this is, for the record."""
        return {"learner": self._client.learner, "incarnation": self._incarnation}

    # Moving parameters.

    def pull(self, state: Any) -> Any:
        """Returns the state with the parameters that the current round starts from."""
        return self._placed(state, self._pulled(self.turn.version, None))

    def _pulled(self, version: int, fragment: int | None) -> Host:
        assert self._mover is not None
        like = self._parameters.like
        buffers = shards.wanted(
            {leaf: x.shape for leaf, x in like.items()},
            {leaf: x.sharding for leaf, x in like.items()},
        )
        if fragment is not None:  # the other blocks keep their values
            for key, buffer in buffers.items():
                buffer[...] = self._base[key]
        self.traffic.pulled = self._mover.pull(version, buffers, fragment)
        self._base = buffers
        return buffers

    def _placed(self, state: Any, host: Host) -> Any:
        arrays = shards.to_devices(host, self._parameters.like)
        return self._parameters.put(state, arrays)

    def _push(self, host: Host, round: int, fragment: int | None = None) -> int:
        assert self._mover is not None
        learner = self._client.learner
        return self._mover.push(host, learner, self._incarnation, round, fragment)

    # The end of a round.

    def send_gradients(self, grads: Any, sums: Mapping[str, float], facts: Any) -> Turn:
        """Contributes gradients, and waits for the next round."""
        host = shards.to_host(self._parameters.of(grads))
        return self._finish_round(host, None, sums, facts)

    def send_change(self, params: Any, sums: Mapping[str, float], facts: Any) -> Turn:
        """Contributes the change of the parameters, and waits for the next round."""
        now = shards.to_host(self._parameters.of(params))
        change = shards.difference(self._base, now)
        return self._finish_round(change, self.fragment, sums, facts)

    @property
    def fragment(self) -> int | None:
        """The fragment that the current round exchanges; None for everything."""
        if self.policy.fragments == 1:
            return None
        return self.policy.fragment_of(self.turn.round)

    def _finish_round(
        self, host: Host, fragment: int | None, sums: Mapping[str, float], facts: Any
    ) -> Turn:
        turn, began = self.turn, time.monotonic()
        learner = self._client.learner
        time.sleep(self.policy.wait_seconds(self._seed, learner, turn.round))
        contribution = {
            "round": turn.round,
            "base": turn.version,
            "weight": sums["weight"],
            "steps": facts["steps"],
            "samples": facts["samples"],
            "sums": dict(sums),
        }

        def push() -> dict[str, Any]:
            return {"bytes": self._push(host, turn.round, fragment)}

        def contribute(reports: list[dict[str, Any]]) -> dict[str, Any]:
            self.traffic.pushed = sum(report["bytes"] for report in reports)
            return self._client.contribute(
                {**contribution, "bytes": self.traffic.pushed}
            )

        in_all(self._group, "contribution", push, contribute)
        self.turn = self._wait_for_turn(dict, after=turn.round)
        self.traffic.waited = time.monotonic() - began
        return self.turn

    def _wait_for_turn(self, work: Callable[[], dict], after: int) -> Turn:
        while True:
            answer = in_all(
                self._group, "turn", work, lambda _: self._client.next(after)
            )
            if answer["state"] == "left":
                raise Unavailable(f"this learner must join again: {answer['reason']}")
            if answer["state"] != "wait":
                is_done = answer["state"] == "done"
                number = max(int(answer.get("round", 0)), after)
                commit = answer.get("commit") or {}
                return Turn(number, int(answer["version"]), is_done, commit)
            self._on_wait()

    def check_alive(self) -> None:
        """Raises if another incarnation of this learner has taken its place."""
        if self._client.lost is not None:
            raise Refused(str(self._client.lost))
