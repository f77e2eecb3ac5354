"""Publishes weights while a run goes on, and measures how old new data is by then."""

import dataclasses
import math
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax

from ...sharding.text import counted
from ..job.group import Group
from ..program.state import State
from ..record import published
from ..record.ledger import Ledger
from ..record.published import Published
from .hooks import Save

if TYPE_CHECKING:
    from .train import Config


@dataclasses.dataclass
class Arrival:
    """New data that a run has picked up.

    Attributes:
      files: how many.
      time: when the first of them came, by the clock of the file system.
      first_step: the first update with one of its examples.
    """

    files: int
    time: float
    first_step: int
    is_trained_on: bool = False
    is_published: bool = False


class Publisher:
    """Moves the pointer to the newest committed checkpoint; see record/published.py.

    Args:
      where: the folder of the checkpoints.
    """

    def __init__(
        self,
        ledger: Ledger,
        group: Group,
        where: Any,
        log: Callable[[str], None],
        clock: Callable[[], float] = time.time,
    ):
        self._ledger, self._group, self._where = ledger, group, where
        self._log, self._clock = log, clock
        self._arrivals: list[Arrival] = []
        self._lock = threading.Lock()

    def arrived(self, arrival: Arrival) -> None:
        with self._lock:
            self._arrivals.append(arrival)

    def event(self, kind: str, **facts: Any) -> None:
        """Records an event of the checkpoints, and publishes a step once committed."""
        self._ledger.event(kind, **facts)
        if kind == "loss_unknown":
            step, reason = facts["step"], facts["reason"]
            self._log(f"keep_best does not rank step {step}: {reason}")
        if kind != "commit" or not self._group.is_first:
            return
        step, now = facts["step"], self._clock()
        where = f"{self._where}/{step}"
        published.write(self._ledger.path.parent, Published(step, where, now))
        for arrival in self._due(step, "is_published"):
            self._record("published", step, now, arrival)

    def started(self, step: int, metrics: dict[str, jax.Array]) -> None:
        """Measures the first update with new data: waits for it, once per arrival."""
        for arrival in self._due(step, "is_trained_on"):
            jax.block_until_ready(metrics["loss"])
            self._record("first_update", step, self._clock(), arrival)

    def _due(self, step: int, mark: str) -> list[Arrival]:
        with self._lock:
            due = [
                each
                for each in self._arrivals
                if each.first_step <= step and not getattr(each, mark)
            ]
            for each in due:
                setattr(each, mark, True)
            self._arrivals = [x for x in self._arrivals if not x.is_published]
            return due

    def _record(self, kind: str, step: int, now: float, arrival: Arrival) -> None:
        seconds = round(now - arrival.time, 3)
        self._ledger.event(kind, step=step, files=arrival.files, seconds=seconds)
        what = {"first_update": "first update with", "published": "published with"}
        self._log(
            f"step {step}  {what[kind]} {counted(arrival.files, 'new file')}, "
            f"{seconds:.2f} s after the first came"
        )


class Publish:
    """A hook that saves, and so publishes, every so many steps or seconds.

    Args:
      every_seconds: by the clock of process 0, looked at every `look_every` steps; 0
        for by steps alone.
    """

    def __init__(
        self,
        save: Save,
        group: Group,
        *,
        every_steps: int,
        every_seconds: float,
        look_every: int,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._save, self._group, self._clock = save, group, clock
        self._steps, self._seconds = every_steps, every_seconds
        self._look_every, self._last = look_every, clock()
        looks = look_every if every_seconds else 0
        self.every = math.gcd(every_steps, looks)

    @classmethod
    def of(cls, config: "Config", save: Save, group: Group) -> "Publish":
        return cls(
            save,
            group,
            every_steps=config.publish_every,
            every_seconds=config.publish_seconds,
            look_every=config.log_every,
        )

    def __call__(self, step: int, state: State) -> None:
        if not self._is_due(step):
            return
        self._last = self._clock()
        if self._save.last_step != step:
            self._save(step, state)

    def _is_due(self, step: int) -> bool:
        if self._steps and step % self._steps == 0:
            return True
        if not self._seconds or step % self._look_every:
            return False
        late = self._clock() - self._last >= self._seconds
        return self._group.consult(
            "publish", {"is_due": late}, lambda reports: reports[0]
        )["is_due"]
