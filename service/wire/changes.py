"""Pulls of changes: a box is sent as what has changed since a version that one has.

    {"boxes": [[number of changes, CRC32C of the result] or null, ...]} | arrays

The message says what follows for each box that was asked for: its packed changes, the
oldest first, or (null) its elements. Whoever receives them computes the same bits as
the server, and compares the checksum of what it has then.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import google_crc32c
import numpy as np

from ..blocks.box import Box
from . import tensors
from .errors import Refused
from .messages import decode as decode_message
from .messages import encode as encode_message


class Wanted(NamedTuple):
    """A box to read.

    Attributes:
      dtype: of its leaf.
      into: where to put the elements, in float32.
      old: the elements of the version `have`, in float32; None: nothing is known.
    """

    leaf: int
    box: Box
    dtype: np.dtype
    into: np.ndarray
    old: np.ndarray | None = None
    have: int | None = None


def advanced(old: np.ndarray, change: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Returns elements after a change, rounded once, then to the dtype of their leaf.

    Servers and learners compute the next version by this, and by nothing else.
    """
    with np.errstate(all="ignore"):
        # Of an array without dimensions, a sum is none.
        return np.asarray((old.astype(np.float32) + change).astype(dtype))


def checksum(array: np.ndarray) -> int:
    flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return google_crc32c.value(flat)


def request(wanted: Sequence[Wanted]) -> dict[str, Any]:
    """Returns the part of a message that says what is wanted."""
    rows = [[w.leaf, list(w.box.start), list(w.box.stop)] for w in wanted]
    return {"boxes": rows, "have": [w.have for w in wanted]}


def encode(
    boxes: Sequence[tuple[int, Box]],
    found: Sequence[tuple[np.ndarray, Sequence[tensors.Packed] | None]],
) -> Iterator[bytes]:
    """Yields the messages of an answer.

    Args:
      found: for each box its elements, and the changes that are sent instead, if any.
    """
    about = [
        None if changes is None else [len(changes), checksum(elements)]
        for elements, changes in found
    ]
    yield encode_message({"boxes": about})
    yield from tensors.encode(
        ({"leaf": leaf}, box.start, array)
        for (leaf, box), (elements, changes) in zip(boxes, found, strict=True)
        for array in ([elements] if changes is None else changes)
    )


def receive(messages: Iterator[bytes], wanted: Sequence[Wanted]) -> int:
    """Fills the boxes from the messages of an answer; returns the bytes of its arrays.

    May be repeated for the same boxes if it was cut short.
    """
    about = _about(messages, wanted)
    # What comes, the last one first: the box, and the number of its change.
    waiting: list[tuple[Wanted, int | None]] = []
    for box, row in reversed(list(zip(wanted, about, strict=True))):
        if row is None:
            waiting.append((box, None))
        elif row[0]:
            waiting += [(box, number) for number in reversed(range(row[0]))]
        else:
            assert box.old is not None
            np.copyto(box.into, box.old)
    scratch = tensors.Scratch()

    def target(header: tensors.Header) -> np.ndarray:
        box, number = waiting[-1] if waiting else (None, None)
        if box is None or (header.place["leaf"], header.box) != (box.leaf, box.box):
            raise Refused(f"{header} was not asked for, or not at this point")
        if (header.codec is None) != (number is None):
            raise Refused(f"{header} is packed as {header.codec}, unlike announced")
        return scratch(header)

    def done(header: tensors.Header, array: np.ndarray) -> None:
        box, number = waiting.pop()
        if header.codec is None:
            np.copyto(box.into, array)
            return
        change = header.codec.from_bytes(array, header.box)
        before = box.into if number else box.old
        assert before is not None
        np.copyto(box.into, advanced(before, change, box.dtype))

    nbytes = tensors.decode(messages, ("leaf",), target, done)
    if waiting:
        raise Refused(f"{len(waiting)} arrays of {len(wanted)} boxes did not come")
    for box, row in zip(wanted, about, strict=True):
        if row is not None and checksum(box.into.astype(box.dtype)) != row[1]:
            raise Refused(
                f"box {box.box} of leaf {box.leaf} is not the server's after "
                f"{row[0]} changes since version {box.have}: read all elements again"
            )
    return nbytes


def _about(
    messages: Iterator[bytes], wanted: Sequence[Wanted]
) -> list[tuple[int, int] | None]:
    """Reads the first message: (number of changes, checksum) of each box, or None."""
    try:
        rows = decode_message(next(messages))["boxes"]
        found = [None if row is None else (int(row[0]), int(row[1])) for row in rows]
        pairs = list(zip(wanted, found, strict=True))
        if any(row and (row[0] < 0 or box.old is None) for box, row in pairs):
            raise ValueError("changes of a box of which nothing is known")
    except (StopIteration, KeyError, TypeError, IndexError, ValueError) as error:
        raise Refused(
            f"answer to a pull of changes: {error!r}; do both sides have the same "
            "version of meshloom?"
        ) from error
    return found
