"""Streams of arrays: for each a JSON header, then its bytes in chunks.

The header has the array's place, shape and dtype, the number of bytes and their CRC32C.
An array counts once all of its bytes have arrived and the checksum is right; what
arrived before it in the stream stays counted.
"""

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import google_crc32c
import numpy as np

from ..blocks.box import Box
from ..blocks.dtypes import dtype_of
from .errors import Refused

# On loopback, in GB/s on a busy machine:
# 256 KiB 0.44, 1 MiB 0.71, 2-4 MiB 0.79, 16 MiB 0.5.
CHUNK = 2 << 20

Place = dict[str, Any]  # {"block", "slab"} of a piece that is sent, {"leaf"} of a read


class Header(NamedTuple):
    """What comes before the bytes of an array.

    Attributes:
      box: in the coordinates of its leaf.
    """

    place: Place
    box: Box
    dtype: np.dtype
    nbytes: int
    crc: int

    def __str__(self) -> str:
        place = ", ".join(f"{name} {value}" for name, value in self.place.items())
        return f"piece {self.box} of {place}"


def encode(arrays: Iterable[tuple[Place, Any, np.ndarray]]) -> Iterator[bytes]:
    """Yields the messages for (place, start, array)s."""
    for place, start, array in arrays:
        flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        header = {
            **place,
            "start": [int(i) for i in start],
            "shape": list(array.shape),
            "dtype": array.dtype.name,
            "nbytes": flat.size,
            "crc": google_crc32c.value(flat),
        }
        yield json.dumps(header).encode()
        for first in range(0, flat.size, CHUNK):
            yield flat[first : first + CHUNK].tobytes()


def decode(
    messages: Iterator[bytes],
    places: tuple[str, ...],
    target: Callable[[Header], np.ndarray],
    done: Callable[[Header, np.ndarray], None],
) -> int:
    """Receives arrays; returns the number of their bytes.

    Args:
      places: names of the header that say where an array belongs.
      target: returns where to write an array: contiguous, of its shape and dtype.
      done: called with each array once its bytes are known to be right.
    """
    total = 0
    for message in messages:
        header = parse_header(message, places)
        array = target(header)
        _receive(header, array, messages)
        done(header, array)
        total += header.nbytes
    return total


def parse_header(message: bytes, places: tuple[str, ...]) -> Header:
    """Reads a header; refuses one that contradicts itself."""
    try:
        data = json.loads(message)
        place = {name: _count(data[name]) for name in places}
        shape = tuple(map(_count, data["shape"]))
        box = Box.at(tuple(map(_count, data["start"])), shape)
        dtype = dtype_of(data["dtype"])
        header = Header(place, box, dtype, _count(data["nbytes"]), _count(data["crc"]))
    except (KeyError, TypeError, ValueError) as error:
        raise Refused(
            f"header of a piece: {_shown(error)}; expected JSON with {places}, start, "
            "shape, dtype, nbytes and crc"
        ) from error
    if header.nbytes != math.prod(shape) * dtype.itemsize:
        raise Refused(
            f"{header}: {header.nbytes} bytes, but shape {list(shape)} and dtype "
            f"{dtype.name} need {math.prod(shape) * dtype.itemsize}"
        )
    return header


class Scratch:
    """A buffer for one array at a time, as large as the largest so far."""

    def __init__(self):
        self._bytes = np.empty(0, np.uint8)

    def __call__(self, header: Header) -> np.ndarray:
        if self._bytes.size < header.nbytes:
            self._bytes = np.empty(header.nbytes, np.uint8)
        flat = self._bytes[: header.nbytes].view(header.dtype)
        return flat.reshape(header.box.shape)


def reading(
    boxes: Sequence[tuple[int, Box]],
    into: Mapping[tuple[int, Box], np.ndarray] | Callable[[int, Box, np.ndarray], None],
) -> tuple[
    Callable[[Header], np.ndarray],
    Callable[[Header, np.ndarray], None],
    Callable[[], None],
]:
    """Returns `target` and `done` for boxes that were asked for, and a final check.

    Where it can, it receives directly into the arrays of `into`.
    """
    waiting = list(reversed(boxes))
    scratch = Scratch()

    def target(header: Header) -> np.ndarray:
        found = header.place["leaf"], header.box
        if not waiting or waiting.pop() != found:
            raise Refused(f"{header} was not asked for, or not at this point")
        if isinstance(into, Mapping):
            array = into[found]
            if array.flags.c_contiguous and array.dtype == header.dtype:
                return array
        return scratch(header)

    def done(header: Header, array: np.ndarray) -> None:
        leaf = header.place["leaf"]
        if not isinstance(into, Mapping):
            into(leaf, header.box, array)
        elif into[leaf, header.box] is not array:
            np.copyto(into[leaf, header.box], array)

    def check() -> None:
        if waiting:
            raise Refused(f"{len(waiting)} of {len(boxes)} boxes did not come")

    return target, done, check


def _receive(header: Header, array: np.ndarray, messages: Iterator[bytes]) -> None:
    """Copies the chunks of one array to their place, and compares the checksum."""
    assert array.flags.c_contiguous and array.dtype == header.dtype
    flat = array.reshape(-1).view(np.uint8)
    filled, crc = 0, 0
    while filled < header.nbytes:
        chunk = next(messages, None)
        if chunk is None:
            raise Refused(f"{header} is short: {filled} of {header.nbytes} bytes")
        if not 0 < len(chunk) <= header.nbytes - filled:
            raise Refused(
                f"{header}: a chunk of {len(chunk)} bytes after {filled} of "
                f"{header.nbytes} bytes"
            )
        np.copyto(
            flat[filled : filled + len(chunk)], np.frombuffer(chunk, dtype=np.uint8)
        )
        crc = google_crc32c.extend(crc, chunk)
        filled += len(chunk)
    if crc != header.crc:
        raise Refused(
            f"{header} is damaged: CRC32C {crc:08x}, expected {header.crc:08x}; send "
            "it again"
        )


def _count(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError(f"{value!r} is not an integer >= 0")
    return value


def _shown(error: Exception) -> str:
    return f"no {error}" if isinstance(error, KeyError) else str(error)
