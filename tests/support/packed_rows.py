"""Synthetic rows in which several documents are packed, with segments and positions."""

import dataclasses

import numpy as np

from meshloom.trainer.data import sources


@dataclasses.dataclass(frozen=True)
class Packed(sources.Synthetic):
    """Each row has documents of different lengths; each starts at position 0."""

    def open(self, split):
        return PackedRows(self, split)


class PackedRows(sources.SyntheticDataset):
    def __getitem__(self, i):
        row = super().__getitem__(i)
        starts = np.random.default_rng(i).random(len(row["inputs"])) < 0.1
        starts[0] = True
        index = np.arange(len(starts))
        first = np.maximum.accumulate(np.where(starts, index, 0))
        ends = np.append(starts[1:], False)
        return row | {
            "weights": np.where(ends, 0, row["weights"]).astype(np.float32),
            "positions": (index - first).astype(np.int32),
            "segments": np.cumsum(starts).astype(np.int32),
        }
