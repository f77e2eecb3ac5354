"""Corrupts checkpoints on disk, for drills and tests.

Damage to arrays always hits their data: the files also contain stale bytes that nothing
refers to, and changing those would change no array.
"""

import os
from pathlib import Path

import tensorstore

from ..checkpoint.manager import STATE
from ..checkpoint.reading import COMMIT_RECORD


def flip_a_bit(step: Path) -> Path:
    """Flips one bit of an array on disk and returns the file that contains it."""
    file, offset = _middle_of_largest_chunk(step)
    with file.open("r+b") as content:
        content.seek(offset)
        (byte,) = content.read(1)
        content.seek(offset)
        content.write(bytes([byte ^ 1]))
    return file


def tear_a_file(step: Path) -> Path:
    """Truncates a file in the middle of an array, as a crash would."""
    file, offset = _middle_of_largest_chunk(step)
    os.truncate(file, offset)
    return file


def tear_the_commit_record(step: Path) -> Path:
    """Truncates the file by which a step counts as committed."""
    file = step / COMMIT_RECORD
    os.truncate(file, file.stat().st_size // 2)
    return file


def lose_a_file(step: Path) -> Path:
    """Deletes a file that contains array data."""
    file, _ = _middle_of_largest_chunk(step)
    file.unlink()
    return file


def make_unreadable(step: Path) -> Path:
    """Makes opening a file of array data fail with an I/O error."""
    file = lose_a_file(step)
    file.symlink_to(file)
    return file


def _middle_of_largest_chunk(step: Path) -> tuple[Path, int]:
    """Returns the file and the offset of the middle of the largest array chunk.

    Small chunks are compressed together with the index; a large one is stored in a
    file verbatim.
    """
    folder = Path(step).absolute() / STATE
    spec = {"driver": "ocdbt", "base": f"file://{folder}/"}
    store = tensorstore.KvStore.open(spec).result()
    chunks = (store.read(key).result().value for key in store.list().result())
    chunk = max(chunks, key=len)
    for file in folder.rglob("*"):
        if file.is_file() and (start := file.read_bytes().find(chunk)) >= 0:
            return file, start + len(chunk) // 2
    raise ValueError(f"no file in {folder} contains its largest chunk verbatim")
