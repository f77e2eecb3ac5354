"""A group tells a process which one it is; several groups can train at a time."""

import concurrent.futures
import errno
import os

import pytest
from memory_store import MemoryStore

from meshloom.launch.exit_codes import Unreachable
from meshloom.trainer.job.group import Group
from meshloom.trainer.record.failures import CorruptCheckpoint, Unreadable

# What the user must fix; a ValueError counts only if our own code raised it.
FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def together(size, function, store=None, name="run", **settings):
    """Runs function(group) in a thread per process; returns results or errors."""
    shared = store or MemoryStore(size)

    def one(index):
        group = Group(index, size, shared.view(index), name=name, **settings)
        try:
            return function(group)
        except Exception as error:
            return error

    with concurrent.futures.ThreadPoolExecutor(size) as pool:
        return list(pool.map(one, range(size), timeout=60))


def test_process_0_judges_what_all_report():
    def ask(group):
        report = {"square": group.index**2}
        return group.consult("sum", report, lambda rs: {"all": [*rs]})["all"]

    squares = [{"square": n**2} for n in range(4)]
    assert together(4, ask) == [squares] * 4


def test_questions_in_a_row_do_not_mix():
    def ask(group):
        return [
            group.consult("n", {"n": group.index + i}, lambda rs: {"n": rs[-1]["n"]})
            for i in range(5)
        ]

    expected = [{"n": 2 + i} for i in range(5)]
    assert together(3, ask) == [expected] * 3


def test_two_groups_train_in_the_same_processes_without_meeting():
    """Each process runs both, in threads that interleave in any order."""
    size, shared = 2, MemoryStore(2)

    def train(name, order):
        def steps(group):
            found = []
            for step in range(20):
                if order[group.index]:
                    group.wait(f"step {step}", 30)
                answer = group.consult("step", {"by": name}, lambda rs: {"by": rs})
                found.append(answer["by"])
                if not order[group.index]:
                    group.wait(f"step {step}", 30)
            return found

        return together(size, steps, shared, name)

    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        names, orders = ("a", "b"), ((True, True), (False, False))
        results = list(pool.map(train, names, orders, timeout=60))
    for name, found in zip(names, results, strict=True):
        assert found == [[[{"by": name}] * size] * 20] * size


def test_a_name_used_twice_in_one_store_is_detected():
    """The store of this test raises if a key is used twice."""
    shared = MemoryStore(2)
    assert together(2, lambda group: group.wait("a", 5), shared) == [None, None]
    again = together(2, lambda group: group.wait("a", 5), shared)
    assert all("is used twice" in str(error) for error in again)


def test_who_did_not_arrive_is_named():
    def late(group):
        if group.index != 1:
            group.wait("the bridge", 0.2)

    first, second, third = together(3, late, hosts=("a", "b", "c"))
    assert second is None
    for error in (first, third):
        assert isinstance(error, Unreachable)
        assert str(error) == (
            "waited 0.2 s for every process of this job at 'the bridge', but process 1 "
            "on b did not arrive. Look at its log."
        )


@pytest.mark.parametrize(
    "errors, expected",
    [
        ((None, FULL), (ValueError, "process 1 failed.*No space left")),
        ((Unreadable("x"), CorruptCheckpoint("torn")), (CorruptCheckpoint, "torn")),
        ((None, Unreadable("slow")), (Unreadable, "process 1 failed.*slow")),
        ((None, KeyError("bug")), (Unreachable, "process 1 failed.*bug")),
    ],
)
def test_all_fail_alike(errors, expected):
    def work(group):
        with group.all_or_none("work", 30):
            if (error := errors[group.index]) is not None:
                raise error

    kind, message = expected
    first, second = together(2, work)
    with pytest.raises(kind, match=message):
        raise first
    # The process that met what all raise has its own error.
    assert second is errors[1]


def test_an_exchange_judges_only_what_went_well():
    judged = []

    def ask(group, fails):
        def work():
            if fails and group.index == 1:
                raise FULL
            return {"n": group.index}

        def judge(reports):
            judged.append(reports)
            return {"sum": sum(report["n"] for report in reports)}

        return group.exchange("sum", work, judge, 30)

    assert together(3, lambda group: ask(group, False)) == [{"sum": 3}] * 3
    assert len(judged) == 1
    found = together(3, lambda group: ask(group, True))
    kinds = [type(error) for error in found]
    assert kinds == [ValueError, OSError, ValueError] and len(judged) == 1


def test_a_group_of_one_needs_no_store():
    group = Group()
    group.wait("anything")
    assert group.consult("x", {"a": 1}, lambda rs: {"found": rs}) == {
        "found": [{"a": 1}]
    }
    with pytest.raises(ValueError, match="mine"), group.all_or_none():
        raise ValueError("mine")
    assert group.is_first and group.describe(0) == "process 0"


def test_trainings_one_after_the_other_have_names_of_their_own():
    first, second = Group.of_jax(), Group.of_jax()
    assert first.key("0 start") != second.key("0 start")
    assert Group.of_jax("mine").key("x") == Group.of_jax("mine").key("x")


def test_what_cannot_be_a_group_is_refused():
    with pytest.raises(ValueError, match="process 2 is not one of 2, counted from 0"):
        Group(2, 2)
    with pytest.raises(ValueError, match="a group of 2 processes needs a store"):
        Group(0, 2)
