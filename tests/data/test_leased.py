"""Batches that are chosen while the run goes on."""

import threading

import pytest

from meshloom.trainer.data.leased import LeasedBatches


class Reader:
    """Loads a number as itself; notes which ones were read, and can be held up."""

    def __init__(self):
        self.read: list[int] = []
        self.may_read = threading.Event()
        self.may_read.set()

    def __call__(self, number: int):
        self.may_read.wait(10)
        self.read.append(number)
        return {"number": number}


def test_batches_are_the_upcoming_ones_and_are_read_ahead():
    reader, todo = Reader(), [4, 7, 2, 9]
    with LeasedBatches(reader, lambda: todo, prefetch=2) as batches:
        assert next(batches) == {"number": 4}
        todo.pop(0)
        assert next(batches) == {"number": 7}
    assert sorted(reader.read) in ([2, 4, 7], [2, 4, 7, 9])  # nothing twice


def test_what_is_not_wanted_any_more_is_not_given_out():
    reader, todo = Reader(), [1, 2, 3]
    with LeasedBatches(reader, lambda: todo, prefetch=2) as batches:
        assert next(batches) == {"number": 1}
        todo[:] = [8, 2]
        assert next(batches) == {"number": 8}
        todo[:] = [2]
        assert next(batches) == {"number": 2}
        todo.clear()
        with pytest.raises(StopIteration):
            next(batches)


def test_closing_waits_for_reads_that_are_under_way():
    reader = Reader()
    batches = LeasedBatches(reader, lambda: [1, 2, 3], prefetch=2)
    assert next(batches) == {"number": 1}
    batches.close()
    names = [thread.name for thread in threading.enumerate()]
    assert not any(name.startswith("batches") for name in names)


def test_an_error_of_a_read_is_raised():
    def fail(number):
        raise ValueError(f"batch {number} is torn")

    with (
        LeasedBatches(fail, lambda: [5], prefetch=2) as batches,
        pytest.raises(ValueError, match="batch 5 is torn"),
    ):
        next(batches)
