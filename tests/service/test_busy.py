"""A checkpoint that takes long makes learners wait, and nobody gives up."""

import time
import types

import pytest
import trees

from meshloom.service.coordinator import coordinator, servers
from meshloom.service.learner import client
from meshloom.service.rounds.policy import make_policy
from meshloom.service.server.store import BlockStore
from meshloom.service.wire.errors import Unavailable

ROUNDS = 2
SAVE_SECONDS = 0.8


@pytest.fixture
def slow_saves(monkeypatch):
    save = BlockStore.save

    def slow(store, folder, version):
        time.sleep(SAVE_SECONDS)
        return save(store, folder, version)

    monkeypatch.setattr(BlockStore, "save", slow)
    monkeypatch.setattr(coordinator, "ANSWER_SECONDS", 0.1)
    monkeypatch.setattr(client, "RETRY_SECONDS", 0.3)
    monkeypatch.setattr(client, "PAUSE_SECONDS", 0.05)


@pytest.mark.parametrize("is_below", [False, True])
def test_learners_wait_for_a_checkpoint(tmp_path, slow_saves, is_below):
    policy = make_policy("sync" if is_below else "async")
    update = {"kind": "optimizer", "optimizer": {"name": "AdamW"}, "num_steps": ROUNDS}
    update["schedule"] = {"name": "Constant", "value": 0.01}
    spec = {"num_rounds": ROUNDS, "save_every": 1, "update": update}
    with trees.service(tmp_path, policy, 2, **spec) as service:
        address = service.merger().address if is_below else service.address
        learners = [trees.Learner(service, i, address) for i in range(2)]

        def live(learner):
            row = {"step": 0, "eval_loss": 1.0}
            learner.run(lambda _: learner.exchange.report("eval", row))

        trees.at_once([lambda: live(learners[0]), lambda: live(learners[1])])
        parts = [part for row in service.commits() for part in row["contributions"]]
        assert {part["incarnation"] for part in parts} == {1}


class Silent:
    """A channel to a server that never answers; its clock shows the deadlines."""

    def __init__(self):
        self.now = 0.0

    def call(self, method, message, seconds):
        self.now += seconds
        raise Unavailable(f"s0:1: no answer to {method} in time")


@pytest.mark.parametrize(("method", "limit"), [("Apply", 300.0), ("Save", 3600.0)])
def test_a_checkpoint_may_take_longer_than_a_commit(method, limit, monkeypatch):
    channel = Silent()
    clock = types.SimpleNamespace(monotonic=lambda: channel.now)
    monkeypatch.setattr(servers, "time", clock)
    monkeypatch.setattr(servers, "RETRY_SECONDS", 0.01)
    server = servers.RemoteServer("s0", "s0:1", channel)
    with pytest.raises(servers.ServerLost) as error:
        server.call(method, {})
    assert limit <= channel.now < limit + 1
    remedy = "in time of 3600 s. Use a faster disk for checkpoints, or more servers"
    assert (remedy in str(error.value)) == (method == "Save")
