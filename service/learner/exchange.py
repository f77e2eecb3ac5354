"""One learner's side of a training between groups: what happens at the end of a round.

With `local_steps=1` and no outer optimizer a round is one gradient, and the servers
update the parameters. Otherwise a round is several ordinary steps, and what is sent is
the change of the parameters since they were merged last.

Every process of the learner must call the methods of an Exchange, in the same order.
"""

import concurrent.futures
import contextlib
import dataclasses
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from ..blocks.layout import Layout
from ..rounds.leases import as_ranges, from_ranges
from ..rounds.policy import Policy
from ..wire.codecs import PLAIN, Codec
from ..wire.errors import Refused, Unavailable
from .attachment import Attachment
from .client import Client, in_all
from .compression import Compressor
from .merging import Merging, Parameters
from .mover import Mover
from .rows import Sent, TableRows
from .shards import Arrays, Host, Piece

# How often somebody who waits for others says that it is alive.
WAIT_SECONDS = 5.0


@dataclasses.dataclass(frozen=True)
class Turn:
    """What the coordinator answered: the round to compute, and where it starts from.

    Attributes:
      round: counted from 1.
      version: of the shared parameters.
      is_done: there is no further round; `version` is the last one.
      blocks: of the data, that this round is computed on, one for each local step.
      ahead: those of the round after it, should the learner go on with that.
      commit: facts about the commit that made the version, for metrics.
      reason: why there is no further round, if the job was stopped.
    """

    round: int
    version: int
    is_done: bool = False
    commit: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    reason: str = ""
    blocks: Sequence[int] = ()
    ahead: Sequence[int] = ()


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How a round ended.

    Attributes:
      fetched: the version of the turn, of the fragment that was exchanged; of all
        parameters if the turn is elsewhere.
      pushed, pulled: bytes of all processes: of this contribution, and what they have
        pulled since the one before. Only the first process knows them.
      seconds: from the end of the local steps to having fetched.
      waited: the part of it in which the learner could do nothing else.
    """

    turn: Turn
    fetched: Host
    fragment: int | None
    pushed: int
    pulled: int
    seconds: float
    waited: float = 0.0

    def metrics(self) -> dict[str, float]:
        return {
            "version": self.turn.version,
            "pushed_bytes": self.pushed,
            "pulled_bytes": self.pulled,
            "exchange_s": round(self.seconds, 4),
            "exchange_wait_s": round(self.waited, 4),
        }


class Exchange:
    """Exchanges the parameters of one learner with the service.

    Args:
      client: of the coordinator; only the first process of the group uses it.
      group: the processes of this learner, see trainer/job/group.py. No one else may
        use it: rounds end in a thread.
      connect: makes the Mover, given the coordinator's answer about the servers.
      push, pull: how contributions are packed, and changes of the parameters.
      tables: of the job; the first process of the group sends their rows.
      seed: for the random waits of `half-sync`.
      on_wait: called every few seconds while the caller waits for others.

    Attributes:
      turn: the round that is being computed.
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
        push: Codec = PLAIN,
        pull: Codec = PLAIN,
        tables: TableRows | None = None,
        seed: int = 0,
        on_wait: Callable[[], None] = lambda: None,
    ):
        self._client, self._group = client, group
        self._parameters, self.policy = parameters, policy
        self._seed, self._on_wait = seed, on_wait
        self._attached, self._tables = Attachment(client, group, connect), tables
        self._merging = Merging(parameters, layout, self._read, policy.mix)
        self._layout, self._compressor = layout, Compressor(push, layout)
        self._pulls_changes = not pull.is_plain
        self._incarnation, self._pulled = 0, 0
        self._thread = concurrent.futures.ThreadPoolExecutor(1, "exchange")
        self._pending: concurrent.futures.Future[Outcome] | None = None
        self._is_leaving = threading.Event()
        self.turn = Turn(0, 0)

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
        opened = self._attached.open(spec)
        if opened["initialize"] and self._client.learner == 0:
            self._initialize(initial)
        joined = in_all(self._group, "join", dict, lambda _: self._client.join(facts))
        self._incarnation = int(joined["incarnation"])
        self.turn = self._awaited(self._thread.submit(self._wait_for_turn, 0))
        return self.turn

    def _initialize(self, initial: Callable[[], Any]) -> None:
        """Sends the parameters of version 0, again if the servers have lost them."""
        arrays = self._parameters.of(initial())
        pieces, _ = Compressor(PLAIN, self._layout).contribution(arrays)

        def push(number: int) -> int:
            with _rejoining():
                return self._push(pieces, 0, incarnation=number)

        self._attached.initialize(push)

    def leave(self, reason: str, *, failed: bool = False) -> None:
        """Leaves the job, `failed` if the data of this round may be the reason."""
        self._is_leaving.set()
        self._thread.shutdown(cancel_futures=True)
        if self._group.is_first:
            self._client.leave(reason, failed=failed)
        self._attached.close()
        self._client.close()

    @property
    def who(self) -> dict[str, int]:
        """Which learner this is, for the record."""
        return {"learner": self._client.learner, "incarnation": self._incarnation}

    def report(self, kind: str, row: Mapping[str, Any]) -> None:
        """Sends a row of metrics for the folder of the job; for the first process."""
        with concurrent.futures.ThreadPoolExecutor(1, "report") as thread:
            self._awaited(thread.submit(self._client.report, kind, row))

    # Rounds.

    def start(self, state: Any) -> Any:
        """Returns the state with all parameters of the version of this turn."""
        fetched = self._fetch(self.turn.version, None)
        return self._merging.replace(state, fetched)

    def send_gradients(
        self,
        grads: Any,
        sums: Mapping[str, float],
        facts: Any,
        residual: Arrays | None = None,
        rows: Mapping[str, Sent] | None = None,
    ) -> Arrays:
        """Starts to contribute gradients; `finish` waits for what follows.

        Args:
          residual: of what was sent before, see compression.py.
          rows: of tables, by name: numbers of rows, ascending, and their gradients.

        Returns:
          The new residual.
        """
        arrays = self._parameters.of(grads)
        return self._send(arrays, sums, facts, base=None, residual=residual, rows=rows)

    def send_change(
        self,
        params: Any,
        sums: Mapping[str, float],
        facts: Any,
        residual: Arrays | None = None,
        rows: Mapping[str, Sent] | None = None,
    ) -> Arrays:
        """Starts to contribute the change of the parameters; see `send_gradients`."""
        arrays, base = self._parameters.of(params), self._merging.base
        return self._send(arrays, sums, facts, base=base, residual=residual, rows=rows)

    @property
    def is_sending(self) -> bool:
        """Whether a round was sent and not finished yet."""
        return self._pending is not None

    def finish(self) -> Outcome:
        """Waits until the round that was sent is over; returns how."""
        assert self._pending is not None
        began = time.monotonic()
        outcome = self._awaited(self._pending)
        outcome = dataclasses.replace(outcome, waited=time.monotonic() - began)
        self._pending, self.turn = None, outcome.turn
        return outcome

    def merge(self, state: Any, outcome: Outcome) -> Any:
        """Returns the state with what a round has brought."""
        return self._merging.merge(state, outcome.fetched, outcome.fragment)

    def _send(
        self,
        arrays: Arrays,
        sums: Mapping[str, float],
        facts: Any,
        *,
        base: Host | None,
        residual: Arrays | None,
        rows: Mapping[str, Sent] | None,
    ) -> Arrays:
        assert self._pending is None
        sent, residual = self._compressor.contribution(
            arrays, self._fragment, base=base, residual=residual
        )
        self._pending = self._thread.submit(
            self._round_trip, sent, sums, facts, rows or {}
        )
        return residual

    @property
    def _fragment(self) -> int | None:
        """The fragment of this round; None if it is all parameters."""
        if self.policy.fragments == 1:
            return None
        return self.policy.fragment_of(self.turn.round)

    def _round_trip(
        self,
        sent: Sequence[Piece],
        sums: Mapping[str, float],
        facts: Any,
        rows: Mapping[str, Sent],
    ) -> Outcome:
        """Pushes, contributes, waits for the next turn and fetches its version."""
        before, began, learner = self.turn, time.monotonic(), self._client.learner
        self._is_leaving.wait(
            self.policy.wait_seconds(self._seed, learner, before.round)
        )
        fragment = self._fragment
        contribution = {
            "round": before.round,
            "base": before.version,
            "weight": sums["weight"],
            "sums": dict(sums),
            "blocks": as_ranges(before.blocks),
            **facts,
        }
        pushed = pulled = 0

        def push(has_moved: bool) -> dict[str, Any]:
            mover = self._attached.mover
            assert mover is not None
            with _rejoining():
                if has_moved:
                    mover.refresh()
                count = self._push(sent, before.round)
                if self._tables is not None and self._group.is_first:
                    who = learner, self._incarnation, before.round
                    count += self._tables.push(rows, *who)
            return {"bytes": count, "pulled": self._pulled, "epoch": mover.epoch}

        def message(reports: list[dict[str, Any]]) -> dict[str, Any]:
            nonlocal pushed, pulled
            pushed += sum(report["bytes"] for report in reports)
            pulled = sum(report["pulled"] for report in reports)
            epoch = min(report["epoch"] for report in reports)
            return {**contribution, "bytes": pushed, "epoch": epoch}

        self._attached.contribute(push, message, self._check_leaving)
        turn = self._wait_for_turn(before.round)
        if not turn.is_done and turn.round != before.round + 1:
            fragment = None  # it continues elsewhere, from a whole version
        fetched = self._fetch(turn.version, fragment)
        seconds = time.monotonic() - began
        return Outcome(turn, fetched, fragment, pushed, pulled, seconds)

    def _wait_for_turn(self, after: int) -> Turn:
        while True:
            answer = in_all(
                self._group, "turn", dict, lambda _: self._client.next(after)
            )
            if answer["state"] == "left":
                raise Unavailable(f"this learner must join again: {answer['reason']}")
            if answer["state"] != "wait":
                is_done = answer["state"] == "done"
                number = max(int(answer.get("round", 0)), after)
                commit, version = answer.get("commit") or {}, int(answer["version"])
                leased = (answer.get(name, ()) for name in ("blocks", "ahead"))
                blocks, ahead = map(from_ranges, leased)
                why = answer["reason"]
                return Turn(number, version, is_done, commit, why, blocks, ahead)
            self._check_leaving()

    def _check_leaving(self) -> None:
        if self._is_leaving.is_set():
            raise Unavailable("this learner is leaving")

    def _fetch(self, version: int, fragment: int | None) -> Host:
        with _rejoining():
            fetched, self._pulled = self._attached.fetch(
                lambda: self._merging.fetch(version, fragment)
            )
        return fetched

    def _awaited(self, future: concurrent.futures.Future) -> Any:
        while True:
            try:
                return future.result(timeout=WAIT_SECONDS)
            except concurrent.futures.TimeoutError:
                if future.done():
                    raise
                self._on_wait()

    def _read(
        self, version: int, buffers: Host, fragment: int | None, base: Host
    ) -> int:
        assert self._attached.mover is not None
        known = base if self._pulls_changes else None
        return self._attached.mover.pull(version, buffers, fragment, known)

    def _push(
        self, sent: Sequence[Piece], round: int, *, incarnation: int | None = None
    ) -> int:
        assert self._attached.mover is not None
        who = self._client.learner, incarnation or self._incarnation
        return self._attached.mover.push(sent, *who, round)


@contextlib.contextmanager
def _rejoining() -> Iterator[None]:
    """What servers refuse in a round, such as a version that is gone, is not for users.

    It happens to a learner that stood still while the others went on.
    """
    try:
        yield
    except Refused as error:
        raise Unavailable(f"this learner must join again: {error}") from error
