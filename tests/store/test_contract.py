"""What every store does alike: one suite for the embedded one and for a real etcd."""

import threading
import time

import pytest

from meshloom.service.store.election import look, try_to_lead
from meshloom.service.store.store import (
    Condition,
    Delete,
    Deposed,
    Item,
    Put,
    Store,
    get,
)

pytestmark = pytest.mark.processes


def put(store: Store, key: str, value: str = "x", lease: int | None = None) -> int:
    revision = store.transact([], [Put(key, value, lease)])
    assert revision is not None
    return revision


def keys(store: Store, prefix: str, **options) -> list[str]:
    return [item.key for item in store.range(prefix, **options).items]


def test_an_empty_store_has_nothing(store):
    assert store.range("a").items == [] and get(store, "a") is None


def test_what_is_put_is_read_with_its_revisions(store):
    first = put(store, "a", "é \n 0")
    assert get(store, "a") == Item("a", "é \n 0", first, first)
    second = put(store, "a", "")
    assert second > first
    assert get(store, "a") == Item("a", "", first, second)
    assert store.range("a").revision == second


def test_ranges_are_in_order_of_keys_and_limited(store):
    for key in ("b/2", "b/10", "a", "b", "c", "b/1"):
        put(store, key)
    assert keys(store, "b/") == ["b/1", "b/10", "b/2"]
    assert keys(store, "b") == ["b", "b/1", "b/10", "b/2"]
    assert keys(store, "b/", limit=2) == ["b/1", "b/10"]
    assert keys(store, "b/", limit=1, reverse=True) == ["b/2"]
    assert get(store, "b/1") is not None and get(store, "b/") is None


def test_a_long_range_is_complete(store, monkeypatch):
    from meshloom.service.store import etcd

    monkeypatch.setattr(etcd, "PAGE", 7)
    names = [f"n/{i:03d}" for i in range(23)]
    store.transact([], [Put(name, name) for name in names])
    assert keys(store, "n/") == names
    assert keys(store, "n/", limit=14) == names[:14]
    assert keys(store, "n/", limit=9) == names[:9]


def test_a_transaction_happens_whole_or_not_at_all(store):
    revision = put(store, "a", "1")
    wrong = Condition("a", "modified", revision + 1)
    right = Condition("a", "modified", revision)
    absent = Condition("b", "created", 0)
    changes = [Put("a", "2"), Put("b", "1")]
    assert store.transact([right, absent, wrong], changes) is None
    assert keys(store, "b") == []
    done = store.transact([right, absent], changes)
    assert done is not None and done > revision
    assert store.transact([right, absent], changes) is None  # no longer
    assert [item.modified for item in store.range("").items] == [done, done]


def test_created_and_modified_are_told_apart(store):
    created = put(store, "a", "1")
    modified = put(store, "a", "2")
    assert store.transact([Condition("a", "created", modified)], [Put("c", "")]) is None
    assert store.transact([Condition("a", "modified", created)], [Put("c", "")]) is None
    both = [Condition("a", "created", created), Condition("a", "modified", modified)]
    assert store.transact(both, [Delete("a"), Put("b", "")]) is not None
    again = put(store, "a", "3")
    assert again > modified
    assert store.transact([Condition("a", "created", created)], [Put("c", "")]) is None
    assert keys(store, "") == ["a", "b"]


def test_deleting_what_is_not_there_is_fine(store):
    store.transact([], [Delete("a")])
    assert keys(store, "") == []


def test_a_key_twice_is_refused(store):
    with pytest.raises(ValueError, match="a transaction with a key twice"):
        store.transact([], [Put("a", "1"), Delete("a")])


def test_what_was_written_is_there_after_opening_again(open_store):
    store = open_store()
    revision = put(store, "a", "1")
    store.close()
    store = open_store()
    assert get(store, "a") == Item("a", "1", revision, revision)
    assert put(store, "b") > revision


def test_the_keys_of_a_lease_vanish_when_it_is_revoked(store):
    lease, other = store.lease(30), store.lease(30)
    put(store, "a", lease=lease.id)
    put(store, "b", lease=lease.id)
    put(store, "b")  # written again without it
    put(store, "c", lease=other.id)
    put(store, "d")
    revision = store.range("").revision
    assert lease.remaining() > 0
    lease.revoke()
    assert lease.remaining() <= 0
    assert keys(store, "") == ["b", "c", "d"]
    assert store.range("").revision > revision
    lease.revoke()  # again, which is fine
    other.revoke()


def test_the_keys_of_a_lease_vanish_with_its_process(open_store):
    store = open_store()
    lease = store.lease(2)
    put(store, "a", lease=lease.id)
    put(store, "b")
    store.close()  # without revoking: as if it was killed
    lease._ended.set() if hasattr(lease, "_ended") else None
    store, deadline = open_store(), time.monotonic() + 20
    while keys(store, "a"):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert keys(store, "") == ["b"]


def test_a_lease_lasts_as_long_as_it_is_held(store):
    lease = store.lease(2)
    put(store, "a", lease=lease.id)
    time.sleep(3.5)
    assert keys(store, "a") == ["a"] and lease.remaining() > 0
    lease.revoke()


def test_watching_sees_what_changed_before_and_after(store):
    revision = put(store, "a/1")
    began = time.monotonic()
    assert not store.watch("a/", revision, 0.3)
    assert time.monotonic() - began >= 0.25
    put(store, "b")
    assert not store.watch("a/", revision, 0.3)  # another prefix
    timer = threading.Timer(0.3, put, (store, "a/2"))
    timer.start()
    assert store.watch("a/", revision, 20)
    timer.join()
    assert store.watch("a/", revision, 20)  # still later than that revision
    revision = store.range("a/").revision
    assert not store.watch("a/", revision, 0.3)
    store.transact([], [Delete("a/1")])
    assert store.watch("a/", revision, 20)


def test_one_leads_at_a_time_and_terms_grow(store):
    first = try_to_lead(store, "one:1", 30)
    assert first is not None and first.term == 1
    first.check()
    assert look(store).address == "one:1"
    assert try_to_lead(store, "two:2", 30) is None
    assert store.transact([first.fence], [Put("a", "1")]) is not None
    first.resign()
    assert look(store).address is None
    second = try_to_lead(store, "two:2", 30)
    assert second is not None and second.term == 2
    assert look(store).address == "two:2"
    assert store.transact([first.fence], [Put("a", "0")]) is None
    assert store.transact([second.fence], [Put("a", "2")]) is not None
    with pytest.raises(Deposed, match=r"\(term 1\) is no longer the leader"):
        first.check()
    second.check()
    second.resign()


def test_of_many_that_try_at_once_one_leads(store):
    found, start = [], threading.Barrier(4)

    def run(name: str) -> None:
        start.wait()
        found.append(try_to_lead(store, name, 30))

    threads = [threading.Thread(target=run, args=(f"c:{i}",)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (leader,) = [one for one in found if one is not None]
    assert leader.term == 1 and len(found) == 4
    leader.resign()
