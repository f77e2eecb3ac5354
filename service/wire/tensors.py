"""Streams of arrays: for each a JSON header, its bytes, and CRC32Cs of both.

    length of the header (4 bytes) | header | CRC32C (4) | bytes | CRC32C (4)

Little-endian. The first checksum is that of all before it, so that nothing is made of a
header that is damaged; the second one goes on with the bytes. Who gets another one asks
again.
The header has the array's place, shape, dtype and number of bytes, and its codec if the
bytes are those of a packed array (codecs.py). The messages of a stream are these bytes
cut anywhere, so small arrays share a message. An array counts once all of its bytes
have arrived and the checksum is right; what arrived before it in the stream stays
counted.
"""

import json
import math
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import google_crc32c
import numpy as np

from ..blocks.box import Box
from ..blocks.dtypes import dtype_of
from . import codecs
from .codecs import Codec
from .errors import Refused, Unavailable

# On loopback, chunks of 256 KiB to 4 MiB are about equally fast. Up to 512 KiB the
# memory of messages is used again, where larger ones cost a fault for every page; and a
# chunk is checksummed and copied while it is in the processor's cache.
CHUNK = 1 << 19

Place = dict[str, Any]  # {"block", "slab"} of a piece that is sent, {"leaf"} of a read
_NUMBER = struct.Struct("<I")
_MAX_HEADER = 1 << 16


class Header(NamedTuple):
    """What comes before the bytes of an array.

    Attributes:
      box: in the coordinates of its leaf.
      nbytes: as it is sent.
      codec: of a packed array; None if the bytes are those of the array.
    """

    place: Place
    box: Box
    dtype: np.dtype
    nbytes: int
    codec: Codec | None = None

    def __str__(self) -> str:
        place = ", ".join(f"{name} {value}" for name, value in self.place.items())
        return f"piece {self.box} of {place}"


class Packed(NamedTuple):
    """An array as it is sent: `data` are the bytes that its codec made."""

    codec: Codec
    shape: tuple[int, ...]
    data: np.ndarray


Sent = np.ndarray | Packed


def encode(arrays: Iterable[tuple[Place, Any, Sent]]) -> Iterator[bytes]:
    """Yields the messages for (place, start, array)s."""
    parts: list[Any] = []
    room = CHUNK
    for part in _parts(arrays):
        while len(part) > room:
            parts.append(part[:room])
            yield b"".join(parts)
            parts, part, room = [], part[room:], CHUNK
        parts.append(part)
        room -= len(part)
    if parts:
        yield b"".join(parts)


def _parts(arrays: Iterable[tuple[Place, Any, Sent]]) -> Iterator[Any]:
    """Yields the bytes of a stream in parts of at most CHUNK."""
    for place, start, array in arrays:
        if isinstance(array, Packed):
            flat, about = array.data, {"dtype": "float32", "codec": str(array.codec)}
        else:
            flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
            about = {"dtype": array.dtype.name}
        header = {
            **place,
            "start": [int(i) for i in start],
            "shape": list(array.shape),
            **about,
            "nbytes": flat.size,
        }
        text = json.dumps(header).encode()
        text = _NUMBER.pack(len(text)) + text
        crc = google_crc32c.value(text)
        yield text + _NUMBER.pack(crc)
        # In chunks, so that the first one is under way before the last is checksummed.
        for first in range(0, flat.size, CHUNK):
            chunk = flat[first : first + CHUNK]
            crc = google_crc32c.extend(crc, chunk)
            yield chunk
        yield _NUMBER.pack(crc)


def decode(
    messages: Iterator[bytes],
    places: tuple[str, ...],
    target: Callable[[Header], np.ndarray],
    done: Callable[[Header, np.ndarray], None],
) -> int:
    """Receives arrays; returns the number of their bytes.

    Args:
      places: names of the header that say where an array belongs.
      target: returns where to write an array: contiguous, of its shape and dtype; for
        a packed one, as many bytes.
      done: called with each array once its bytes are known to be right.
    """
    total = 0
    stream = _Stream(messages)
    while not stream.is_over():
        text, crc = _header_text(stream)
        header = parse_header(text, places)
        array = target(header)
        _receive(header, array, stream, crc)
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
        codec = codecs.parse(data["codec"]) if "codec" in data else None
        header = Header(place, box, dtype, _count(data["nbytes"]), codec)
    except (KeyError, TypeError, ValueError) as error:
        raise Refused(
            f"header of a piece: {_shown(error)}; expected JSON with {places}, start, "
            "shape, dtype and nbytes"
        ) from error
    expected = math.prod(shape) * dtype.itemsize if codec is None else codec.nbytes(box)
    if header.nbytes != expected:
        raise Refused(
            f"{header}: {header.nbytes} bytes, but shape {list(shape)} and "
            f"{dtype.name if codec is None else codec} need {expected}"
        )
    return header


class Scratch:
    """A buffer for one array at a time, as large as the largest so far."""

    def __init__(self):
        self._bytes = np.empty(0, np.uint8)

    def __call__(self, header: Header) -> np.ndarray:
        if self._bytes.size < header.nbytes:
            self._bytes = np.empty(header.nbytes, np.uint8)
        data = self._bytes[: header.nbytes]
        if header.codec is not None:
            return data
        return data.view(header.dtype).reshape(header.box.shape)


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
            is_alike = array.flags.c_contiguous and array.dtype == header.dtype
            if is_alike and header.codec is None:
                return array
        return scratch(header)

    def done(header: Header, array: np.ndarray) -> None:
        leaf = header.place["leaf"]
        if header.codec is not None:
            array = header.codec.from_bytes(array, header.box)
        if not isinstance(into, Mapping):
            into(leaf, header.box, array)
        elif into[leaf, header.box] is not array:
            np.copyto(into[leaf, header.box], array)

    def check() -> None:
        if waiting:
            raise Refused(f"{len(waiting)} of {len(boxes)} boxes did not come")

    return target, done, check


class _Stream:
    """The bytes of a stream of messages, in order."""

    def __init__(self, messages: Iterator[bytes]):
        self._messages = messages
        self._rest = memoryview(b"")

    def is_over(self) -> bool:
        while not self._rest:
            message = next(self._messages, None)
            if message is None:
                return True
            self._rest = memoryview(message)
        return False

    def take(self, size: int) -> memoryview:
        """Returns at least one and at most `size` bytes; none at the end."""
        if self.is_over():
            return self._rest
        taken, self._rest = self._rest[:size], self._rest[size:]
        return taken

    def read(self, size: int) -> bytes:
        """Returns as many bytes, or fewer at the end."""
        found = b""
        while len(found) < size and (taken := self.take(size - len(found))):
            found += taken
        return found


def _header_text(stream: _Stream) -> tuple[bytes, int]:
    """Returns a header as it was sent, and the checksum of it and its length."""
    prefix = stream.read(_NUMBER.size)
    size = _NUMBER.unpack(prefix)[0] if len(prefix) == _NUMBER.size else 0
    text = stream.read(size) if 0 < size <= _MAX_HEADER else b""
    crc = google_crc32c.value(prefix + text)
    if not size or stream.read(_NUMBER.size) != _NUMBER.pack(crc):
        raise Unavailable(
            f"header of a piece is damaged: {len(text)} of {size} bytes, CRC32C "
            f"{crc:08x}; send it again"
        )
    return text, crc


def _receive(header: Header, array: np.ndarray, stream: _Stream, crc: int) -> None:
    """Copies the bytes of one array to their place, and compares the checksum.

    Args:
      crc: of what came before.
    """
    assert array.flags.c_contiguous and array.nbytes == header.nbytes
    flat = array.reshape(-1).view(np.uint8)
    filled = 0
    while filled < header.nbytes:
        taken = stream.take(header.nbytes - filled)
        if not taken:
            raise Refused(f"{header} is short: {filled} of {header.nbytes} bytes")
        chunk = np.frombuffer(taken, dtype=np.uint8)
        np.copyto(flat[filled : filled + chunk.size], chunk)
        crc = google_crc32c.extend(crc, chunk)
        filled += chunk.size
    trailer = stream.read(_NUMBER.size)
    if len(trailer) < _NUMBER.size:
        raise Refused(f"{header} is short: it has no checksum")
    if crc != (expected := _NUMBER.unpack(trailer)[0]):
        raise Unavailable(
            f"{header} is damaged: CRC32C {crc:08x}, expected {expected:08x}; send it "
            "again"
        )


def _count(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError(f"{value!r} is not an integer >= 0")
    return value


def _shown(error: Exception) -> str:
    return f"no {error}" if isinstance(error, KeyError) else str(error)
