"""Packs documents into examples of a fixed length, with random access.

The stream of a split is its documents in order, each followed by the end token.
Example i covers the tokens [i * length, i * length + length + 1) of the stream, so
every token except the first is a target exactly once. The last, incomplete window is
dropped.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

# read(document, start, stop) returns the tokens [start, stop) of one document.
Read = Callable[[int, int, int], np.ndarray]


class PackedDataset:
    """Language-model examples from a list of documents; see the module docstring.

    Args:
      lengths: tokens of each document, without the end token.
      num_bytes: size of the text that became these tokens.
      separate_documents: add `segments` and `positions`. As an input, the end token
        starts the next document: it has position 0 of that segment, so the first token
        of a document is predicted without attending to the previous one.
      what: prefix of error messages.
      about: entries that `describe` includes.
      files: {name: path} of the files the documents are read from, if any.
    """

    unit = "tokens"

    def __init__(
        self,
        lengths: np.ndarray,
        read: Read,
        *,
        end: int,
        length: int,
        num_bytes: int,
        separate_documents: bool,
        what: str,
        about: dict[str, Any],
        files: Mapping[str, str] | None = None,
    ):
        self._offsets = np.concatenate(
            [np.zeros(1, np.int64), np.cumsum(lengths.astype(np.int64) + 1)]
        )
        self._read = read
        self._end = end
        self._length = length
        self._num_bytes = num_bytes
        self._separate_documents = separate_documents
        self._about = about
        self._files = files or {}
        self.units_per_example = length
        self.num_tokens = int(self._offsets[-1])
        if self.num_tokens < length + 1:
            raise ValueError(
                f"{what}: the split has {self.num_tokens} tokens, but one example of "
                f"length {length} needs {length + 1}. Lower length to at most "
                f"{self.num_tokens - 1}, or add data to the split."
            )

    @property
    def num_documents(self) -> int:
        return len(self._offsets) - 1

    def __len__(self) -> int:
        return (self.num_tokens - 1) // self._length

    def __getitem__(self, i: int) -> dict[str, np.ndarray]:
        if not 0 <= i < len(self):
            raise IndexError(f"example {i} of a dataset of {len(self)} examples")
        start = i * self._length
        stop = start + self._length + 1
        tokens = np.full(stop - start, self._end, np.int32)
        first = int(np.searchsorted(self._offsets, start, side="right")) - 1
        last = int(np.searchsorted(self._offsets, stop, side="left"))
        for document in range(first, last):
            base, after = self._offsets[document : document + 2].tolist()
            low, high = max(start, base), min(stop, after - 1)
            if low < high:
                tokens[low - start : high - start] = self._read(
                    document, low - base, high - base
                )
        example = {
            "inputs": tokens[:-1],
            "targets": tokens[1:],
            "weights": np.ones(self._length, np.float32),
        }
        if self._separate_documents:
            ends = self._offsets[first + 1 : last + 1] - 1 - start
            example.update(self._segments(ends))
        return example

    def _segments(self, ends: np.ndarray) -> dict[str, np.ndarray]:
        """Returns segment numbers and positions, given the indices of end tokens."""
        is_start = np.zeros(self._length, np.int32)
        ends = ends[ends < self._length]
        is_start[ends] = 1
        indices = np.arange(self._length, dtype=np.int32)
        segment_starts = np.maximum.accumulate(indices * is_start)
        return {
            "segments": 1 + np.cumsum(is_start, dtype=np.int32),
            "positions": indices - segment_starts,
        }

    def files(self) -> Mapping[str, str]:
        return self._files

    def contents(self) -> Iterator[tuple[str, np.ndarray]]:
        """Yields a name for messages and the tokens of each document."""
        names = list(self._files) if len(self._files) == self.num_documents else []
        for i, length in enumerate(np.diff(self._offsets).tolist()):
            name = names[i] if names else f"document {i}"
            yield name, self._read(i, 0, length - 1)

    def describe(self) -> dict[str, Any]:
        covered = len(self) * self._length + 1
        return self._about | {
            "documents": self.num_documents,
            "bytes": self._num_bytes,
            "tokens": self.num_tokens,
            "length": self._length,
            "examples": len(self),
            "dropped_tokens": self.num_tokens - covered,
        }

    def loss_units(self, loss: float) -> dict[str, float]:
        """Converts a loss in nats per token to bits per byte of text."""
        tokens_per_byte = self.num_tokens / self._num_bytes
        return {"bits_per_byte": loss / math.log(2) * tokens_per_byte}
