"""The thread of a job, and how other threads ask something of it.

Only this thread touches the `Job`: calls put their requests into its queue and wait for
the answer, or wait at the job's board. Requests that arrive together are written to the
log together, and answered once they are on disk.
"""

import concurrent.futures
import dataclasses
import logging
import queue
import sqlite3
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from ..store.store import Deposed
from ..wire.errors import Busy, OldTerm, Refused, Unavailable
from . import disk, restoring
from .cleaning import Cleaner
from .job import Job
from .log import Entry
from .moving import Moving
from .servers import BlocksLost, ServerGroup, ServerLost
from .status import Watched

# How often leases are looked at if nothing happens.
POLL_SECONDS = 0.25
# What can happen to a job; anything else is a bug, of which the log shows the place.
EXPECTED = (
    *(ValueError, OSError, ServerLost, Deposed, OldTerm, sqlite3.OperationalError),
)
_LOG = logging.getLogger(__name__)
METHODS = (
    *("describe", "join", "contribute", "contribute_sum", "leave", "initialize"),
    *("report", "save_now", "clean"),
)


@dataclasses.dataclass(frozen=True)
class Request:
    """Something asked of a job; `answer` gets the answer or an error."""

    method: str
    message: Mapping[str, Any]
    answer: concurrent.futures.Future = dataclasses.field(
        default_factory=concurrent.futures.Future
    )


def cycle(job: Job, cleaner: Cleaner, requests: list[Request]) -> None:
    """Handles requests that arrived together, and what the time brings."""
    answers: list[tuple[Request, dict[str, Any]]] = []
    for request in requests:
        method = request.method
        assert method in METHODS, method
        if not request.answer.set_running_or_notify_cancel():
            continue
        try:
            if method == "join" and not job.is_held:
                restoring.load_again(job)
            handler = cleaner if method == "clean" else job
            answers.append((request, getattr(handler, method)(request.message)))
        except Refused as error:
            request.answer.set_exception(error)
    job.poll()
    events = job.flush()
    for request, answer in answers:
        request.answer.set_result(answer)
    saved = job.saved
    job.advance(events)
    _record(job, events, saved)
    cleaner.clean_if_due()


def _record(job: Job, entries: list[Entry], saved: int) -> None:
    """Records who came and went, and the checkpoint after one of version `saved`."""
    for entry in entries:
        event = dict(entry.body.get("event", {}))
        if (kind := event.pop("kind", None)) in ("Joined", "Left", "Stopped"):
            del event["time"]
            job.around.say("", kind.lower(), **event)
    if job.saved > saved:
        job.around.say("", "checkpoint", version=job.saved)


def moving(drivers: Iterable["Driver"]) -> list[ServerGroup]:
    """Returns the servers of the jobs that go on when one of them is lost."""
    jobs = (driver.job for driver in drivers)
    return [job.servers for job in jobs if job.spec.copies > 1]


class Driver:
    """Runs a job in a thread of its own until it is stopped or fails.

    Args:
      on_failure: called with the name of the job, why it ended, and whether the user
        must fix something before it can continue.
    """

    def __init__(self, job: Job, on_failure: Callable[[str, str, bool], None]):
        self.job = job
        # Posted by the job's thread: who asks need not wait while it saves.
        self.status: dict[str, Any] = {"state": "starting", "version": 0}
        self._on_failure = on_failure
        self._requests: queue.SimpleQueue[Request | None] = queue.SimpleQueue()
        self._thread = threading.Thread(
            target=self._run, name=f"job {job.spec.job}", daemon=True
        )
        self._thread.start()

    def ask(
        self, method: str, message: Mapping[str, Any], seconds: float
    ) -> dict[str, Any]:
        """Returns the job's answer; for any thread but the job's own."""
        self.job.board.check()
        request = Request(method, message)
        self._requests.put(request)
        try:
            return request.answer.result(timeout=seconds)
        except concurrent.futures.TimeoutError:
            self.job.board.check()
            if method == "join":  # which would join twice
                request.answer.cancel()
            raise Busy(
                f"job {self.job.spec.job!r} is busy, and gave no answer to {method} "
                f"within {seconds:g} s; try again"
            ) from None

    def stop(self, reason: str, seconds: float) -> None:
        """Ends the thread after what it is doing; later requests get the reason."""
        self.job.board.fail(reason)
        self._requests.put(None)
        self._thread.join(seconds)

    def fail(self, reason: str, remedy: str = "") -> None:
        """Tells all who ask, now and later, why the job has stopped.

        Args:
          remedy: what the user must do before the service is started again.
        """
        then = f"{remedy}, then start" if remedy else "Restart"
        again = " again" if remedy else ""
        self.job.board.fail(
            f"job {self.job.spec.job!r} has stopped: {reason}. {then} the service"
            f"{again}: it continues from the checkpoint of version "
            f"{max(self.job.saved, 0)}."
        )

    def _run(self) -> None:
        pending: list[Request] = []
        try:
            restoring.start(self.job)
            watched, cleaner = Watched(self.job), Cleaner(self.job)
            moving = Moving(self.job)
            while True:
                self.status = watched.status()
                taken = self._take(0.0 if moving.is_busy else POLL_SECONDS)
                pending = [request for request in taken if request is not None]
                try:
                    cycle(self.job, cleaner, pending)
                    moving.step()
                except BlocksLost as error:
                    restoring.restart(self.job, error)
                    self._refuse(pending, f"{error}; try again")
                if len(pending) < len(taken):
                    return
        except Exception as error:
            if not isinstance(error, EXPECTED):
                _LOG.exception("job %r has stopped", self.job.spec.job)
            remedy = disk.remedy_of(error)
            files = self.job.around.log.name, self.job.files.folder
            reason = disk.describe(error, *files)
            self.fail(reason, remedy or "")
            self.status = {**self.status, "state": "failed", "reason": reason}
            failure = self.job.board.failure or ""
            self._on_failure(self.job.spec.job, failure, remedy is not None)
        finally:
            reason = self.job.board.failure or "the service has stopped"
            pending.extend(x for x in self._waiting() if x is not None)
            self._refuse(pending, reason)

    def _take(self, seconds: float) -> list[Request | None]:
        """Waits so long for a request at most; returns all that are there."""
        deadline = self.job.engine.deadline
        if deadline is not None:
            seconds = min(seconds, max(0.0, deadline - self.job.now()))
        try:
            first = self._requests.get(timeout=seconds)
        except queue.Empty:
            return []
        return [first, *self._waiting()]

    def _waiting(self) -> list[Request | None]:
        """Takes all requests that are there already."""
        taken: list[Request | None] = []
        while True:
            try:
                taken.append(self._requests.get_nowait())
            except queue.Empty:
                return taken

    def _refuse(self, pending: list[Request], reason: str) -> None:
        """Answers what will no longer be done."""
        for request in pending:
            if not request.answer.done():
                request.answer.set_exception(Unavailable(reason))
