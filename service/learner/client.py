"""A learner's calls to the coordinator, made by its first process alone."""

import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from ..wire.coordinators import Caller
from ..wire.errors import Busy, Refused, Unavailable

# How long the coordinator holds a `Next` that has nothing to say yet.
POLL_SECONDS = 10.0
CALL_SECONDS = 20.0
BEAT_SECONDS = 2.0
# How long a coordinator that does not answer is waited for; every call can be repeated.
RETRY_SECONDS, PAUSE_SECONDS = 45.0, 0.5
# How long to wait for one that answers that it is busy, with a large checkpoint, say.
BUSY_SECONDS = 7200.0


class Client:
    """The coordinator as one learner of one job sees it.

    Args:
      learner: its number, from 0.
    """

    def __init__(self, channel: Caller, job: str, learner: int):
        self._channel, self.job, self.learner = channel, job, learner
        self.incarnation = 0
        self._closed = threading.Event()
        self._beats: threading.Thread | None = None
        self.lost: Exception | None = None  # what the coordinator said to a beat

    def open(self, spec: Mapping[str, Any]) -> dict[str, Any]:
        """Opens the job, or checks that the one that is open is the same."""
        return self._retried("OpenJob", dict(spec), CALL_SECONDS)

    def initialized(self) -> dict[str, Any]:
        """Tells that the initial parameters are on the servers."""
        return self._call("Initialized", {})

    def join(self, facts: Mapping[str, Any]) -> dict[str, Any]:
        """Joins as a new incarnation, and starts to report that this process lives."""
        answer = self._call("Join", facts)
        self.incarnation = int(answer["incarnation"])
        self._beats = threading.Thread(target=self._beat, name="beats", daemon=True)
        self._beats.start()
        return answer

    def next(self, after: int) -> dict[str, Any]:
        """Waits for the round after `after`; may answer that there is none yet."""
        if self.lost is not None:
            raise self.lost
        fields = {"round": after, "seconds": POLL_SECONDS}
        return self._call("Next", fields, POLL_SECONDS + CALL_SECONDS)

    def contribute(self, contribution: Mapping[str, Any]) -> dict[str, Any]:
        """Tells that all pieces of a round are on the servers, or at the merger.

        The state of the answer is "wait" if the merger has not passed them on yet, and
        "elsewhere" if they must be sent again.
        """
        return self._call("Contribute", contribution)

    def report(self, kind: str, row: Mapping[str, Any]) -> None:
        """Sends a row of metrics for the run folder of the job."""
        self._call("Report", {"kind": kind, "row": dict(row)})

    def leave(self, reason: str, *, failed: bool = False) -> None:
        """Leaves the job. The coordinator may be gone already, which is fine.

        Args:
          failed: whether the data may be the reason.
        """
        self._closed.set()
        try:
            self._call("Leave", {"reason": reason, "failed": failed}, 5.0)
        except (Refused, Unavailable):
            return  # its lease runs out

    def _call(
        self, method: str, fields: Mapping[str, Any], seconds: float = CALL_SECONDS
    ) -> dict[str, Any]:
        who = {"job": self.job, "learner": self.learner}
        message = {**who, "incarnation": self.incarnation, **fields}
        return self._retried(method, message, seconds)

    def _retried(
        self, method: str, message: dict[str, Any], seconds: float
    ) -> dict[str, Any]:
        """Repeats a call while the coordinator may be restarting."""
        began = heard = time.monotonic()
        while True:
            try:
                return self._channel.call(method, message, seconds)
            except Unavailable as error:
                now = time.monotonic()
                if isinstance(error, Busy) and now < began + BUSY_SECONDS:
                    heard = now
                if self._closed.is_set() or now > heard + RETRY_SECONDS:
                    raise
            self._closed.wait(PAUSE_SECONDS)

    def _beat(self) -> None:
        """Renews the lease while local steps run, which call nothing themselves."""
        while not self._closed.wait(BEAT_SECONDS):
            try:
                self._call("Alive", {}, 5.0)
            except Refused as error:  # it counts as lost; joining again may help
                self.lost = Unavailable(str(error))
                return
            except Unavailable:
                continue  # the next call that matters reports it
            except ValueError:  # gRPC's, of a channel that is closed
                if self._closed.is_set():
                    return
                raise

    def close(self) -> None:
        self._closed.set()
        self._channel.close()


def in_all(group: Any, what: str, work: Callable, call: Callable) -> dict[str, Any]:
    """Runs `work` in every process, then `call` in the first; returns its answer.

    A refusal, or a service that does not answer, is raised alike in every process.

    Args:
      group: the processes of this learner, see trainer/job/group.py.
      work: returns the report of this process, a dict.
      call: takes all reports.
    """

    def judge(reports: list[dict[str, Any]]) -> dict[str, Any]:
        try:
            return {"answer": call(reports)}
        except (Refused, Unavailable) as error:
            return {"refused": isinstance(error, Refused), "text": str(error)}

    answer = group.exchange(what, work, judge)
    if "text" in answer:
        raise (Refused if answer["refused"] else Unavailable)(answer["text"])
    return answer["answer"]
