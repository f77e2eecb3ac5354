"""The ledger of a run: which samples went into which update, and all that happened.

`ledger.jsonl` is only ever appended to, by one process. A line for each step,

    {"event": "step", "step": 7, "batch": 6, "samples": "5c0e1d..."}

with the number of its batch in the order of the data and a digest of the samples that
the update was computed from, taken on the devices; `skipped` where the update was left
out. Every other event has a `time`. After a `restore` to step s, the steps after s that
stand before it have no part in the state any more: they are done again.
"""

import contextlib
import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from ..program import digest
from ..program.step import SAMPLE_DIGEST
from . import metrics

FILE = "ledger.jsonl"


class Ledger:
    """Appends to the ledger of a run folder; only the writer of a job does.

    Events may come from any thread.
    """

    def __init__(
        self,
        folder: Path,
        *,
        is_writer: bool = True,
        clock: Callable[[], float] = time.time,
    ):
        self.path = Path(folder) / FILE
        self._is_writer, self._clock = is_writer, clock
        self._lock = threading.Lock()
        self._held: list[dict[str, Any]] | None = None
        if is_writer:
            _drop_torn_end(self.path)

    def event(self, kind: str, **fields: Any) -> None:
        row = {"event": kind, "time": round(self._clock(), 3), **fields}
        if self._held is not None:
            self._held.append(row)
        else:
            self._append([row])

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Keeps events back until the block ends, and drops them where it fails."""
        self._held = []
        try:
            yield
            self._append(self._held)
        finally:
            self._held = None

    def event_now(self, kind: str, **fields: Any) -> None:
        """An event that stays, also where the attempt that notes it fails."""
        held, self._held = self._held, None
        self.event(kind, **fields)
        self._held = held

    def steps(self, rows: Sequence[dict[str, Any]], batches_ahead: int) -> None:
        """Notes steps, and takes the digests of their samples out of the rows.

        Args:
          batches_ahead: batches that were passed over, by rewinding, before these.
        """
        found = []
        for row in rows:
            step = int(row["step"])
            lanes = [row.pop(name) for name in SAMPLE_DIGEST]
            line = {"event": "step", "step": step, "batch": step - 1 + batches_ahead}
            line["samples"] = digest.hexadecimal(lanes)
            found.append(line | ({"skipped": True} if row["skipped"] else {}))
        self._append(found)

    def read(self) -> list[dict[str, Any]]:
        return metrics.read(self.path) if self.path.exists() else []

    def _append(self, rows: Sequence[dict[str, Any]]) -> None:
        if self._is_writer:
            text = "".join(json.dumps(row) + "\n" for row in rows)
            with self._lock, open(self.path, "a", encoding="utf-8") as file:
                file.write(text)


def _drop_torn_end(path: Path) -> None:
    """Cuts off what follows the last newline: half a line of a killed process."""
    if not path.exists():
        return
    content = path.read_bytes()
    whole = content.rfind(b"\n") + 1
    if whole < len(content):
        os.truncate(path, whole)
