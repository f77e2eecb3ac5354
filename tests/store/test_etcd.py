"""What etcd alone does: members that fail, compaction, passwords, limits."""

import contextlib
import threading
import time

import pytest

from meshloom.service.store import etcd as etcd_module
from meshloom.service.store import etcd_http
from meshloom.service.store.election import try_to_lead
from meshloom.service.store.etcd import EtcdStore
from meshloom.service.store.etcd_http import EtcdRefused, encoded
from meshloom.service.store.etcd_url import EtcdUrl, parse
from meshloom.service.store.store import (
    Condition,
    Deposed,
    Put,
    StoreUnavailable,
    get,
)
from meshloom.trainer.verify.etcd_cluster import etcd_cluster

pytestmark = pytest.mark.processes


@pytest.fixture
def open_etcd(etcd, request):
    """Opens a store of the shared etcd under the name of the test."""
    made: list[EtcdStore] = []

    def make(options: str = "") -> EtcdStore:
        made.append(EtcdStore(parse(etcd.url(request.node.name, options))))
        return made[-1]

    yield make
    for store in made:
        store.close()


def compact(cluster, revision: int) -> None:
    body = {"revision": str(revision), "physical": True}
    cluster.post("/v3/kv/compaction", body)


def test_a_watch_behind_a_compaction_says_to_list_again(etcd, open_etcd):
    store = open_etcd()
    first = store.transact([], [Put("a", "1")])
    for i in range(5):
        last = store.transact([], [Put("b", str(i))])
    compact(etcd, last)
    began = time.monotonic()
    assert store.watch("a", first, 10)  # though "a" did not change
    assert time.monotonic() - began < 5
    assert not store.watch("a", store.range("a").revision, 0.3)


def test_a_range_that_is_compacted_between_pages_starts_again(
    etcd, open_etcd, monkeypatch
):
    store = open_etcd()
    names = [f"n/{i}" for i in range(9)]
    store.transact([], [Put(name, "") for name in names])
    monkeypatch.setattr(etcd_module, "PAGE", 4)
    call, is_first = store._call, [True]

    def compacting(path, body):
        answer = call(path, body)
        if is_first.pop() if is_first else False:
            for _ in range(2):
                revision = store.transact([], [Put("other", "")])
            compact(etcd, revision)
        return answer

    monkeypatch.setattr(store, "_call", compacting)
    assert [item.key for item in store.range("n/").items] == names
    assert not is_first


def test_an_election_whose_answer_is_lost_is_won_all_the_same(open_etcd, monkeypatch):
    store = open_etcd()
    post, lost = store._gateway._post, []

    def losing(endpoint, path, *rest):
        answer = post(endpoint, path, *rest)
        if path == "/v3/kv/txn" and not lost:
            lost.append(path)
            raise TimeoutError("lost")
        return answer

    monkeypatch.setattr(store._gateway, "_post", losing)
    leadership = try_to_lead(store, "one:1", 30)
    assert lost and leadership is not None and leadership.term == 1
    assert store.transact([leadership.fence], [Put("a", "1")]) is not None
    leadership.resign()


def test_values_and_space_have_limits_that_are_named(tmp_path):
    with etcd_cluster(tmp_path, 1, "--quota-backend-bytes", "4000000") as cluster:
        store = EtcdStore(parse(cluster.url()))
        store.transact([], [Put("a", "x" * etcd_module.MAX_BYTES)])
        with pytest.raises(ValueError, match="a has 1400001 bytes, .* at most 1400000"):
            store.transact([], [Put("a", "x" * (etcd_module.MAX_BYTES + 1))])
        with pytest.raises(ValueError, match="space exceeded.*--quota-backend-bytes"):
            for _ in range(9):
                store.transact([], [Put("a", "x" * etcd_module.MAX_BYTES)])
        assert get(store, "a") is not None
        store.close()


def enable_passwords(cluster) -> None:
    cluster.post("/v3/auth/user/add", {"name": "root", "password": "secret"})
    cluster.post("/v3/auth/role/add", {"name": "root"})
    cluster.post("/v3/auth/user/grant", {"user": "root", "role": "root"})
    cluster.post("/v3/auth/enable", {})


def test_a_password_is_read_from_a_file(tmp_path):
    user = tmp_path / "user"
    # Tokens that run out after a second: the store gets another one by itself.
    with etcd_cluster(tmp_path, 1, "--auth-token-ttl", "1") as cluster:
        enable_passwords(cluster)
        with contextlib.closing(EtcdStore(parse(cluster.url()))) as store:
            with pytest.raises(ValueError, match=r"user name is empty.*user=FILE"):
                get(store, "a")
        user.write_text("root:wrong\n")
        url = cluster.url(options=f"?user={user}")
        with contextlib.closing(EtcdStore(parse(url))) as store:
            with pytest.raises(ValueError, match="authentication failed"):
                get(store, "a")
        user.write_text("root:secret\n")
        store = EtcdStore(parse(url))
        lease = store.lease(2)
        revision = store.transact([], [Put("a", "1", lease.id)])
        time.sleep(3.5)
        assert get(store, "a") is not None and lease.remaining() > 0
        assert store.watch("", revision - 1, 5)
        assert store._gateway._token is not None
        lease.revoke()
        store.close()


def test_a_member_that_dies_or_hangs_is_passed_over(tmp_path):
    with etcd_cluster(tmp_path, 3) as cluster:
        store = EtcdStore(parse(cluster.url(options="?lease=3")))
        leadership = try_to_lead(store, "one:1", 3)
        assert leadership is not None
        stop, gaps = threading.Event(), []

        def append() -> None:
            before, number = time.monotonic(), 0
            while not stop.is_set():
                number += 1
                put = Put(f"entries/{number:06d}", "x" * 100)
                try:
                    assert store.transact([leadership.fence], [put]) is not None
                except StoreUnavailable:
                    continue
                gaps.append(time.monotonic() - before)
                before = time.monotonic()
                time.sleep(0.01)

        thread = threading.Thread(target=append)
        thread.start()
        try:
            time.sleep(0.5)
            cluster.kill(0)
            time.sleep(3)
            leadership.check()
            cluster.restart(0)
            cluster.pause(1)
            time.sleep(4)
            leadership.check()
            cluster.resume(1)
        finally:
            stop.set()
            thread.join()
        written = [item.key for item in store.range("entries/").items]
        assert len(written) >= len(gaps) > 20
        assert max(gaps) < 5  # 1 s when quiet: the limit of a first attempt
        leadership.resign()
        store.close()


def test_who_cannot_renew_stops_before_its_lease_ends(tmp_path):
    with etcd_cluster(tmp_path) as cluster:
        url = parse(cluster.url())
        store, other = EtcdStore(url), EtcdStore(url)
        leadership = try_to_lead(store, "one:1", 3)
        assert leadership is not None
        cluster.pause()
        paused = time.monotonic()
        with pytest.raises(Deposed):
            while True:
                leadership.check()
                time.sleep(0.01)
        stopped = time.monotonic() - paused
        assert stopped <= 2.1, stopped  # 2/3 of 3 s, and our own time to notice
        with pytest.raises(StoreUnavailable, match=r"no answer to /v3/kv/range in"):
            get(other, "leader")
        cluster.resume()
        deadline = time.monotonic() + 20
        while (second := try_to_lead(other, "two:2", 3)) is None:
            assert time.monotonic() < deadline
            time.sleep(0.1)
        assert second.term == 2
        assert store.transact([leadership.fence], [Put("a", "1")]) is None
        second.resign()
        store.close()
        other.close()


def test_a_renewal_survives_every_error(open_etcd, monkeypatch, caplog):
    store = open_etcd()
    lease = store.lease(2)
    store.transact([], [Put("a", "1", lease.id)])
    call, errors = store._gateway.call, [StoreUnavailable("away"), None]
    errors[1] = EtcdRefused("here", "/x", {"code": 13, "message": "internal"})

    def failing(path, body, seconds):
        if path == "/v3/lease/keepalive" and errors:
            raise errors.pop()
        return call(path, body, seconds)

    monkeypatch.setattr(store._gateway, "call", failing)
    time.sleep(3.5)
    assert not errors and lease.remaining() > 0 and get(store, "a") is not None
    assert caplog.text.count("lease not renewed, trying again") == 2
    lease.revoke()


def test_urls_name_members_prefix_and_options():
    url = parse("etcd://a:1,[::1]:2/one/two?lease=4&ca=c.pem&cert=d&key=e&user=f")
    assert url.endpoints == (("a", 1), ("::1", 2)) and url.prefix == "one/two"
    assert url.lease_seconds == 4 and str(url.ca) == "c.pem" and str(url.user) == "f"


BAD_URLS = {
    "http://a:1/x": "expected etcd://HOST:PORT",
    "etcd://a:1": "expected etcd://HOST:PORT",
    "etcd://a/x": "'a' is not HOST:PORT",
    "etcd://a:1,/x": "'' is not HOST:PORT",
    "etcd://a:1/x?lease=1": "lease=1: expected seconds, from 2 to 3600",
    "etcd://a:1/x?leese=9": "leese=9: expected lease, ca, cert, key, user",
    "etcd://a:1/x?ca=": "ca=: expected",
    "etcd://a:1/x?cert=c": "cert and key go together",
}


@pytest.mark.parametrize("url", BAD_URLS)
def test_bad_urls_are_refused_in_one_line(url):
    with pytest.raises(ValueError) as caught:
        parse(url)
    assert BAD_URLS[url] in str(caught.value)


def test_files_that_are_missing_are_named(tmp_path):
    one = (("127.0.0.1", 1),)
    with pytest.raises(ValueError, match="nowhere.*expected PEM files"):
        EtcdStore(EtcdUrl(one, "x", ca=tmp_path / "nowhere"))
    with pytest.raises(ValueError, match="nowhere: No such file"):
        EtcdStore(EtcdUrl(one, "x", user=tmp_path / "nowhere"))
    (tmp_path / "user").write_text("no colon")
    with pytest.raises(ValueError, match="expected NAME:PASSWORD"):
        EtcdStore(EtcdUrl(one, "x", user=tmp_path / "user"))


def test_a_cluster_that_is_not_there_is_named(monkeypatch):
    monkeypatch.setattr(etcd_module, "CALL_SECONDS", 0.5)
    store = EtcdStore(EtcdUrl((("127.0.0.1", 1),), "x"))
    with pytest.raises(StoreUnavailable, match=r"127.0.0.1:1: .*refused"):
        store.transact([Condition("a", "created", 0)], [])
    assert encoded("é") == "w6k=" and etcd_http.decoded("w6k=") == "é"
