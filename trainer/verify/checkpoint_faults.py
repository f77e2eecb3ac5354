"""Faults that befall a checkpoint on disk, made on purpose by drills and tests.

They strike where it matters: the files also hold bytes that nothing refers to any
more, and no array changes when those do.
"""

import os
from pathlib import Path

import tensorstore

from ..checkpoint.manager import STATE


def flip_a_bit(step: Path) -> Path:
    """Flips one bit of an array on disk; the file it was in."""
    file, place = _middle_of_largest_piece(step)
    with file.open("r+b") as content:
        content.seek(place)
        (byte,) = content.read(1)
        content.seek(place)
        content.write(bytes([byte ^ 1]))
    return file


def tear_a_file(step: Path) -> Path:
    """Cuts a file off in the middle of an array, as a crash of the disk would."""
    file, place = _middle_of_largest_piece(step)
    os.truncate(file, place)
    return file


def lose_a_file(step: Path) -> Path:
    file, _ = _middle_of_largest_piece(step)
    file.unlink()
    return file


def make_unreadable(step: Path) -> Path:
    """Makes the system fail whoever opens a file of an array."""
    file = lose_a_file(step)
    file.symlink_to(file)
    return file


def _middle_of_largest_piece(step: Path) -> tuple[Path, int]:
    """The file and the place in it of the largest piece of an array.

    Small pieces are compressed together with the index; a large one stands in a file
    as it is.
    """
    folder = Path(step).absolute() / STATE
    spec = {"driver": "ocdbt", "base": f"file://{folder}/"}
    store = tensorstore.KvStore.open(spec).result()
    pieces = (store.read(key).result().value for key in store.list().result())
    piece = max(pieces, key=len)
    for file in folder.rglob("*"):
        if file.is_file() and (start := file.read_bytes().find(piece)) >= 0:
            return file, start + len(piece) // 2
    raise ValueError(f"no file of {folder} holds its largest piece as it is")
