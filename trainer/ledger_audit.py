"""`meshloom ledger audit`: proof that each sample went into exactly one update.

Nothing but the ledger is read. Which samples a batch holds is computed again from the
order of the data, and must be what the devices saw.
"""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..sharding.text import align
from . import digest
from .ledger import Ledger
from .order import Order

Row = Mapping[str, Any]
# Digests of so many batches are computed at once.
CHUNK = 1024


@dataclasses.dataclass(frozen=True)
class Applied:
    """A step of the surviving history."""

    step: int
    batch: int
    samples: str
    skipped: bool
    batch_size: int
    order: Order

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
      passed_over: [from, to) in examples, by rewinding.
      events: how many there are of each kind.
      faults: what is wrong; [] if nothing.
    """

    history: list[Applied]
    repeated: int
    passed_over: list[tuple[int, int]]
    events: dict[str, int]
    faults: list[str]

    def __str__(self) -> str:
        done = [step for step in self.history if not step.skipped]
        events = (f"{n} {kind}" for kind, n in sorted(self.events.items()))
        rows = [
            ("steps in the history", f"{len(self.history):,}"),
            ("samples in an update", f"{sum(s.batch_size for s in done):,}"),
            ("steps left out", f"{len(self.history) - len(done):,}"),
            (
                "samples passed over",
                f"{sum(stop - start for start, stop in self.passed_over):,}",
            ),
            ("steps done again", f"{self.repeated:,}"),
            ("events", ", ".join(events)),
        ]
        verdict = "each sample contributed to exactly one update, or is named above"
        if self.faults:
            verdict = "FAILED\n" + "\n".join(f"  {fault}" for fault in self.faults)
        return f"{align(rows)}\naudit: {verdict}"


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
    passed_over: dict[int, tuple[int, int]] = {}  # by the step they came after
    size, order, started = 0, Order(1), False
    for row in rows:
        kind = row["event"]
        if kind != "step":
            found.events[kind] = found.events.get(kind, 0) + 1
        if kind == "start":
            size, order = row["batch_size"], Order(row["num_examples"], row["seed"])
            started = True
        elif kind == "restore":
            started = False
            _drop_after(row["step"], history, passed_over, found)
        elif kind == "rewind":
            first, stop = row["skipped_batches"]
            passed_over[row["step"]] = first * size, stop * size
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
            history[step] = Applied(
                step, row["batch"], row["samples"], skipped, size, order
            )
    found.history = [history[step] for step in sorted(history)]
    found.passed_over = [passed_over[step] for step in sorted(passed_over)]
    found.faults += _gaps(found.history)
    found.faults += _overlaps(found)
    found.faults += _strangers(found.history)
    return found


def _drop_after(step: int, history: dict, passed_over: dict, found: Audit) -> None:
    for later in [s for s in history if s > step]:
        del history[later]
        found.repeated += 1
    # What was passed over by going back to a checkpoint is not yet known to it.
    for later in [s for s in passed_over if s >= step]:
        del passed_over[later]


def _gaps(history: Sequence[Applied]) -> list[str]:
    expected = range(1, len(history) + 1)
    wrong = (s.step for s, n in zip(history, expected, strict=True) if s.step != n)
    first = next(wrong, None)
    if first is None:
        return []
    return [f"the history has {len(history)} steps, but misses one before {first}"]


def _overlaps(found: Audit) -> list[str]:
    """Every example of the order is used once, or passed over by name."""
    parts = [(*step.examples, f"step {step.step}") for step in found.history]
    parts += [(start, stop, "a rewind") for start, stop in found.passed_over]
    faults, end = [], 0
    for start, stop, who in sorted(parts):
        if start < end:
            faults.append(f"{who} begins at example {start}, used already up to {end}")
        elif start > end:
            faults.append(f"examples {end} to {start - 1} are in no step before {who}")
        end = max(end, stop)
    return faults


def _strangers(history: Sequence[Applied]) -> list[str]:
    """Steps whose samples are not those of their batch."""
    faults = []
    for begin in range(0, len(history), CHUNK):
        part = history[begin : begin + CHUNK]
        for size in {step.batch_size for step in part}:
            same = [step for step in part if step.batch_size == size]
            ids = [s.order.index(np.arange(*s.examples))[1] for s in same]
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
