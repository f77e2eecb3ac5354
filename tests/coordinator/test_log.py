"""The durable log: order, atomic groups, one writer, and files of older versions."""

import sqlite3

import pytest

from meshloom.service.coordinator.log import Entry, Log
from meshloom.service.store.store import Delete, Deposed, Put

# What version 0.1.0 wrote before the log was in a store.
OLD_SCHEMA = """
CREATE TABLE entries (
  seq INTEGER PRIMARY KEY AUTOINCREMENT,
  job TEXT NOT NULL,
  kind TEXT NOT NULL,
  body TEXT NOT NULL
);
CREATE INDEX entries_of_job ON entries (job, seq);
"""


@pytest.fixture
def path(tmp_path):
    return tmp_path / "folder" / "coordinator.db"


def test_entries_come_back_in_order_and_by_job(path):
    log = Log.embedded(path)
    first = log.append("a", "event", {"x": 1})
    second, third = log.append_all("a", [("event", {"x": 2}), ("commit", {"x": 3})])
    other = log.append("b", "event", {"x": 4})
    log.close()
    log = Log.embedded(path)
    assert first < second < third < other
    assert [(e.seq, e.kind, e.body["x"]) for e in log.read("a")] == [
        (first, "event", 1),
        (second, "event", 2),
        (third, "commit", 3),
    ]
    assert [e.body for e in log.read("b")] == [{"x": 4}]
    assert log.jobs() == ["a", "b"]
    assert log.append("a", "event", {"x": 5}) > other
    assert [e.body["x"] for e in log.read("a")] == [1, 2, 3, 5]
    log.close()


def test_numbers_go_on_after_a_group_that_was_written_last(path):
    log = Log.embedded(path)
    *_, last = log.append_all("a", [("event", {}), ("event", {}), ("event", {})])
    log.close()
    log = Log.embedded(path)
    assert log.append("a", "event", {}) == last + 1
    assert [e.seq for e in log.read("a")] == [1, 2, 3, 4]
    log.close()


def test_a_group_is_written_whole_or_not_at_all(path):
    log = Log.embedded(path)
    with pytest.raises(ValueError):
        log.append_all("a", [("event", {}), ("event", {"x": float("nan")})])
    assert log.read("a") == [] and log.jobs() == []
    log.close()


def test_what_was_appended_is_on_disk_before_the_log_is_closed(path):
    log = Log.embedded(path)
    log.append("a", "event", {"x": 1})
    # Another connection sees it: it was committed, not only buffered.
    with sqlite3.connect(path) as reader:
        query = "SELECT value FROM items WHERE key LIKE 'entries/a/%'"
        assert reader.execute(query).fetchall() == [('[["event", {"x": 1}]]',)]
        assert reader.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    reader.close()
    pragma = log._store._connection.execute("PRAGMA synchronous")  # type: ignore
    assert pragma.fetchone() == (2,)  # FULL
    log.close()


def snapshot(seq: int, **body) -> Entry:
    return Entry(seq, "snapshot", body)


def read(log: Log, job: str = "a") -> list[tuple]:
    return [(e.seq, e.kind, e.body.get("x")) for e in log.read(job)]


def test_a_snapshot_takes_the_place_of_what_came_before_it(path):
    log = Log.embedded(path)
    log.append("a", "spec", {"x": "s"})
    log.append_all("a", [("event", {"x": 1}), ("event", {"x": 2})])
    log.append("b", "event", {"x": 3})
    log.append_all("a", [("event", {"x": 4}), ("event", {"x": 5})])  # 5 and 6
    log.append("a", "event", {"x": 6})
    assert log.size("a", 5) == (2, len('[["event", {"x": 1}], ["event", {"x": 2}]]'))
    assert log.compact("a", snapshot(5, x="at 5")) == (2, 42)
    left = [(1, "spec", "s"), (5, "snapshot", "at 5"), (6, "event", 5), (7, "event", 6)]
    assert read(log) == left and read(log, "b") == [(4, "event", 3)]
    assert log.size("a", 5) == (0, 0)
    log.close()
    log = Log.embedded(path)
    assert read(log) == left
    assert log.compact("a", snapshot(7, x="at 7"))[0] == 3
    assert read(log) == [(1, "spec", "s"), (7, "snapshot", "at 7")]
    assert log.append("a", "event", {"x": 8}) == 8
    log.close()


def test_the_number_of_a_snapshot_is_not_given_again(path):
    log = Log.embedded(path)
    log.append("a", "spec", {})
    log.append("a", "event", {"x": 1})
    log.compact("a", snapshot(2, x="at 2"))
    log.close()
    log = Log.embedded(path)
    assert log.append("a", "event", {"x": 3}) == 3
    assert read(log)[1:] == [(2, "snapshot", "at 2"), (3, "event", 3)]
    log.close()


def test_what_a_killed_compaction_left_is_not_read_and_removed_by_the_next(path):
    log = Log.embedded(path)
    log.append("a", "spec", {})
    for x in range(4):
        log.append("a", "event", {"x": x})
    log._store.transact([], [Put("snapshots/a", '[3, {"x": "at 3"}]')])
    assert read(log)[1:] == [(3, "snapshot", "at 3"), (4, "event", 2), (5, "event", 3)]
    assert log.compact("a", snapshot(4, x="at 4"))[0] == 3
    assert read(log)[1:] == [(4, "snapshot", "at 4"), (5, "event", 3)]
    log.close()


def test_a_deposed_coordinator_cannot_compact(path):
    log = Log.embedded(path)
    log.append("a", "spec", {})
    log.append("a", "event", {"x": 1})
    log._store.transact([], [Delete("leader")])
    with pytest.raises(Deposed, match=r"\(term 1\) is no longer the leader"):
        log.compact("a", snapshot(2))
    log.close()
    log = Log.embedded(path)
    assert read(log)[1:] == [(2, "event", 1)]
    log.close()


def test_a_second_writer_is_refused_until_the_first_is_gone(path):
    log = Log.embedded(path)
    with pytest.raises(ValueError, match="another coordinator is writing this log"):
        Log.embedded(path)
    log.close()
    Log.embedded(path).close()


def test_every_leader_has_a_higher_term(path):
    terms = []
    for _ in range(3):
        log = Log.embedded(path)
        terms.append(log.term)
        log.close()
    assert terms == [1, 2, 3]


def test_a_deposed_coordinator_cannot_append(path):
    log = Log.embedded(path)
    log.append("a", "event", {"x": 1})
    log._store.transact([], [Delete("leader")])  # as at the end of a lease
    with pytest.raises(Deposed, match=r"\(term 1\) is no longer the leader"):
        log.append("a", "event", {"x": 2})
    for act in (log.check, log.jobs):  # and it remembers
        with pytest.raises(Deposed):
            act()
    log.close()
    log = Log.embedded(path)
    assert [e.body["x"] for e in log.read("a")] == [1]
    log.close()


def test_a_file_that_is_no_log_is_refused_by_name(path):
    path.parent.mkdir()
    path.write_text("this is not a database, but it is long enough to look like one")
    with pytest.raises(ValueError, match=r"coordinator.db: cannot be used as the log"):
        Log.embedded(path)
    path.unlink()
    Log.embedded(path).close()  # the lock was released


def test_the_entries_of_an_older_file_are_taken_over(path):
    path.parent.mkdir()
    old = sqlite3.connect(path)
    old.executescript(OLD_SCHEMA)
    rows = [("b", "spec", '{"x": 1}'), ("a", "spec", "{}"), ("b", "event", '{"x": 2}')]
    with old:
        old.executemany("INSERT INTO entries (job, kind, body) VALUES (?, ?, ?)", rows)
    old.close()
    for _ in range(2):  # and it is done once
        log = Log.embedded(path)
        assert log.jobs() == ["b", "a"]
        found = [(e.seq, e.kind, e.body) for e in log.read("b")][:2]
        assert found == [(1, "spec", {"x": 1}), (3, "event", {"x": 2})]
        assert log.append("b", "event", {"x": 3}) >= 4
        log.close()
