"""Every kind of store, empty, and a way to come back after its process died."""

import itertools
from collections.abc import Callable, Iterator

import pytest

from meshloom.service.store.etcd import EtcdStore
from meshloom.service.store.etcd_url import parse
from meshloom.service.store.sqlite import SqliteStore
from meshloom.service.store.store import Store
from meshloom.trainer.verify.etcd_cluster import Cluster, etcd_cluster

NUMBERS = itertools.count()


@pytest.fixture(scope="session")
def etcd(tmp_path_factory) -> Iterator[Cluster]:
    """One etcd for all tests: each uses a prefix of its own."""
    with etcd_cluster(tmp_path_factory.mktemp("etcd")) as cluster:
        yield cluster


@pytest.fixture(params=["sqlite", "etcd"])
def open_store(request, tmp_path) -> Iterator[Callable[[], Store]]:
    """Opens the store of this test, the same one every time."""
    if request.param == "sqlite":

        def make() -> Store:
            return SqliteStore(tmp_path / "store.db")
    else:
        cluster: Cluster = request.getfixturevalue("etcd")
        url = parse(cluster.url(f"test-{next(NUMBERS)}"))

        def make() -> Store:
            return EtcdStore(url)

    made: list[Store] = []

    def open_one() -> Store:
        made.append(make())
        return made[-1]

    yield open_one
    for store in made:
        store.close()


@pytest.fixture
def store(open_store) -> Store:
    return open_store()
