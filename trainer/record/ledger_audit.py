"""`meshloom ledger audit`: proof that each sample went into exactly one update.

Nothing but the ledger is read. Which samples a batch holds is computed again from the
order of the data, and must be what the devices saw; and no sample of the same data, by
its digest, may be in two updates of one epoch. Where the data was changed on purpose,
that is proved for each part of the history that had the same data.
"""

import dataclasses
import itertools
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ...sharding.text import align
from ..data.shuffle import Order
from ..program import digest
from .ledger import Ledger

Row = Mapping[str, Any]
# Digests of so many batches are computed at once.
CHUNK = 1024


@dataclasses.dataclass(frozen=True)
class Attempt:
    """What a start of the run says.

    Attributes:
      data: digest of the contents of the train split; None in ledgers of old.
    """

    batch_size: int
    order: Order
    data: str | None

    @property
    def dataset(self) -> tuple[str | None, int]:
        """What two starts with the same samples have in common."""
        return self.data, self.order.num_examples

    def words(self) -> str:
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
        """The first number in the order of the data, and the one after the last."""
        return self.batch * self.batch_size, (self.batch + 1) * self.batch_size


@dataclasses.dataclass
class Audit:
    """What a ledger says.

    Attributes:
      history: the steps that the newest state is made of.
      repeated: steps that were done, lost, and done again or not.
      passed_over: [from, to) in examples, by rewinding, and of which attempt.
      events: how many there are of each kind.
      faults: what is wrong; [] if nothing.
    """

    history: list[Applied]
    repeated: int
    passed_over: list[tuple[int, int, Attempt]]
    events: dict[str, int]
    faults: list[str]

    @property
    def parts(self) -> list[tuple[int, int, Attempt]]:
        """(first step, last step, attempt) of stretches on the same data."""
        found: list[tuple[int, int, Attempt]] = []
        for step in self.history:
            if found and found[-1][2].dataset == step.attempt.dataset:
                found[-1] = (found[-1][0], step.step, found[-1][2])
            else:
                found.append((step.step, step.step, step.attempt))
        return found

    def verdict(self) -> str:
        if self.faults:
            return "FAILED\n" + "\n".join(f"  {fault}" for fault in self.faults)
        proved = "each sample contributed to exactly one update"
        if len(self.parts) < 2:
            return f"{proved} of its epoch, or is named above"
        lines = [
            f"  steps {first} to {last}, {attempt.words()}: {proved} of its epoch, or "
            "is named above"
            for first, last, attempt in self.parts
        ]
        return "\n".join(
            [
                "the data was changed on purpose, so this is proved for each part:",
                *lines,
                "  Whether a sample of one part is also in another cannot be told.",
            ]
        )

    def __str__(self) -> str:
        done = [step for step in self.history if not step.skipped]
        events = (f"{n} {kind}" for kind, n in sorted(self.events.items()))
        rows = [
            ("steps in the history", f"{len(self.history):,}"),
            ("samples in an update", f"{sum(s.batch_size for s in done):,}"),
            ("steps left out", f"{len(self.history) - len(done):,}"),
            (
                "samples passed over",
                f"{sum(stop - start for start, stop, _ in self.passed_over):,}",
            ),
            ("steps done again", f"{self.repeated:,}"),
            ("events", ", ".join(events)),
        ]
        return f"{align(rows)}\naudit: {self.verdict()}"


def audit(folder: Path) -> Audit:
    ledger = Ledger(folder, is_writer=False)
    rows = ledger.read()
    if not any(row["event"] == "start" for row in rows):
        raise ValueError(
            f"{ledger.path}: no run has started in it. Name the folder of a run."
        )
    return examine(rows)


def examine(rows: Iterable[Row]) -> Audit:
    """Plays the ledger back, and checks what is left."""
    history: dict[int, Applied] = {}
    found = Audit([], 0, [], {}, [])
    # By the step they came after.
    passed_over: dict[int, tuple[int, int, Attempt]] = {}
    attempt, started = Attempt(0, Order(1), None), False
    announced: set[str] = set()  # digests of data that somebody insisted on
    for row in rows:
        kind = row["event"]
        if kind != "step":
            found.events[kind] = found.events.get(kind, 0) + 1
        if kind == "data_changed":
            announced.add(row["digest"][1])
        elif kind == "start":
            attempt, started = _attempt(row), True
        elif kind == "restore":
            started = False
            _drop_after(row["step"], history, passed_over, found)
        elif kind == "rewind":
            first, stop = (n * attempt.batch_size for n in row["skipped_batches"])
            passed_over[row["step"]] = first, stop, attempt
        elif kind == "step":
            if started:  # no checkpoint was there: from nothing
                _drop_after(0, history, passed_over, found)
                started = False
            step = row["step"]
            if step in history:
                found.faults.append(
                    f"step {step} was done twice without a restore between"
                )
            skipped = row.get("skipped", False)
            samples = row["samples"]
            history[step] = Applied(step, row["batch"], samples, skipped, attempt)
    found.history = [history[step] for step in sorted(history)]
    found.passed_over = [passed_over[step] for step in sorted(passed_over)]
    found.faults += _unannounced(found, announced)
    found.faults += _gaps(found.history)
    found.faults += _missing(found)
    found.faults += _repeated(found)
    found.faults += _strangers(found.history)
    return found


def _attempt(row: Row) -> Attempt:
    order = Order(row["num_examples"], row["seed"])
    return Attempt(row["batch_size"], order, row.get("data"))


def _drop_after(step: int, history: dict, passed_over: dict, found: Audit) -> None:
    for later in [s for s in history if s > step]:
        del history[later]
        found.repeated += 1
    # What was passed over by going back to a checkpoint is not yet known to it.
    for later in [s for s in passed_over if s >= step]:
        del passed_over[later]


def _unannounced(found: Audit, announced: set[str]) -> list[str]:
    """Other data that the ledger has no event of."""
    faults = []
    for (_, last, before), (_, _, now) in itertools.pairwise(found.parts):
        if now.data is None or before.data in (None, now.data):
            continue  # nothing is known, or the same files in other examples
        if now.data[:16] not in announced:
            faults.append(
                f"after step {last} {before.words()} became {now.words()} without an "
                "event"
            )
    return faults


def _gaps(history: Sequence[Applied]) -> list[str]:
    expected = range(1, len(history) + 1)
    wrong = (s.step for s, n in zip(history, expected, strict=True) if s.step != n)
    first = next(wrong, None)
    if first is None:
        return []
    return [f"the history has {len(history)} steps, but misses one before {first}"]


def _uses(found: Audit) -> list[tuple[int, int, str, Attempt]]:
    """Each step, and each rewind, with the examples of the order that it took."""
    uses = [(*s.examples, f"step {s.step}", s.attempt) for s in found.history]
    uses += [(first, stop, "a rewind", a) for first, stop, a in found.passed_over]
    return sorted(uses, key=lambda use: use[:3])


def _missing(found: Audit) -> list[str]:
    """Examples of the order that were neither used nor passed over by name."""
    faults, end = [], 0
    for first, stop, who, _ in _uses(found):
        if first > end:
            faults.append(f"examples {end} to {first - 1} are in no step before {who}")
        end = max(end, stop)
    return faults


def _repeated(found: Audit) -> list[str]:
    """Samples of the same data that were used twice in one epoch."""
    faults = []
    # By data and epoch, the use of each sample, counted from 1.
    seen: dict[tuple[tuple[str | None, int], int], np.ndarray] = {}
    uses = _uses(found)
    for number, (first, stop, who, attempt) in enumerate(uses, start=1):
        epochs, ids = attempt.order.index(np.arange(first, stop))
        for epoch in range(int(epochs[0]), int(epochs[-1]) + 1):
            key = attempt.dataset, epoch
            if key not in seen:
                # Epochs follow one another: two at a time are enough.
                for old in [k for k in seen if k[1] < epoch - 1]:
                    del seen[old]
                seen[key] = np.zeros(attempt.order.num_examples, np.int32)
            mine = ids[epochs == epoch]
            earlier = seen[key][mine]
            if again := int(np.count_nonzero(earlier)):
                sample = int(mine[np.argmax(earlier > 0)])
                by = uses[int(seen[key][sample]) - 1][2]
                faults.append(
                    f"{who} has {again} samples that epoch {epoch} has used already, "
                    f"first sample {sample}, of {by}"
                )
            seen[key][mine] = number
    return faults


def _strangers(history: Sequence[Applied]) -> list[str]:
    """Steps whose samples are not those of their batch."""
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
                        f"those of batch {step.batch} {expected}"
                    )
    return faults


@jax.jit
def _digests(ids: jax.Array) -> jax.Array:
    return jax.vmap(digest.array_digest)(jnp.asarray(ids))
