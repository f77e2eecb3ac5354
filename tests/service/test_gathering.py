"""Whom a merger waits for, without clock or network."""

import pytest

from meshloom.service.merger.gathering import Gathering, Item, without
from meshloom.service.wire.sums import FIRST, tree_of


def item(learner: int, round: int = 1, arrived: float = 0.0) -> Item:
    return Item((learner, 1, round), [], 1.0, arrived)


@pytest.fixture
def gathering():
    """Three learners that were told to begin round 1."""
    made = Gathering(silence_seconds=6.0)
    for learner in range(3):
        made.hear(learner, 1, now=0.0)
        made.release(learner, 1, 1)
    return made


def ready(gathering, now: float = 0.0) -> list[int]:
    gathering.look(now)
    return [found.key[0] for found in gathering.ready(now)]


def test_it_waits_for_all_who_compute(gathering):
    for learner in (2, 0):
        gathering.add(item(learner))
    for now in (0.0, 2.0, 4.0, 6.0):
        gathering.hear(1, 1, now)
        assert ready(gathering, now) == []
    gathering.add(item(1, arrived=6.0))
    assert ready(gathering, 6.0) == [0, 1, 2]


def test_who_has_left_or_is_silent_is_not_waited_for(gathering):
    gathering.add(item(0))
    gathering.remove(1, 1)
    for now in (2.0, 4.0, 6.0):
        assert ready(gathering, now) == []
    assert ready(gathering, 6.1) == [0]


def test_silence_while_the_merger_was_paused_means_nothing(gathering):
    gathering.add(item(0))
    assert ready(gathering, 0.0) == []
    assert ready(gathering, 60.0) == []  # nobody could be heard
    assert ready(gathering, 63.0) == [] and ready(gathering, 66.0) == []
    assert ready(gathering, 66.1) == [0]


def test_who_was_not_told_to_begin_is_waited_for_a_little(gathering):
    gathering.hear(1, 2, 0.0)  # joined again: it may have done this round before
    for learner in (0, 2):
        gathering.add(item(learner, arrived=1.0))
    assert ready(gathering, 2.9) == []
    assert ready(gathering, 3.0) == [0, 2]


def test_a_sum_of_a_merger_below_stands_for_its_learners(gathering):
    key = FIRST + 1, 7, 1
    below = Item(key, [], 1.0, 0.0, tree_of(key, [(2, 1, 1), (1, 1, 1)]))
    gathering.add(below)
    assert ready(gathering) == []
    gathering.add(item(0))
    assert [found.key for found in gathering.ready(0.0)] == [(0, 1, 1), key]
    (left,) = without(gathering.ready(0.0), [(2, 1, 1)])
    assert left.key == (0, 1, 1)
    assert below.answer == {"state": "regroup", "gone": [[2, 1, 1]]}
    assert without([left], [(0, 1, 1)]) == [] and left.answer == {"state": "ok"}


def test_rounds_are_not_mixed(gathering):
    for learner in range(3):
        gathering.add(item(learner))
    gathering.add(item(3, round=2))
    assert ready(gathering) == [0, 1, 2]
    for found in gathering.ready(0.0):
        found.answer = {"state": "ok"}
    for learner in range(3):
        gathering.release(learner, 1, 2)
    assert ready(gathering) == []
