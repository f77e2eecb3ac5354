"""The files of a job grow with it; what is read of them does not."""

import json
import tracemalloc
from pathlib import Path

import pytest

from meshloom.service.coordinator.history import make_history
from meshloom.service.coordinator.run_files import RowFile, RunFiles

ROWS = 20_000
EMPTY = make_history([])


def row(step: int) -> dict:
    return {"step": step, "text": "x" * 200}


def bytes_read() -> int:
    """Returns how many bytes this process has read of files so far."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(dict(line.split(": ") for line in lines)["rchar"])


@pytest.fixture(scope="module")
def long(tmp_path_factory) -> RowFile:
    file = RowFile(tmp_path_factory.mktemp("rows") / "rows.jsonl")
    lines = (json.dumps(row(step)) + "\n" for step in range(ROWS))
    file.path.write_text("".join(lines))
    return file


def test_a_restart_does_not_hold_a_long_file_in_memory(long):
    size = long.path.stat().st_size
    tail = [row(step) for step in range(ROWS - 10, ROWS)]
    tracemalloc.start()
    long.restore(tail, kept=ROWS - 10)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert long.path.stat().st_size == size > 4 << 20
    assert peak < 3 << 20


@pytest.mark.parametrize("spoil", [b"", b'{"step": 9', b"{}\n", b"{}\n{}\n" * 9])
def test_what_follows_the_rows_that_are_kept_is_that_of_the_log(tmp_path, spoil):
    file = RowFile(tmp_path / "rows.jsonl")
    file.restore(map(row, range(6)))
    whole = file.path.read_bytes()
    for kept, size in ((0, 0), (2, 700), (4, 1000), (6, len(whole))):
        file.path.write_bytes(whole[:size] + spoil)
        assert not file.is_untouched or file.path.read_bytes() == whole
        file.restore(map(row, range(kept, 6)), kept)
        assert file.path.read_bytes() == whole and file.is_untouched
    file.append(row(6))
    assert file.is_untouched
    with pytest.raises(ValueError, match="has 7 rows, expected at least 8, which are"):
        file.restore([], 8)


def test_files_that_nobody_has_touched_are_not_read_to_compact_the_log(tmp_path):
    files = RunFiles(tmp_path)
    files.create({})
    files.restore(EMPTY)
    for step in range(ROWS // 4):
        for file in (files.commits, files.metrics, files.eval):
            file.append(row(step))
    before = bytes_read()
    files.make_durable(EMPTY)
    assert bytes_read() - before < 10_000
    assert files.commits.path.stat().st_size > 1 << 20


def test_files_that_somebody_has_touched_are_made_right_before_that(tmp_path):
    files = RunFiles(tmp_path)
    files.create({})
    files.restore(EMPTY)
    files.metrics.path.write_text("{}\n")
    files.make_durable(EMPTY)
    assert files.metrics.path.read_text() == ""
