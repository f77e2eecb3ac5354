"""A log is compacted alike in the embedded store and in a real etcd."""

import pytest

from meshloom.service.coordinator.log import Entry, Log
from meshloom.service.store.election import try_to_lead

pytestmark = pytest.mark.processes


def open_log(store) -> Log:
    leadership = try_to_lead(store, "one:1", 30)
    assert leadership is not None
    return Log(store, leadership)


def test_many_entries_make_place_for_a_snapshot(open_store):
    log = open_log(open_store())
    log.append("a", "spec", {})
    for x in range(250):  # more than etcd takes in one transaction
        log.append("a", "event", {"x": x})
    log.append("b", "spec", {})
    assert log.compact("a", Entry(249, "snapshot", {"x": "all"}))[0] == 248
    log.close()
    log = open_log(open_store())
    found = [(e.seq, e.kind, e.body.get("x")) for e in log.read("a")]
    assert found == [
        (1, "spec", None),
        (249, "snapshot", "all"),
        (250, "event", 248),
        (251, "event", 249),
    ]
    assert log.append("a", "event", {}) == 253
    assert [e.kind for e in log.read("b")] == ["spec"]
    log.close()
