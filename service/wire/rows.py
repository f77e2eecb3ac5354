"""Rows of tables on the wire: their numbers, and a value for each.

A stream begins with a JSON object and goes on with the bytes of the numbers (int64)
and of the values (float32), in chunks; a CRC32C guards both.
"""

import base64
import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import google_crc32c
import numpy as np

from . import messages as messages_lib
from .calls import SILENT_SECONDS, Channel
from .errors import Refused, Unavailable
from .tensors import CHUNK

MAX_BYTES = 1 << 30  # of one stream; nobody makes us allocate more
_ID, _VALUE = np.dtype(np.int64), np.dtype(np.float32)


def push(
    channel: Channel,
    about: Mapping[str, Any],
    ids: np.ndarray,
    values: np.ndarray,
    seconds: float = SILENT_SECONDS,
) -> int:
    """Sends values of rows as a part of a contribution; returns their bytes.

    Args:
      about: job, table, learner, incarnation and round.
    """
    messages = encode(about, ids, values)
    return int(channel.upload("PushRows", messages, seconds)["bytes"])


def pull(
    channel: Channel,
    job: str,
    table: str,
    version: int,
    ids: np.ndarray,
    since: int | None = None,
    seconds: float = SILENT_SECONDS,
) -> tuple[np.ndarray, np.ndarray]:
    """Returns rows of a version, and which of `ids` (positions) they are.

    Args:
      since: an older version; only rows that have changed after it are sent.
    """
    text = base64.b64encode(np.ascontiguousarray(ids, _ID).tobytes()).decode()
    message = {"job": job, "table": table, "version": version}
    message |= {"ids": text, "since": since}
    stream = channel.download("PullRows", message, seconds)
    with contextlib.closing(stream):
        _, at, values = decode(stream)
    return at, values


def asked_for(message: Mapping[str, Any]) -> np.ndarray:
    """Returns the rows that a message of `pull` asks for."""
    try:
        data = base64.b64decode(message["ids"], validate=True)
        return np.frombuffer(data, _ID)
    except (KeyError, TypeError, ValueError) as error:
        raise Refused(f"pull of rows: ids: {error}; expected int64s, base64") from error


def encode(
    about: Mapping[str, Any], ids: np.ndarray, values: np.ndarray
) -> Iterator[bytes]:
    """Yields the messages of a stream."""
    parts = [
        np.ascontiguousarray(ids, _ID).view(np.uint8),
        np.ascontiguousarray(values, _VALUE).reshape(-1).view(np.uint8),
    ]
    crc = 0
    for part in parts:
        crc = google_crc32c.extend(crc, part)
    header = {"rows": int(ids.size), "width": int(values.shape[1]), "crc32c": crc}
    yield messages_lib.encode({**about, **header})
    for part in parts:
        for first in range(0, part.size, CHUNK):
            yield part[first : first + CHUNK].tobytes()


def decode(messages: Iterator[bytes]) -> tuple[dict[str, Any], np.ndarray, np.ndarray]:
    """Returns what `encode` was given; refuses a stream that is short or damaged."""
    try:
        header = messages_lib.decode(next(messages, b""))
        rows, width, crc = (header[name] for name in ("rows", "width", "crc32c"))
        if not all(type(n) is int and n >= 0 for n in (rows, width, crc)):
            raise ValueError(f"rows {rows!r}, width {width!r}, crc32c {crc!r}")
        nbytes = rows * (_ID.itemsize + width * _VALUE.itemsize)
        if nbytes > MAX_BYTES:
            raise ValueError(f"{nbytes} bytes are too many; send fewer rows at once")
    except (KeyError, TypeError, ValueError) as error:
        raise Refused(
            f"header of rows: {error}; expected JSON with rows, width and crc32c"
        ) from error
    data, filled = np.empty(nbytes, np.uint8), 0
    for message in messages:
        chunk = np.frombuffer(message, np.uint8)
        if filled + chunk.size > nbytes:
            raise Refused(f"rows: more than the {nbytes} bytes of the header")
        data[filled : filled + chunk.size] = chunk
        filled += chunk.size
    if filled < nbytes:
        raise Refused(f"rows are short: {filled} of {nbytes} bytes")
    if google_crc32c.value(data) != crc:
        raise Unavailable(  # so they are sent again
            f"rows are damaged: CRC32C {google_crc32c.value(data):08x}, expected "
            f"{crc:08x}"
        )
    split = rows * _ID.itemsize
    return (
        header,
        data[:split].view(_ID),
        data[split:].view(_VALUE).reshape(rows, width),
    )
