"""What a process reports as the failure of its save, and what it does not."""

import pytest

from meshloom.trainer.checkpoint.save_barrier import FAILED, SaveBarrier
from meshloom.trainer.job.group import Group
from meshloom.trainer.record.save_errors import SaveFailed


class Store(dict):
    """Of two processes, of which the other one is always there first."""

    def __init__(self):
        super().__init__()
        self.barriers: list[str] = []

    def set(self, key: str, value: str) -> None:
        self[key] = value

    def barrier(self, key: str, seconds: float) -> None:
        self.barriers.append(key)


@pytest.fixture
def store():
    return Store()


@pytest.fixture
def barrier(store):
    group = Group(0, 2, store)  # type: ignore
    return SaveBarrier(group, lambda error: SaveFailed(f"failed: {error}"))


def test_a_save_while_another_error_is_handled_has_not_failed(barrier, store):
    """As when a run is told to stop, which is an exception, and saves."""
    try:
        raise InterruptedError("told to stop")
    except InterruptedError:
        barrier.begin()
        barrier(key="start", timeout_ms=1000)
    assert dict(store) == {} and len(store.barriers) == 1


def test_an_error_of_the_save_is_reported_meanwhile(barrier, store):
    try:
        raise InterruptedError("told to stop")
    except InterruptedError:
        barrier.begin()
        try:
            raise OSError("no space")
        except OSError:
            barrier(key="cleaning up", timeout_ms=1000)
    ((key, text),) = store.items()
    assert key.endswith(FAILED) and "failed: no space" in text
    assert store.barriers == []
