"""Replaces files atomically: a reader sees the old content or the new, never a part.

The new content is written to a draft beside the file, which is then renamed. Whatever
happens before the rename, the old file stays as it was.
"""

import contextlib
import errno
import os
import threading
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def replacing(
    path: Path, *, draft_name: str | None = None, durable: bool = True
) -> Iterator[Path]:
    """Yields the path of a draft, which replaces `path` when the block succeeds.

    Args:
      draft_name: by default a name of this thread's own, so that two writers do not
        share a draft. Where only one process can write, give a fixed name: the draft of
        a killed process is then overwritten instead of left behind.
      durable: whether the new content must survive a crash of the machine. Waits for
        the disk, so leave it out on a path that must never block.
    """
    own = f".{path.name}.{os.getpid()}-{threading.get_native_id()}.tmp"
    draft = path.with_name(draft_name or own)
    try:
        yield draft
        if durable:
            _sync(draft)
        os.replace(draft, path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise
    if durable:
        _sync_folder(path.parent)


def replace_text(path: Path, text: str, *, durable: bool = True) -> None:
    """Writes a text file atomically."""
    with replacing(path, durable=durable) as draft:
        draft.write_text(text, encoding="utf-8")


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sync_folder(folder: Path) -> None:
    """Makes the rename itself durable."""
    try:
        _sync(folder)
    except OSError as error:
        # Some network and FUSE filesystems cannot sync a folder; their renames are as
        # durable as they get.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
