"""What a dead learner left on the servers is removed; what may be merged is not."""

import pytest

from meshloom.service.coordinator.cleaning import CLEAN_SECONDS, Cleaner


class Staging:
    """A server's answers: what is staged there, and what it was told to drop."""

    def __init__(self, server, staged):
        self.staged, self.dropped = [list(key) for key in staged], []
        server.drop = self.drop
        inner = server.status
        server.status = lambda m: {**inner(m), "staged": self.staged}

    def drop(self, message):
        gone = message["contributions"]
        self.dropped.append(gone)
        before = len(self.staged)
        owners = [owner[:2] for owner in gone]
        self.staged = [key for key in self.staged if key[:2] not in owners]
        return {"bytes": 10 * (before - len(self.staged))}


@pytest.fixture
def house(make_house):
    """Two learners in round 1; learner 1 has left."""
    house = make_house(policy={"quorum": 1, "late": "drop", "grace": 500.0})
    house.start()
    for learner in range(2):
        house.ask("join", learner=learner)
    house.initialize()
    house.ask("leave", learner=1, incarnation=1)
    return house


def clean(house, staged) -> Staging:
    staging = [Staging(server, staged) for server in house.servers]
    cleaner = Cleaner(house.job)
    cleaner.clean_if_due()
    assert not staging[0].dropped  # not yet
    house.time += CLEAN_SECONDS
    house.said.clear()
    cleaner.clean_if_due()
    cleaner.clean_if_due()
    assert staging[0].dropped == staging[1].dropped
    return staging[0]


def test_pieces_of_a_dead_learner_are_removed_and_said(house):
    staging = clean(house, [(0, 0, 0), (0, 1, 1), (1, 1, 1), (1, 1, 2)])
    assert staging.dropped == [[[1, 1, None]]]
    assert house.said == [
        "run: removed 2 staged contributions (40 bytes) of learners that left: 1 "
        "(incarnation 1)"
    ]


def test_those_of_living_learners_stay(house):
    staging = clean(house, [(0, 1, 1), (0, 1, 2)])
    assert (staging.dropped, house.said) == ([], [])


def test_an_earlier_incarnation_is_dead(house):
    house.ask("join", learner=1)
    staging = clean(house, [(1, 1, 1), (1, 2, 1)])
    assert staging.dropped == [[[1, 1, None]]]


def test_a_contribution_that_may_be_merged_stays(make_house):
    house = make_house(policy={"quorum": 2, "late": "drop"}, num_learners=3)
    house.start()
    for learner in range(3):
        house.ask("join", learner=learner)
    house.initialize()
    house.stage(1, 1, 1, 1.0)
    house.contribute(1, 1, 1, 0)
    house.ask("leave", learner=1, incarnation=1)
    staging = clean(house, [(1, 1, 1)])
    assert staging.dropped == []
