"""The initial parameters reach the servers, whatever happens while they are sent."""

import numpy as np
import pytest
import trees
from services import wait

from meshloom.service.blocks.box import Box
from meshloom.service.coordinator.job import Job
from meshloom.service.learner import attachment
from meshloom.service.learner.shards import to_pieces
from meshloom.service.rounds.policy import make_policy
from meshloom.service.wire import tensors
from meshloom.service.wire.errors import Unavailable

ROUNDS = 2
HALF = Box((0, 0), (trees.SHAPE[0], trees.SHAPE[1] // 2))


@pytest.fixture
def service(tmp_path):
    policy = make_policy("local-sgd", local_steps=1)
    with trees.service(tmp_path, policy, 1, num_rounds=ROUNDS) as made:
        yield made


@pytest.fixture
def losing(monkeypatch):
    """Makes servers lose what they have, after it was sent; returns the answers."""
    answers = []

    def lose(times: int) -> list[str]:
        initialize = Job.initialize

        def after_a_loss(job, message):
            if len(answers) < times:  # as a service has them that was started anew
                job.servers.all("Forget", {})
                job.servers.create(job.spec.message)
            answer = initialize(job, message)
            answers.append(answer["state"])
            return answer

        monkeypatch.setattr(Job, "initialize", after_a_loss)
        return answers

    return lose


@pytest.mark.parametrize("is_below", [False, True])
def test_servers_that_lost_the_initial_parameters_get_them_again(
    service, losing, is_below
):
    address = service.merger().address if is_below else service.address
    learner = trees.Learner(service, 0, address)
    answers = losing(1)
    trees.at_once([lambda: learner.run(lambda round: None)])
    assert answers == ["push", "ok"]
    assert service.final()["version"] == ROUNDS


def test_what_a_killed_learner_has_sent_of_them_is_not_in_the_way(service):
    """It may have had another mesh: here, half of each row."""
    killed = trees.Learner(service, 0, service.address).exchange._attached
    killed.open(service.spec)
    half = np.zeros((trees.SHAPE[0], trees.SHAPE[1] // 2), np.float32)
    killed.mover.push(to_pieces(trees.LAYOUT, {(0, HALF): half}, None), 0, 0, 0)
    killed.close()
    learner = trees.Learner(service, 0, service.address)
    trees.at_once([lambda: learner.run(lambda round: None)])
    start = np.linspace(-1, 1, trees.SIZE, dtype=np.float32).reshape(trees.SHAPE)
    assert np.array_equal(service.read[0, 1, 1], start)


def test_a_flip_on_their_way_is_not_the_users_fault(service, monkeypatch):
    """Even in a header, which says what the rest is."""
    encode, flipped = tensors.encode, []

    def flipping(arrays):
        data = bytearray(b"".join(encode(arrays)))
        if not flipped:
            data[10] ^= 1
            flipped.append(len(data))
        return iter([bytes(data)])

    monkeypatch.setattr(tensors, "encode", flipping)
    learner = trees.Learner(service, 0, service.address)
    trees.at_once([lambda: learner.run(lambda round: None)])
    assert flipped and service.final()["version"] == ROUNDS


def test_a_learner_does_not_send_them_for_ever(service, losing, monkeypatch):
    monkeypatch.setattr(attachment, "MAX_MOVES", 2)
    learner = trees.Learner(service, 0, service.address)
    answers = losing(99)
    with pytest.raises(Unavailable, match="were sent 2 times in vain: servers of the"):
        learner.run(lambda round: None)
    assert answers == ["push"] * 2


def test_a_learner_that_the_service_does_not_know_joins_again(service):
    """Of a service whose folder was removed, say: nobody is waited for in vain."""
    learner = trees.Learner(service, 0, service.address)
    told = []

    def before_round(round):
        if round == 2:
            job = service._center._drivers["run"].job
            wait(lambda: job.engine.version == 1)
            job.members.remove(0)
            told.append(round)

    with pytest.raises(Unavailable, match="this learner must join again: join again"):
        learner.run(before_round)
    assert told == [2]
