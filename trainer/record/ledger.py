"""The ledger of a run: which samples went into which update, and all other events.

`ledger.jsonl` is append-only and written by one process. Each step has a line,

    {"event": "step", "step": 7, "batch": 6, "samples": "5c0e1d..."}

with the number of its batch in the order of the data, and a digest, computed on the
devices, of the samples that went into the update; `skipped` marks an update that was
skipped. Every other event has a `time`. A `restore` to step s discards all earlier
lines of steps after s: they are no longer part of the state, and are repeated.
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
# The metric of a learner's step with the number of its block (data/leased.py), which is
# the number of its batch.
BLOCK = "block"


class Ledger:
    """Appends to the ledger of a run folder, if this process is the job's writer.

    Thread-safe.
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
        """Buffers events until the block ends, and drops them if it raises."""
        self._held = []
        try:
            yield
            self._append(self._held)
        finally:
            self._held = None

    def event_now(self, kind: str, **fields: Any) -> None:
        """Records an event that is kept even if the current `held` block raises."""
        held, self._held = self._held, None
        self.event(kind, **fields)
        self._held = held

    def steps(
        self,
        rows: Sequence[dict[str, Any]],
        batches_ahead: int,
    ) -> None:
        """Records steps, and removes the digests of their samples from the rows.

        Args:
          batches_ahead: batches that earlier rewinds have skipped.
        """
        lines = []
        for row in rows:
            step = int(row["step"])
            lanes = [row.pop(name) for name in SAMPLE_DIGEST]
            batch = int(row.pop(BLOCK, step - 1 + batches_ahead))
            line = {"event": "step", "step": step, "batch": batch}
            line["samples"] = digest.hexadecimal(lanes)
            lines.append(line | ({"skipped": True} if row["skipped"] else {}))
        self._append(lines)

    def read(self) -> list[dict[str, Any]]:
        return metrics.read(self.path) if self.path.exists() else []

    def _append(self, rows: Sequence[dict[str, Any]]) -> None:
        if self._is_writer:
            text = "".join(json.dumps(row) + "\n" for row in rows)
            with self._lock, open(self.path, "a", encoding="utf-8") as file:
                file.write(text)


def _drop_torn_end(path: Path) -> None:
    """Truncates the file after its last newline; a killed process may leave a rest."""
    if not path.exists():
        return
    content = path.read_bytes()
    end = content.rfind(b"\n") + 1
    if end < len(content):
        os.truncate(path, end)
