"""Compressed arrays: how float32 numbers are packed into fewer bytes, and back.

    bfloat16      each number rounded
    int8          a whole number from -127 to 127, and a scale for 64 in a row
    topk:0.01     the largest hundredth of 4096 in a row, and where they are
    topk:0.01+int8, topk:0.01+bfloat16   the same with these numbers packed too

Rows of 64 lie along the last dimension and are counted from the beginning of the leaf,
so int8 gives the same numbers on every mesh whose shards have a multiple of 64 columns;
bfloat16 does on all meshes. The 4096 of top-k are those of one piece, in its own order.

A scale is rounded up to a bfloat16, so that a whole number times a scale is exact in
float32, on every machine: what is left over is exact too. `pack` takes numpy or
jax.numpy, so that learners pack on their devices what others unpack here.
"""

import dataclasses
import math
import re
from collections.abc import Callable, Mapping
from typing import Any, Literal

import numpy as np

from ..blocks.box import Box
from ..blocks.dtypes import dtype_of
from .errors import Refused

ROW, CHUNK = 64, 4096
LARGEST = 127
VALUES = {
    "float32": dtype_of("float32"),
    "bfloat16": dtype_of("bfloat16"),
    "int8": np.dtype(np.int8),
}
NAMES = "float32, bfloat16, int8, topk:SHARE, topk:SHARE+bfloat16 or topk:SHARE+int8"
Top = Callable[[Any, int], Any]
_SCALE, _INDEX = VALUES["bfloat16"], np.dtype(np.uint16)


@dataclasses.dataclass(frozen=True)
class Codec:
    """One way to pack.

    Attributes:
      values: how each number that is sent is packed, of VALUES.
      share: of the numbers that are sent, the largest; None sends all.
    """

    values: str = "float32"
    share: float | None = None

    def __str__(self) -> str:
        if self.share is None:
            return self.values
        rest = "" if self.values == "float32" else f"+{self.values}"
        return f"topk:{self.share:g}{rest}"

    @property
    def is_plain(self) -> bool:
        return self == PLAIN

    def parts(self, box: Box) -> list[tuple[np.dtype, tuple[int, ...]]]:
        """Returns dtype and shape of each array that a packed piece consists of."""
        values = VALUES[self.values]
        if self.share is None:
            shape = box.shape or (1,)
            found = [(values, shape)]
            if self.values == "int8":
                rows = -(-(_offset(box) + shape[-1]) // ROW)
                found.insert(0, (_SCALE, (*shape[:-1], rows)))
            return found
        num, _, k = self.chunks(box.size)
        found = [(_INDEX, (num, k)), (values, (num, k))]
        if self.values == "int8":
            found.insert(1, (_SCALE, (num, 1)))
        return found

    def nbytes(self, box: Box) -> int:
        """Returns the bytes of a packed piece."""
        return sum(d.itemsize * math.prod(shape) for d, shape in self.parts(box))

    def chunks(self, size: int) -> tuple[int, int, int]:
        """Returns how many chunks top-k makes, their length, and how many it keeps."""
        assert self.share is not None
        length = min(size, CHUNK)
        num = -(-size // length) if length else 0
        return num, length, min(length, max(1, round(self.share * length)))

    def pack(self, x: Any, box: Box, xp: Any = np, top: Top | None = None) -> list[Any]:
        """Packs float32 numbers; returns arrays like `parts`.

        Args:
          box: of the numbers, in the coordinates of their leaf.
          xp: numpy, or jax.numpy for arrays on devices.
          top: (rows, k) -> where the k largest of each row are, of two equal ones the
            first; with numpy by default.
        """
        x = x.reshape(box.shape or (1,))
        if self.share is not None:
            return self._pack_largest(x, xp, top or _top)
        if self.values != "int8":
            return [x.astype(VALUES[self.values])]
        rows, inside = _rows(x, _offset(box), xp)
        scales, numbers = _quantized(rows, xp)
        flat = numbers.reshape(*x.shape[:-1], -1)
        return [scales[..., 0], flat[..., inside]]

    def unpack(self, parts: list[Any], box: Box, xp: Any = np) -> Any:
        """Returns the numbers of a packed piece, in the shape of its box."""
        if self.share is not None:
            return self._unpack_largest(parts, box, xp)
        *scales, values = parts
        found = values.astype(np.float32)
        if scales:
            offset, length = _offset(box), found.shape[-1]
            wide = xp.repeat(scales[0].astype(np.float32), ROW, axis=-1)
            found = found * wide[..., offset : offset + length]
        return found.reshape(box.shape)

    def part(self, parts: list[Any], inside: Box, box: Box) -> list[Any]:
        """Returns the packed arrays of a box, given those of a box around it.

        Not with top-k, whose chunks are those of one piece.
        """
        assert self.share is None
        *scales, values = parts
        index = box.slices(inside=inside)
        if scales and index:
            first = inside.start[-1] // ROW
            rows = slice(box.start[-1] // ROW - first, -(-box.stop[-1] // ROW) - first)
            scales = [scales[0][(*index[:-1], rows)]]
        return [*scales, values[(*index, ...)]]

    def to_bytes(self, parts: list[np.ndarray]) -> np.ndarray:
        """Returns packed arrays as one array of bytes."""
        flat = [np.ascontiguousarray(p).reshape(-1).view(np.uint8) for p in parts]
        return np.concatenate(flat) if flat else np.empty(0, np.uint8)

    def from_bytes(self, data: np.ndarray, box: Box) -> np.ndarray:
        """Returns the numbers of a piece from the bytes that `to_bytes` made."""
        parts, first = [], 0
        for dtype, shape in self.parts(box):
            stop = first + dtype.itemsize * math.prod(shape)
            # A copy is aligned, which a part of the bytes need not be.
            parts.append(np.array(data[first:stop]).view(dtype).reshape(shape))
            first = stop
        if self.share is not None and (parts[0] >= self.chunks(box.size)[1]).any():
            raise Refused(f"piece {box}: an index of {self} is outside of its chunk")
        with np.errstate(all="ignore"):  # what is not finite is found when merging
            return self.unpack(parts, box)

    def _pack_largest(self, x: Any, xp: Any, top: Top) -> list[Any]:
        num, length, k = self.chunks(x.size)
        flat = xp.pad(x.reshape(-1), (0, num * length - x.size)).reshape(num, length)
        # Something that is not a number must be seen, so it counts as large.
        sizes = xp.where(xp.isnan(flat), xp.inf, xp.abs(flat))
        index = top(sizes, k)
        values = xp.take_along_axis(flat, index, axis=1)
        packed = [index.astype(_INDEX)]
        if self.values == "int8":
            return [*packed, *_quantized(values, xp)]
        return [*packed, values.astype(VALUES[self.values])]

    def _unpack_largest(self, parts: list[Any], box: Box, xp: Any) -> Any:
        num, length, _ = self.chunks(box.size)
        index, *scales, values = parts
        values = values.astype(np.float32)
        if scales:
            values = values * scales[0].astype(np.float32)
        zeros = xp.zeros((num, length), np.float32)
        # A position occurs once in its chunk.
        if xp is np:
            np.put_along_axis(zeros, index.astype(np.int64), values, axis=1)
            found = zeros
        else:
            rows = xp.arange(num)[:, None]
            found = zeros.at[rows, index.astype(np.int32)].set(values)
        return found.reshape(-1)[: box.size].reshape(box.shape)


PLAIN = Codec()


def parse(text: str) -> Codec:
    """Returns the codec of a name; raises ValueError for any other."""
    found = re.fullmatch(r"topk:([0-9.eE-]+)(?:\+(bfloat16|int8))?", str(text))
    if found is None:
        if text not in VALUES:
            raise ValueError(f"{text!r} is not a compression; expected {NAMES}")
        return Codec(text)
    try:
        share = float(found[1])
    except ValueError:
        share = 0.0
    if not 0 < share <= 1:
        raise ValueError(f"{text!r}: expected a share in (0, 1], such as topk:0.01")
    return Codec(found[2] or "float32", share)


def of_job(spec: Mapping[str, Any], what: Literal["push", "pull"]) -> Codec:
    """Returns how a job packs what is pushed, or pulled; old specs do not say."""
    return parse(spec.get("compression", {}).get(what, str(PLAIN)))


def _top(rows: np.ndarray, k: int) -> np.ndarray:
    return np.argsort(-rows, axis=1, kind="stable")[:, :k]


def _offset(box: Box) -> int:
    """Returns where in a row of the leaf the last dimension of a box begins."""
    return box.start[-1] % ROW if box.start else 0


def _rows(x: Any, offset: int, xp: Any) -> tuple[Any, slice]:
    """Returns [..., rows, ROW], filled up with zeros, and where the numbers are."""
    length = x.shape[-1]
    after = -(offset + length) % ROW
    padded = xp.pad(x, [*[(0, 0)] * (x.ndim - 1), (offset, after)])
    return padded.reshape(*x.shape[:-1], -1, ROW), slice(offset, offset + length)


def _quantized(rows: Any, xp: Any) -> tuple[Any, Any]:
    """Returns scales [..., 1] and whole numbers for the last dimension of rows."""
    with np.errstate(all="ignore"):
        largest = xp.abs(rows).max(axis=-1, keepdims=True)
        rounded = (largest / np.float32(LARGEST)).astype(_SCALE).astype(np.float32)
        above = rounded * np.float32(1 + 2.0**-7)  # the next bfloat16, or the one after
        scales = xp.where(rounded * np.float32(LARGEST) < largest, above, rounded)
        scales = scales.astype(_SCALE)
        wide = scales.astype(np.float32)
        ratio = rows / xp.where(wide > 0, wide, np.float32(1))
        ratio = xp.where(xp.isfinite(ratio), xp.rint(ratio), np.float32(0))
        return scales, xp.clip(ratio, -LARGEST, LARGEST).astype(np.int8)
