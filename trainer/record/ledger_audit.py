"""`meshloom ledger audit`: proves that each sample went into exactly one update.

Only the ledger is read. The samples of each batch are recomputed from the order of the
data and must match what the devices saw, and no sample of the same data (by digest) may
be in two updates of one epoch. If the data was changed on purpose, this is proved for
each part of the history that used the same data.

A learner's ledger alone cannot say which of its steps are in an update; that is for
trainer/verify/training_audit.py.
"""

import dataclasses
import itertools
from collections.abc import Iterable, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from ...sharding.text import align
from ..data.growth import GrownOrder, Part
from ..data.orders import AnyOrder, order_from
from ..data.shuffle import Order
from ..program import digest
from .ledger import Ledger
from .metrics import Row

CHUNK = 1024  # batches whose digests are computed at once


@dataclasses.dataclass(frozen=True)
class Attempt:
    """One start of the run.

    Attributes:
      data: digest of the contents of the train split; None in old ledgers.
      is_learner: whether it was one of several, with data that the service leased.
    """

    batch_size: int
    order: AnyOrder
    data: str | None
    is_learner: bool = False

    @property
    def dataset(self) -> tuple[str | None, int]:
        """Identifies the samples: equal for two starts with the same data.

        Data that has grown is that of its first part.
        """
        return self.data, self.parts[0].stop

    @property
    def parts(self) -> tuple[Part, ...]:
        size = self.order.num_examples
        return getattr(self.order, "parts", (Part(0, 0, size),))

    def grown(self, part: Sequence[int]) -> "Attempt":
        """Returns the attempt with another part of the data."""
        order = GrownOrder((*self.parts, Part(*part)), self.order.seed)
        return dataclasses.replace(self, order=order)

    def describe(self) -> str:
        digest = "of unknown digest" if self.data is None else self.data[:16]
        return f"data {digest} ({self.order.num_examples:,} examples)"


@dataclasses.dataclass(frozen=True)
class Applied:
    """A step of the surviving history."""

    step: int
    batch: int
    samples: str
    skipped: bool
    attempt: Attempt

    @property
    def batch_size(self) -> int:
        return self.attempt.batch_size

    @property
    def examples(self) -> tuple[int, int]:
        """The range [first, stop) of the batch's positions in the order of the data."""
        return self.batch * self.batch_size, (self.batch + 1) * self.batch_size


@dataclasses.dataclass
class Audit:
    """The result of an audit.

    Attributes:
      history: the steps that produced the newest state.
      repeated: number of steps that were discarded by a restore.
      passed_over: (first, stop, attempt) of the examples that each rewind skipped.
      events: number of events of each kind.
      faults: inconsistencies; [] if there are none.
      is_learner: whether the ledger is that of one of several learners.
    """

    history: list[Applied]
    repeated: int
    passed_over: list[tuple[int, int, Attempt]]
    events: dict[str, int]
    faults: list[str]
    is_learner: bool = False

    @property
    def parts(self) -> list[tuple[int, int, Attempt]]:
        """(first step, last step, attempt) of consecutive steps on the same data."""
        parts: list[tuple[int, int, Attempt]] = []
        for step in self.history:
            if parts and parts[-1][2].dataset == step.attempt.dataset:
                parts[-1] = (parts[-1][0], step.step, parts[-1][2])
            else:
                parts.append((step.step, step.step, step.attempt))
        return parts

    def verdict(self) -> str:
        if self.faults:
            return "FAILED\n" + "\n".join(f"  {fault}" for fault in self.faults)
        if self.is_learner:
            return (
                "each step read the samples of its block; which of them are in an "
                "update, the audit of the whole training says"
            )
        proved = "each sample contributed to exactly one update"
        if len(self.parts) < 2:
            return f"{proved} of its epoch, or is listed above"
        lines = [
            f"  steps {first} to {last}, {attempt.describe()}: {proved} of its epoch, "
            "or is listed above"
            for first, last, attempt in self.parts
        ]
        return "\n".join(
            [
                "the data was changed on purpose, so this is proved for each part:",
                *lines,
                "  Whether a sample of one part is also in another is unknown.",
            ]
        )

    def __str__(self) -> str:
        done = [step for step in self.history if not step.skipped]
        events = (f"{n} {kind}" for kind, n in sorted(self.events.items()))
        rows = [
            ("steps in the history", f"{len(self.history):,}"),
            (
                "samples computed on" if self.is_learner else "samples in an update",
                f"{sum(s.batch_size for s in done):,}",
            ),
            ("steps skipped", f"{len(self.history) - len(done):,}"),
            (
                "samples skipped by rewinds",
                f"{sum(stop - start for start, stop, _ in self.passed_over):,}",
            ),
            ("steps repeated", f"{self.repeated:,}"),
            ("events", ", ".join(events)),
        ]
        return f"{align(rows)}\naudit: {self.verdict()}"


def audit(folder: Path) -> Audit:
    ledger = Ledger(folder, is_writer=False)
    rows = ledger.read()
    if not any(row["event"] == "start" for row in rows):
        raise ValueError(
            f"{ledger.path} records no start of a run. Name the folder of a run."
        )
    return examine(rows)


def examine(rows: Iterable[Row]) -> Audit:
    """Replays the ledger, and checks the resulting history."""
    history: dict[int, Applied] = {}
    found = Audit([], 0, [], {}, [])
    # By the step before the rewind.
    passed_over: dict[int, tuple[int, int, Attempt]] = {}
    attempt, started = Attempt(0, Order(1), None), False
    announced: set[str] = set()  # digests of data that the user has accepted
    for row in rows:
        kind = row["event"]
        if kind != "step":
            found.events[kind] = found.events.get(kind, 0) + 1
        if kind == "data_changed":
            announced.add(row["digest"][1])
        elif kind == "start":
            before, attempt, started = attempt, _attempt(row), True
            if attempt.dataset == before.dataset:
                found.faults += _changed_parts(before, attempt)
        elif kind == "grown":
            attempt = attempt.grown(row["part"])
        elif kind in ("restore", "joined"):
            started = False
            _drop_after(row["step"], history, passed_over, found)
        elif kind == "rewind":
            first, stop = (n * attempt.batch_size for n in row["skipped_batches"])
            passed_over[row["step"]] = first, stop, attempt
        elif kind == "step":
            if started:  # there was no checkpoint, so it started from scratch
                _drop_after(0, history, passed_over, found)
                started = False
            step = row["step"]
            if step in history:
                found.faults.append(
                    f"step {step} is recorded twice without a restore in between"
                )
            skipped = row.get("skipped", False)
            samples = row["samples"]
            history[step] = Applied(step, row["batch"], samples, skipped, attempt)
    found.history = [history[step] for step in sorted(history)]
    found.passed_over = [passed_over[step] for step in sorted(passed_over)]
    found.faults += _unannounced(found, announced)
    found.is_learner = attempt.is_learner
    if not attempt.is_learner:
        found.faults += _gaps(found.history)
        found.faults += _missing(found)
        found.faults += _repeated(found)
    found.faults += wrong_samples(found.history)
    return found


def _attempt(row: Row) -> Attempt:
    order = order_of_start(row)
    return Attempt(row["batch_size"], order, row.get("data"), "learner" in row)


def order_of_start(row: Row) -> AnyOrder:
    """Returns the order of the data that a start of a run was recorded with."""
    return order_from(row["num_examples"], row["seed"], row)


def _drop_after(step: int, history: dict, passed_over: dict, found: Audit) -> None:
    for later in [s for s in history if s > step]:
        del history[later]
        found.repeated += 1
    # A checkpoint does not contain the rewind that went back to it.
    for later in [s for s in passed_over if s >= step]:
        del passed_over[later]


def _unannounced(found: Audit, announced: set[str]) -> list[str]:
    """Returns changes of the data that the ledger has no event for."""
    faults = []
    for (_, last, before), (_, _, now) in itertools.pairwise(found.parts):
        if now.data is None or before.data in (None, now.data):
            continue  # unknown, or the same files packed into other examples
        if now.data[:16] not in announced:
            faults.append(
                f"after step {last} {before.describe()} became {now.describe()} "
                "without an event"
            )
    return faults


def _changed_parts(before: Attempt, now: Attempt) -> list[str]:
    """Returns parts of data that has grown, if they are not what they were."""
    if now.parts[: len(before.parts)] == before.parts:
        return []
    sizes = (", ".join(str(len(part)) for part in x.parts) for x in (before, now))
    return ["the data had parts of {} examples, and later of {}".format(*sizes)]


def _gaps(history: Sequence[Applied]) -> list[str]:
    expected = range(1, len(history) + 1)
    wrong = (s.step for s, n in zip(history, expected, strict=True) if s.step != n)
    first = next(wrong, None)
    if first is None:
        return []
    return [f"the history has {len(history)} steps, but one before {first} is missing"]


def _uses(found: Audit) -> list[tuple[int, int, str, Attempt]]:
    """Returns (first, stop, name, attempt) of the examples of each step and rewind."""
    uses = [(*s.examples, f"step {s.step}", s.attempt) for s in found.history]
    uses += [(first, stop, "a rewind", a) for first, stop, a in found.passed_over]
    return sorted(uses, key=lambda use: use[:3])


def _missing(found: Audit) -> list[str]:
    """Returns examples of the order that were neither used nor skipped by a rewind."""
    faults, end = [], 0
    for first, stop, who, _ in _uses(found):
        if first > end:
            faults.append(f"examples {end} to {first - 1} are in no step before {who}")
        end = max(end, stop)
    return faults


def _repeated(found: Audit) -> list[str]:
    """Returns samples of the same data that were used twice in one epoch."""
    faults = []
    # By data: the epoch and the number, from 1, of the use of each sample, for its last
    # even and its last odd epoch. Uses are sorted, so earlier ones are not needed.
    seen: dict[tuple[str | None, int], np.ndarray] = {}
    uses = _uses(found)
    for number, (first, stop, who, attempt) in enumerate(uses, start=1):
        epochs, ids = attempt.order.index(np.arange(first, stop))
        known = _grown(seen.get(attempt.dataset), attempt.order.num_examples)
        seen[attempt.dataset] = known
        for epoch in np.unique(epochs).tolist():
            in_epoch, used_by = known[epoch % 2]
            mine = ids[epochs == epoch]
            earlier = np.where(in_epoch[mine] == epoch, used_by[mine], 0)
            if again := int(np.count_nonzero(earlier)):
                place = int(np.argmax(earlier > 0))
                faults.append(
                    f"{who} has {again} samples that epoch {epoch} has already used, "
                    f"the first is sample {mine[place]}, used by "
                    f"{uses[int(earlier[place]) - 1][2]}"
                )
            in_epoch[mine], used_by[mine] = epoch, number
    return faults


def _grown(known: np.ndarray | None, size: int) -> np.ndarray:
    """Returns the same array with room for more samples if it has too few."""
    if known is None:
        return np.zeros((2, 2, size), np.int32)
    if (missing := size - known.shape[-1]) <= 0:
        return known
    return np.pad(known, ((0, 0), (0, 0), (0, missing)))


def wrong_samples(history: Sequence[Applied]) -> list[str]:
    """Returns steps whose samples are not those of their batch."""
    faults = []
    for begin in range(0, len(history), CHUNK):
        part = history[begin : begin + CHUNK]
        for size in {step.batch_size for step in part}:
            same = [step for step in part if step.batch_size == size]
            ids = [s.attempt.order.index(np.arange(*s.examples))[1] for s in same]
            lanes = jax.device_get(_digests(np.array(ids, np.uint32)))
            for step, expected in zip(
                same, map(digest.hexadecimal, lanes), strict=True
            ):
                if step.samples != expected:
                    faults.append(
                        f"step {step.step}: its samples have digest {step.samples}, "
                        f"but those of batch {step.batch} have {expected}"
                    )
    return faults


@jax.jit
def _digests(ids: jax.Array) -> jax.Array:
    return jax.vmap(digest.array_digest)(jnp.asarray(ids))
