"""A tree of mergers: what it computes, what it moves, and what its deaths cost."""

import functools
import json

import numpy as np
import pytest
import trees
from trees import LAYOUT, SIZE

from meshloom.service.blocks.digest import digest_of
from meshloom.service.learner import client
from meshloom.service.merger import gathering
from meshloom.service.rounds.policy import Outer, make_policy
from meshloom.service.server.store import BlockStore
from meshloom.service.server.summing import stage_sums
from meshloom.service.wire.calls import Channel
from meshloom.service.wire.errors import Refused, Unavailable
from meshloom.service.wire.sums import contributions_of, staged_parts
from meshloom.trainer.run.exchange_update import make_update

ROUNDS = 3
FRAMING = 0.05  # of gRPC, HTTP/2 and the headers of pieces, beside the elements
ADAMW = {
    "kind": "optimizer",
    "optimizer": {"name": "AdamW"},
    "schedule": {"name": "Constant", "value": 0.01},
    "num_steps": ROUNDS,
}
MODES = {
    "sync": (make_policy("sync"), {"update": ADAMW, "max_grad_norm": 0.3}),
    "local-sgd": (
        make_policy("local-sgd", local_steps=1, outer=Outer(learning_rate=0.7)),
        {},
    ),
}


def run(folder, mode: str, num_learners: int, attach, **more):
    """Trains; returns the learners, and the service after its end.

    Args:
      attach: returns the address of each learner, given the service.
    """
    policy, spec = MODES[mode]
    with trees.service(
        folder, policy, num_learners, num_rounds=ROUNDS, **spec
    ) as service:
        learners = trees.train(service, attach(service), **more)
        return learners, service, service.moved()


def flat(service):
    return [service.address] * service.num_learners


def two_mergers(service):
    half = service.num_learners // 2
    return [service.merger().address] * half + [service.merger().address] * half


def deep(service):
    """Learner 0 at the service, 1 and 2 at a merger, 3 and 4 at one below that."""
    upper = service.merger()
    lower = service.merger(upper.address)
    return [service.address, *[upper.address] * 2, *[lower.address] * 2]


def check_replay(service) -> None:
    """Computes everything again from the commit log and what learners have sent."""
    spec = json.loads((service.folder / "run" / "spec.json").read_text())
    store = BlockStore(spec, make_update=make_update)
    start = np.linspace(-1, 1, SIZE, dtype=np.float32).reshape(trees.SHAPE)
    stage(store, (0, 0, 0), start)
    blocks = range(len(LAYOUT.blocks))
    for row in service.commits():
        parts, sums = row["contributions"], row.get("sums", ())
        keys = [(p["learner"], p["incarnation"], p["round"]) for p in parts]
        for key, part in zip(keys, parts, strict=True):
            check_read(store, part["base"], service.read[key])
            stage(store, key, service.sent[key])
        weights = dict(zip(keys, (p["coefficient"] for p in parts), strict=True))
        stage_sums(store.staging, LAYOUT, blocks, sums, weights)
        store.merge(row["step"], 0, staged_parts(parts, sums), row["divisor"])
        store.apply(row["step"], row["scale"], row["update_step"], row["share"])
    lanes = store.digest_lanes(ROUNDS)
    found = {leaf.path: digest_of(leaf, lanes[leaf.path]) for leaf in LAYOUT.leaves}
    assert found == service.final()["digests"]


def check_read(store, version: int, array) -> None:
    for slab in (slab for block in LAYOUT.blocks for slab in block.slabs):
        found = store.read(version, slab.leaf, slab.box)
        assert (found == array[slab.box.slices()]).all(), (version, slab)


def stage(store, key, array) -> None:
    for block in LAYOUT.blocks:
        for i, slab in enumerate(block.slabs):
            store.stage(*key, block.index, i, slab.box.start, array[slab.box.slices()])


def check_each_counts_once(service, num_learners: int) -> None:
    blocks = []
    for row in service.commits():
        assert [p["learner"] for p in row["contributions"]] == [*range(num_learners)]
        blocks += [
            i for p in row["contributions"] for a, b in p["blocks"] for i in range(a, b)
        ]
    assert sorted(blocks) == [*range(num_learners * ROUNDS)]


@pytest.mark.parametrize("mode", MODES)
def test_two_mergers_of_four_learners_each_move_a_quarter(tmp_path, mode, caplog):
    """And compute the same, up to the order of the sums; the log replays its bits."""
    for attempt in range(3):
        caplog.clear()
        folder = tmp_path / f"tree-{attempt}"
        learners, service, moved = run(folder, mode, 8, two_mergers)
        # On a busy machine a connection may be lost; then some bytes count twice.
        if "trying again" not in caplog.text:
            break
    else:
        pytest.fail(f"connections were lost three times:\n{caplog.text}")
    alone, other, moved_flat = run(tmp_path / "flat", mode, 8, flat)
    for row in service.commits():
        assert [len(contributions_of(tree)) for tree in row["sums"]] == [4, 4]
    assert all("sums" not in row for row in other.commits())
    # Initial parameters, and then a contribution each round; a version of each round.
    once = 4 * SIZE * np.array([ROUNDS, ROUNDS + 1])
    first = 4 * SIZE * np.array([1, 0])
    for found, senders in ((moved, 2), (moved_flat, 8)):
        expected = senders * once + first
        assert (expected <= found).all(), (found, expected)
        assert (found <= expected * (1 + FRAMING)).all(), (found, expected)
    for a, b in zip(learners, alone, strict=True):
        assert (
            a.params is not None and a.params.tobytes() == learners[0].params.tobytes()
        )
        np.testing.assert_allclose(a.params, b.params, rtol=1e-5, atol=1e-7)
    losses = [
        [row["loss"] for row in made.rows("metrics.jsonl")] for made in (service, other)
    ]
    np.testing.assert_allclose(*losses, rtol=1e-6)
    assert len({round(loss, 6) for loss in losses[0]}) == ROUNDS  # it does train
    for made in (service, other):
        check_replay(made)
        check_each_counts_once(made, 8)


def test_mergers_below_mergers_and_learners_beside_them(tmp_path):
    learners, service, _ = run(tmp_path, "local-sgd", 5, deep)
    for row in service.commits():
        (tree,) = row["sums"]
        inner = [item for item in tree["of"] if isinstance(item, dict)]
        assert [contributions_of(x) for x in inner] == [
            [(3, 1, row["step"]), (4, 1, row["step"])]
        ]
        assert contributions_of(tree)[:2] == [(1, 1, row["step"]), (2, 1, row["step"])]
    check_replay(service)
    check_each_counts_once(service, 5)


@pytest.mark.parametrize("died", ["upper", "lower"])
def test_learners_go_elsewhere_when_their_merger_dies(tmp_path, died):
    """With what they had sent it, and as the same incarnation."""
    made = {}

    def attach(service):
        upper = service.merger()
        lower = service.merger(f"{upper.address},{service.address}")
        made.update(upper=upper, lower=lower)
        below = f"{lower.address},{service.address}"
        return [service.address, f"{upper.address},{service.address}", below, below]

    def before_round(learner, round):
        # Learner 3 is waited for: 1 and 2 have sent theirs to their mergers.
        if (learner, round) == (3, 2):
            wait_until_two_have_sent(made)
            made[died]._server.close(0)
            made[died].merger.close()

    learners, service, _ = run(
        tmp_path, "local-sgd", 4, attach, before_round=before_round
    )
    sizes = [
        sorted(len(contributions_of(tree)) for tree in row.get("sums", []))
        for row in service.commits()
    ]
    assert sizes[0] == [3] and sizes[2] == ([2] if died == "upper" else [1]), sizes
    parts = [part for row in service.commits() for part in row["contributions"]]
    assert {part["incarnation"] for part in parts} == {1}
    check_replay(service)
    check_each_counts_once(service, 4)


def test_a_coordinator_that_is_away_for_a_while_changes_nothing(tmp_path):
    """Learners stay at their merger, though they have the address of the service."""
    services = []

    def attach(service):
        services.append(service)
        merger = service.merger().address
        return [f"{merger},{service.address}"] * 4

    def before_round(learner, round):
        if (learner, round) == (3, 2):
            services[0].pause(2.5)  # in which each learner gives a sign of life

    learners, service, _ = run(
        tmp_path, "local-sgd", 4, attach, before_round=before_round
    )
    below = {learner.exchange._attached.place for learner in learners}
    assert len(below) == 1 and None not in below
    sizes = [[len(tree["of"]) for tree in row["sums"]] for row in service.commits()]
    assert sizes == [[4]] * ROUNDS
    parts = [part for row in service.commits() for part in row["contributions"]]
    assert {part["incarnation"] for part in parts} == {1}
    check_replay(service)


def test_a_merger_has_no_versions_of_a_history_that_was_abandoned(
    tmp_path, monkeypatch
):
    """Though it does not know that a learner below it has died with its host."""
    monkeypatch.setattr(gathering, "GRACE_SECONDS", 0.0)
    monkeypatch.setattr(client, "PAUSE_SECONDS", 0.05)
    policy, spec = MODES["local-sgd"]
    with trees.service(tmp_path, policy, 2, num_rounds=ROUNDS, **spec) as service:
        merger, incarnations = service.merger(), set()

        def before_round(learner, round):
            if round == ROUNDS and not service.losses and learner.index == 1:
                merger.merger._find({"job": "run"}).hear(99, 1)  # it has died
                service.lose_all()

        def live(index):
            while True:
                learner = trees.Learner(service, index, merger.address)
                try:
                    return learner.run(functools.partial(before_round, learner))
                except Unavailable as error:
                    assert "join again" in str(error)
                    incarnations.add((index, learner.exchange.who["incarnation"]))

        trees.at_once([lambda: live(0), lambda: live(1)])
        assert incarnations == {(0, 1), (1, 1)}
        assert [row["step"] for row in service.commits()] == [1, 2, 3]
        check_replay(service)


def wait_until_two_have_sent(mergers) -> None:
    def keys():
        jobs = [m.merger._find({"job": "run"}) for m in mergers.values()]
        return {key for job in jobs for key in job._gathering.items if key[2] == 2}

    from services import wait

    wait(lambda: {(1, 1, 2), (2, 1, 2)} <= keys())


def test_a_mode_that_may_leave_out_contributions_is_refused(tmp_path):
    policy = make_policy("backup-workers")
    with trees.service(tmp_path, policy, 4, num_rounds=ROUNDS) as service:
        channel = Channel(service.merger().address)
        with pytest.raises(Refused, match="late='drop' some may not. Let the learners"):
            channel.call("OpenJob", service.spec)
        with pytest.raises(Refused, match="there is no job 'run' here"):  # not opened
            channel.call("Status", {"job": "run"})
        channel.close()


def test_a_job_that_pulls_changes_is_refused(tmp_path):
    policy, spec = MODES["sync"]
    changes = {"push": "float32", "pull": "int8"}
    with trees.service(tmp_path, policy, 2, compression=changes, **spec) as service:
        channel = Channel(service.merger().address)
        with pytest.raises(Refused, match=r"changes \(int8\). Set exchange.pull='flo"):
            channel.call("OpenJob", service.spec)
        channel.close()


def test_what_was_sent_to_a_merger_does_not_count_at_the_service(tmp_path):
    policy, spec = MODES["local-sgd"]
    with trees.service(tmp_path, policy, 2, num_rounds=ROUNDS, **spec) as service:
        merger = service.merger()
        for address, place in ((service.address, "x"), (merger.address, "x")):
            channel = Channel(address)
            opened = channel.call("OpenJob", service.spec)
            assert (opened.get("place") is None) == (address == service.address)
            about = {"job": "run", "learner": 0, "incarnation": 1, "round": 1}
            answer = channel.call("Contribute", {**about, "place": place})
            assert answer == {"state": "elsewhere"}
            channel.close()
