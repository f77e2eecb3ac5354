"""Files are replaced in one piece: a crash on the way leaves the old one."""

import errno
import os
import signal
import stat
import subprocess
import sys

import pytest

from meshloom.launch import atomic_file, progress_file
from meshloom.trainer.data import corpus_files


def names(folder) -> set[str]:
    return {path.name for path in folder.iterdir()}


def fail(*_):
    raise OSError(errno.EIO, "Input/output error")


WRITERS = {
    "text": lambda path: atomic_file.replace_text(path, "new"),
    "progress": lambda path: progress_file.write(path, 3),
    "corpus": lambda path: corpus_files.write_json(path, {"new": 1}),
}


@pytest.mark.parametrize("fault", ["fsync", "replace"])
@pytest.mark.parametrize("write", WRITERS.values(), ids=WRITERS)
def test_a_failure_before_the_rename_leaves_the_old_file(
    tmp_path, monkeypatch, write, fault
):
    path = tmp_path / "file"
    path.write_text("old")
    monkeypatch.setattr(os, fault, fail)
    if fault == "fsync" and write is WRITERS["progress"]:  # does not wait for the disk
        write(path)
        assert progress_file.read(path).step == 3
        return
    with pytest.raises(OSError, match="Input/output error"):
        write(path)
    assert path.read_text() == "old" and names(tmp_path) == {"file"}


KILLED = """
import os, signal, sys
from pathlib import Path
from meshloom.launch import atomic_file

os.replace = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
with atomic_file.replacing(Path(sys.argv[1]), draft_name="file.tmp") as draft:
    draft.write_text("half")
"""


def test_a_process_killed_before_the_rename_leaves_the_old_file(tmp_path):
    path = tmp_path / "file"
    path.write_text("old")
    found = subprocess.run([sys.executable, "-c", KILLED, str(path)])
    assert found.returncode == -signal.SIGKILL
    assert path.read_text() == "old" and names(tmp_path) == {"file", "file.tmp"}
    # The next writer overwrites the draft that was left.
    with atomic_file.replacing(path, draft_name="file.tmp") as draft:
        draft.write_text("new")
    assert path.read_text() == "new" and names(tmp_path) == {"file"}


@pytest.mark.parametrize(
    "durable, expected",
    [
        (True, ["sync of a file", "rename", "sync of a folder"]),
        (False, ["rename"]),
    ],
)
def test_the_file_is_on_disk_before_the_rename_and_the_rename_after_it(
    tmp_path, monkeypatch, durable, expected
):
    path, events = tmp_path / "file", []
    replace = os.replace

    def fsync(descriptor):
        is_folder = stat.S_ISDIR(os.fstat(descriptor).st_mode)
        events.append(f"sync of a {'folder' if is_folder else 'file'}")

    def rename(*paths):
        events.append("rename")
        replace(*paths)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "replace", rename)
    atomic_file.replace_text(path, "new", durable=durable)
    assert events == expected and path.read_text() == "new"


@pytest.mark.parametrize(
    "code, is_forgiven", [(errno.EINVAL, True), (errno.EIO, False)]
)
def test_a_filesystem_that_cannot_sync_folders(
    tmp_path, monkeypatch, code, is_forgiven
):
    def fsync(descriptor):
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "fsync", fsync)
    path = tmp_path / "file"
    if is_forgiven:
        atomic_file.replace_text(path, "new")
    else:
        with pytest.raises(OSError, match="Input/output error"):
            atomic_file.replace_text(path, "new")
    assert path.read_text() == "new"
