"""The processes that train one model together, and which of them this is.

A `Group` is passed to whoever needs to know; nothing below it asks jax. Groups with
different names can train in one process, or in one job, at the same time: their keys
and barriers never meet.
"""

import contextlib
import itertools
import json
import time
from collections.abc import Callable, Iterator
from typing import Any

from ...launch.exit_codes import Unreachable
from ..record import failures
from ..record.failures import CorruptCheckpoint, Unreadable
from .fault_points import Hold, Point, Traps
from .store import JaxStore, Missing, Store

# How long processes wait for each other where what they do in between is short.
WAIT_SECONDS = 600.0
# How long process 0 may take to read and judge all reports.
ANSWER_SECONDS = 60.0

Report = dict[str, Any]

_UNNAMED = itertools.count()

# Ways to fail, in order of precedence: what is wrong for everybody comes first.
FIX, CORRUPT, UNREADABLE, OTHER = "fix", "corrupt", "unreadable", "other"
ERRORS = {FIX: ValueError, CORRUPT: CorruptCheckpoint, UNREADABLE: Unreadable}


class Group:
    """The processes of a training.

    Every process must call the methods that wait, in the same order.

    Attributes:
      met_at: this host's clock when the processes last met; 0 if they never have.

    Args:
      index: this process, from 0.
      size: how many there are.
      store: reached by all of them; only a group of one needs none.
      name: of the training, unique among those that share a store.
      hosts: the host of each process, for messages; may be empty.
      hold: where a drill holds this process; None outside of drills.
    """

    def __init__(
        self,
        index: int = 0,
        size: int = 1,
        store: Store | None = None,
        *,
        name: str = "run",
        hosts: tuple[str, ...] = (),
        hold: Hold | Traps | None = None,
    ):
        if not 0 <= index < size:
            raise ValueError(f"process {index} is not one of {size}, counted from 0")
        if size > 1 and store is None:
            raise ValueError(f"a group of {size} processes needs a store to share")
        self.index, self.size, self.name, self._hosts = index, size, name, hosts
        self._store, self._hold = store, hold
        self.met_at = 0.0
        self._barriers, self._questions = itertools.count(), itertools.count()

    @classmethod
    def of_jax(cls, name: str | None = None) -> "Group":
        """Returns the group of all processes that jax knows.

        Args:
          name: needed if trainings run at the same time. One after the other, they get
            names of their own, the same in every process.
        """
        import jax

        name = name or f"run-{next(_UNNAMED)}"

        size = jax.process_count()
        store = JaxStore() if size > 1 else None
        return cls(jax.process_index(), size, store, name=name)

    def named(self, name: str) -> "Group":
        """Returns the same processes as a group of their own keys and barriers.

        Its methods may be called by another thread than those of this group.
        """
        hosts, hold = self._hosts, self._hold
        return Group(
            self.index, self.size, self._store, name=name, hosts=hosts, hold=hold
        )

    @property
    def is_first(self) -> bool:
        """Whether this process writes and prints for all."""
        return self.index == 0

    @property
    def store(self) -> Store:
        assert self._store is not None, "a group of one process has no store"
        return self._store

    def key(self, what: str) -> str:
        """Returns the key of something in the store that belongs to this group."""
        return f"meshloom/{self.name}/{what}"

    def describe(self, process: int) -> str:
        """Names a process, with its host if known."""
        host = f" on {self._hosts[process]}" if self._hosts else ""
        return f"process {process}{host}"

    def reached(self, point: Point, step: int) -> None:
        """Waits or fails here if a drill has asked for it."""
        if self._hold is not None:
            self._hold.reached(point, step, self.index)

    def wait(self, where: str, seconds: float = WAIT_SECONDS) -> None:
        """Waits for every process; raises Unreachable naming those that are missing."""
        if self.size == 1:
            return
        try:
            self.store.barrier(self.key(f"{next(self._barriers)} {where}"), seconds)
            self.met_at = time.time()
        except Missing as error:
            names = ", ".join(map(self.describe, error.processes))
            raise Unreachable(
                f"waited {seconds:g} s for every process of this job at {where!r}, but "
                f"{names or 'some process'} did not arrive. Look at its log."
            ) from error

    def consult(
        self,
        what: str,
        report: Report,
        judge: Callable[[list[Report]], Report],
        seconds: float = WAIT_SECONDS,
    ) -> Report:
        """Returns what process 0 makes of the reports of all processes.

        Reports travel as JSON through the store, not through devices: processes can
        talk even if their devices or programs differ.

        Args:
          judge: called in process 0 with the reports in order of process.
        """
        if self.size == 1:
            return judge([report])
        key = self.key(f"{next(self._questions)} {what}")
        self.store.set(f"{key}/{self.index}", json.dumps(report))
        self.wait(what, seconds)
        if self.is_first:
            reports = []
            for process in range(self.size):
                reports.append(json.loads(self._answer(f"{key}/{process}")))
                self.store.delete(f"{key}/{process}")
            self.store.set(f"{key}/answer", json.dumps(judge(reports)))
        return json.loads(self._answer(f"{key}/answer"))

    def _answer(self, key: str) -> str:
        value = self.store.wait(key, ANSWER_SECONDS)
        if value is None:
            raise Unreachable(f"no answer at {key!r} within {ANSWER_SECONDS:g} s")
        return value

    def exchange(
        self,
        what: str,
        work: Callable[[], Report],
        judge: Callable[[list[Report]], Report],
        seconds: float = WAIT_SECONDS,
    ) -> Report:
        """Consults about the results of `work`, which succeeds everywhere or nowhere.

        A process that gives up alone leaves the others waiting in their next
        collective. If processes fail in different ways, all raise the first of these
        that any of them met: what the user must fix (ValueError), CorruptCheckpoint,
        Unreadable. Anything else is raised where it happened, and the others raise
        Unreachable.

        Args:
          work: returns the report of this process. It must not run a collective.
          judge: called in process 0 if `work` succeeded in every process.
        """
        error, result = None, {}
        try:
            result = work()
        except Exception as raised:
            error = raised
        kind = _kind(error)

        def first_failure_or_answer(reports: list[Report]) -> Report:
            worst = _worst(reports)
            if worst is not None:
                return {"failure": worst}
            return {"answer": judge([report["result"] for report in reports])}

        report = {"kind": kind, "reason": str(error or ""), "result": result}
        answer = self.consult(what, report, first_failure_or_answer, seconds)
        failure = answer.get("failure")
        if failure is None:
            return answer["answer"]
        if error is not None and failure["kind"] in (kind, OTHER):
            raise error
        raise ERRORS.get(failure["kind"], Unreachable)(
            f"{self.describe(failure['process'])} failed, and every other process of "
            f"this job with it: {failure['reason']}"
        )

    @contextlib.contextmanager
    def all_or_none(
        self, what: str = "ready", seconds: float = WAIT_SECONDS
    ) -> Iterator[None]:
        """Makes a block succeed in every process, or fail alike; see `exchange`."""
        error = None
        try:
            yield
        except Exception as raised:
            error = raised

        def work() -> Report:
            if error is not None:
                raise error
            return {}

        self.exchange(what, work, lambda _: {}, seconds)


def _kind(error: Exception | None) -> str:
    if error is None:
        return ""
    if isinstance(error, CorruptCheckpoint):
        return CORRUPT
    if failures.is_user_error(error):
        return FIX
    return UNREADABLE if isinstance(error, Unreadable) else OTHER


def _worst(reports: list[Report]) -> Report | None:
    """Returns the failure that takes precedence, if any process failed."""
    for kind in (FIX, CORRUPT, UNREADABLE, OTHER):
        for process, report in enumerate(reports):
            if report["kind"] == kind:
                reason = report["reason"]
                return {"kind": kind, "reason": reason, "process": process}
    return None
