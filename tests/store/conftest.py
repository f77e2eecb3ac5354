"""Every kind of store, empty, and a way to come back after its process died."""

from collections.abc import Callable, Iterator

import pytest

from meshloom.service.store.sqlite import SqliteStore
from meshloom.service.store.store import Store


@pytest.fixture
def open_store(tmp_path) -> Iterator[Callable[[], Store]]:
    """Opens the store of this test, the same one every time."""
    made: list[Store] = []

    def open_one() -> Store:
        made.append(SqliteStore(tmp_path / "store.db"))
        return made[-1]

    yield open_one
    for store in made:
        store.close()


@pytest.fixture
def store(open_store) -> Store:
    return open_store()
