"""Tables: arrays of rows that are larger than a learner, such as embeddings.

A table is divided into blocks of consecutive rows, which servers hold like any block. A
learner reads and changes single rows by their numbers.
"""

import dataclasses
import functools
import math
import re
import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from .layout import BLOCK_BYTES, Layout, Leaf, make_layout

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
OPTIMIZERS = ("sgd", "adagrad")
DTYPE = np.dtype(np.float32)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Table:
    """A table of float32 numbers and the optimizer of its rows.

    Attributes:
      name: letters, digits, ".", "_" and "-": its checkpoint is a folder of this name.
      scale: initial values are uniform in [-scale, scale), and follow from the seed.
      optimizer: "sgd", or "adagrad" with one accumulator for each row.
      block_bytes: the size of a block.
    """

    name: str
    rows: int
    width: int
    learning_rate: float
    optimizer: str = "adagrad"
    seed: int = 0
    scale: float = 0.01
    block_bytes: int = BLOCK_BYTES

    def __post_init__(self):
        what = f"table {self.name!r}"
        if not isinstance(self.name, str) or not NAME.fullmatch(self.name):
            raise ValueError(
                f"{what}: expected a name of letters, digits, '.', '_' and '-', "
                "because it is also the name of a folder"
            )
        for field, least in (("rows", 1), ("width", 1), ("seed", 0)):
            value = getattr(self, field)
            if type(value) is not int or value < least:
                raise ValueError(
                    f"{what}: {field} is {value!r}, expected an integer >= {least}"
                )
        if type(self.block_bytes) is not int or self.block_bytes < self.row_bytes:
            raise ValueError(
                f"{what}: block_bytes is {self.block_bytes!r}, expected at least the "
                f"{self.row_bytes} bytes of a row"
            )
        if self.optimizer not in OPTIMIZERS:
            raise ValueError(
                f"{what}: optimizer {self.optimizer!r}, expected one of "
                f"{', '.join(OPTIMIZERS)}"
            )
        for field in ("learning_rate", "scale"):
            value = getattr(self, field)
            if not isinstance(value, int | float) or not (
                math.isfinite(value) and value >= 0
            ):
                raise ValueError(
                    f"{what}: {field} is {value!r}, expected a number >= 0"
                )

    @property
    def row_bytes(self) -> int:
        return self.width * DTYPE.itemsize

    @functools.cached_property
    def layout(self) -> Layout:
        """The blocks, each of consecutive rows."""
        shape = (self.rows, self.width)
        leaf = Leaf(self.name, shape, DTYPE.name, ("row", None))
        return make_layout([leaf], block_bytes=self.block_bytes)

    @functools.cached_property
    def starts(self) -> np.ndarray:
        """The first row of each block."""
        boxes = [block.slabs[0].box for block in self.layout.blocks]
        return np.array([box.start[0] for box in boxes], np.int64)

    def block_of(self, ids: np.ndarray) -> np.ndarray:
        """Returns the block of each row."""
        return np.searchsorted(self.starts, ids, side="right") - 1

    def bounds(self, block: int) -> tuple[int, int]:
        """Returns the first row of a block, and the one after its last."""
        box = self.layout.blocks[block].slabs[0].box
        return box.start[0], box.stop[0]

    def key(self, job: str, block: int) -> str:
        """Returns the key by which a block is dealt to a server."""
        return f"{job}/{self.name}/{block}"

    def initial(self, block: int) -> np.ndarray:
        """Returns the initial rows of a block, the same on every machine."""
        first, stop = self.bounds(block)
        words = (self.seed, zlib.crc32(self.name.encode()) << 32 | block)
        raw = np.random.Philox(key=np.array(words, np.uint64)).random_raw(
            (stop - first) * self.width
        )
        unit = (raw >> np.uint64(40)).astype(np.float32) * np.float32(2.0**-23)
        return ((unit - 1) * np.float32(self.scale)).reshape(-1, self.width)

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, data: Any) -> "Table":
        known = {field.name for field in dataclasses.fields(cls)}
        if not isinstance(data, Mapping) or set(data) != known:
            raise ValueError(
                f"table {data!r}: expected an object with {', '.join(sorted(known))}"
            )
        return cls(**data)


def check_ids(table: Table, ids: np.ndarray, what: str) -> None:
    """Refuses row numbers that are not ascending, or not in the table."""
    if ids.dtype != np.int64 or ids.ndim != 1:
        raise ValueError(
            f"{what}: rows are {ids.dtype.name}{list(ids.shape)}, expected a list of "
            "int64"
        )
    if ids.size and (ids[0] < 0 or ids[-1] >= table.rows):
        wrong = ids[0] if ids[0] < 0 else ids[-1]
        raise ValueError(
            f"{what}: row {wrong} is not in table {table.name!r}, which has "
            f"{table.rows} rows"
        )
    if (np.diff(ids) <= 0).any():
        raise ValueError(f"{what}: rows must be ascending, and each only once")
