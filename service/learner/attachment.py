"""How a learner reaches the service: by itself, or through a merger.

A merger that dies takes along what was sent to it and not passed on. The learner goes
to whoever answers then, and sends it again: a contribution that the coordinator has
already is not counted twice.
"""

import logging
import secrets
from collections.abc import Callable, Mapping
from typing import Any

from ..wire.errors import Unavailable
from .client import Client, in_all
from .mover import Mover

_LOG = logging.getLogger(__name__)
# How often in a row: merger after merger may die, but not for ever.
MAX_MOVES = 5
Report = dict[str, Any]


class Attachment:
    """What a learner sends to, and reads from; every process must have one.

    Args:
      client: of the coordinator; only the first process of the group uses it.
      group: the processes of this learner.
      connect: makes the Mover, given the answer about the servers.

    Attributes:
      mover: to the servers, or to the merger.
      place: of the merger that this learner is attached to; None if there is none.
    """

    def __init__(
        self, client: Client, group: Any, connect: Callable[[Mapping[str, Any]], Mover]
    ):
        self._client, self._group, self._connect = client, group, connect
        self._spec: Mapping[str, Any] = {}
        self.mover: Mover | None = None
        self.place: str | None = None

    def open(self, spec: Mapping[str, Any]) -> dict[str, Any]:
        """Opens the job with whoever answers, and connects to its servers."""
        if self._spec:
            _LOG.warning("what was sent may be lost with its merger: sending it again")
        opened = in_all(
            self._group, "open", dict, lambda _: self._client.open(dict(spec))
        )
        self.close()
        self.mover, self._spec = self._connect(opened), spec
        self.place = opened.get("place")
        return opened

    def close(self) -> None:
        mover, self.mover = self.mover, None
        if mover is not None:
            mover.close()

    def initialize(self, push: Callable[[int], int]) -> None:
        """Pushes the initial parameters in every process, until the job has them.

        A server that was started again meanwhile, or has come, does not have them.

        Args:
          push: told the number of this attempt, which stands for the incarnation: what
            others have left of theirs, perhaps on another mesh, is not mixed with it.
        """
        for _ in range(MAX_MOVES):
            attempt = in_all(
                *(self._group, "initial parameters", dict),
                lambda _: {"number": 1 + secrets.randbits(40)},
            )
            answer = in_all(
                *(self._group, "initial parameters"),
                lambda number=attempt["number"]: {"bytes": push(number)},
                lambda _: self._client.initialized(),
            )
            if answer["state"] == "ok":
                return
            self.open(self._spec)
        raise Unavailable(
            f"the initial parameters were sent {MAX_MOVES} times in vain: servers of "
            "the job do not have them. See what the service says about its servers"
        )

    def contribute(
        self,
        push: Callable[[bool], Report],
        contribution: Callable[[list[Report]], dict[str, Any]],
        check: Callable[[], None],
    ) -> None:
        """Pushes in every process, and contributes, until that is acknowledged.

        Args:
          push: returns the report of this process; told whether servers have come
            that need the contribution too.
          contribution: makes the message, given all reports; in the first process.
          check: raises an error if this learner should wait no longer.
        """
        message: dict[str, Any] = {}

        def contribute(reports: list[Report]) -> dict[str, Any]:
            if (lost := _lost(reports)) is not None:
                return {"state": "elsewhere", "reason": lost}
            message.clear()
            message.update(contribution(reports))
            if self.place is not None:
                message["place"] = self.place
            return self._client.contribute(message)

        def again(_: list[Report]) -> dict[str, Any]:
            return self._client.contribute(message)

        for _ in range(MAX_MOVES):
            answer = in_all(
                *(self._group, "contribution"),
                lambda: self._tried(lambda: push(False)),
                contribute,
            )
            while answer["state"] == "wait":  # for the others below the merger
                check()
                answer = in_all(self._group, "contribution", dict, again)
            while answer["state"] == "moved":
                check()
                answer = in_all(
                    self._group, "contribution", lambda: push(True), contribute
                )
            if answer["state"] == "left":
                raise Unavailable(f"this learner must join again: {answer['reason']}")
            if answer["state"] != "elsewhere":
                return
            self.open(self._spec)
        raise Unavailable(_why(answer))

    def fetch(self, read: Callable[[], Any]) -> Any:
        """Returns what `read` returns in this process."""
        if self.place is None:
            return read()
        found: list[Any] = []

        def fetch() -> Report:
            found.append(read())
            return {}

        for _ in range(MAX_MOVES):
            answer = in_all(
                self._group,
                "version",
                lambda: self._tried(fetch),
                lambda reports: {"reason": _lost(reports)},
            )
            if answer["reason"] is None:
                return found[-1]
            self.open(self._spec)
        raise Unavailable(_why(answer))

    def _tried(self, work: Callable[[], Report]) -> Report:
        """Returns the report of some work, also if the merger has died meanwhile."""
        try:
            return work()
        except Unavailable as error:
            if self.place is None:
                raise
            return {"lost": str(error)}


def _lost(reports: list[Report]) -> str | None:
    return next((report["lost"] for report in reports if "lost" in report), None)


def _why(answer: Mapping[str, Any]) -> str:
    reason = answer.get("reason") or "what it had sent was not there any more"
    return f"this learner was attached {MAX_MOVES} times in vain: {reason}"
