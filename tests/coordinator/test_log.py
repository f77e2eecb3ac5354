"""The durable log: order, atomic groups, one writer."""

import sqlite3

import pytest

from meshloom.service.coordinator.log import Log


@pytest.fixture
def path(tmp_path):
    return tmp_path / "folder" / "coordinator.db"


def test_entries_come_back_in_order_and_by_job(path):
    log = Log(path)
    first = log.append("a", "event", {"x": 1})
    second, third = log.append_all("a", [("event", {"x": 2}), ("commit", {"x": 3})])
    other = log.append("b", "event", {"x": 4})
    log.close()
    log = Log(path)
    assert first < second < third < other
    assert [(e.seq, e.kind, e.body["x"]) for e in log.read("a")] == [
        (first, "event", 1),
        (second, "event", 2),
        (third, "commit", 3),
    ]
    assert [e.body for e in log.read("b")] == [{"x": 4}]
    assert log.jobs() == ["a", "b"]
    log.close()


def test_a_group_is_written_whole_or_not_at_all(path):
    log = Log(path)
    with pytest.raises(ValueError):
        log.append_all("a", [("event", {}), ("event", {"x": float("nan")})])
    assert log.read("a") == []
    log.close()


def test_what_was_appended_is_on_disk_before_the_log_is_closed(path):
    log = Log(path)
    log.append("a", "event", {"x": 1})
    # Another connection sees it: it was committed, not only buffered.
    with sqlite3.connect(path) as reader:
        assert reader.execute("SELECT COUNT(*) FROM entries").fetchone() == (1,)
        assert reader.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    reader.close()
    assert log._connection.execute("PRAGMA synchronous").fetchone() == (2,)  # FULL
    log.close()


def test_a_second_writer_is_refused_until_the_first_is_gone(path):
    log = Log(path)
    with pytest.raises(ValueError, match="another coordinator is writing this log"):
        Log(path)
    log.close()
    Log(path).close()


def test_a_file_that_is_no_log_is_refused_by_name(path):
    path.parent.mkdir()
    path.write_text("this is not a database, but it is long enough to look like one")
    with pytest.raises(ValueError, match=r"coordinator.db: cannot be used as the log"):
        Log(path)
    path.unlink()
    Log(path).close()  # the lock was released
