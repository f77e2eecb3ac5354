"""Blocks with two copies: servers die, come and go, and the parameters are the same.

The processes are real but for their memory: coordinator, servers and learners are in
this one, and talk over sockets. A server is killed by closing its port.
"""

import os
import threading
import time
from importlib import metadata

import pytest
from job_specs import job_spec
from playing import Player
from worlds import LEASE, LIMIT, World

from meshloom.service.blocks import hashing
from meshloom.service.blocks.layout import Leaf, make_layout
from meshloom.service.coordinator import moving
from meshloom.service.coordinator.history import make_history
from meshloom.service.learner import mover
from meshloom.service.rounds.policy import Outer, Policy
from meshloom.service.server import server as server_lib
from meshloom.service.server.job_store import JobStore
from meshloom.service.wire.calls import Channel
from meshloom.service.wire.errors import Unavailable

LEAVES = [
    Leaf("table", (60, 40), "float32", (None, "embed")),
    Leaf("up", (3, 20, 40), "bfloat16", ("layer", None, "ff")),
    Leaf("scale", (), "float32", ()),
]
LAYOUT = make_layout(LEAVES, block_bytes=400)
ROUNDS = 12


def spec_of(**changes):
    outer = Outer(learning_rate=0.7, momentum=0.9, nesterov=True)  # with a state
    policy = Policy(local_steps=2, outer=outer, quorum=1.0)
    facts = {"num_rounds": ROUNDS, "version": metadata.version("meshloom")}
    return job_spec(policy, LAYOUT, **{"copies": 2, **facts, **changes})


@pytest.fixture
def make_world(tmp_path, monkeypatch):
    monkeypatch.setattr(server_lib, "BEAT_SECONDS", 0.5)
    monkeypatch.setattr(server_lib, "RETRY_SECONDS", 0.1)
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)  # no power is lost
    worlds: list[World] = []

    def make(name: str, num_servers: int) -> World:
        worlds.append(World(tmp_path / name, num_servers))
        return worlds[-1]

    yield make
    for world in worlds:
        world.close()


def play(world: World, acts=(), holds=(), **changes) -> list[Player]:
    """Plays a job to its end.

    Args:
      acts: {round: what to do before learner 0 begins it}.
      holds: the same, once learner 0 has pushed it, before it contributes.
    """
    acts, holds = dict(acts), dict(holds)

    def doing(things):
        return lambda round: things.pop(round, lambda: None)()

    spec = spec_of(**changes)
    players = [
        Player(world.address, spec, 0, doing(acts), doing(holds)).start(),
        Player(world.address, spec, 1).start(),
    ]
    for player in players:
        player.finish(LIMIT)
    assert not acts and not holds
    return players


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    """The end of a training in which nothing happens, with one copy."""
    world = World(tmp_path_factory.mktemp("whole"), 1)
    try:
        play(world, copies=1)
        return world.end()
    finally:
        world.close()


def check_rounds(world: World) -> None:
    rows = world.rows()
    used = [[(c["learner"], c["round"]) for c in r["contributions"]] for r in rows]
    assert used == [[(0, n), (1, n)] for n in range(1, ROUNDS + 1)]


def test_a_server_is_killed_and_nothing_is_lost(make_world, expected):
    world = make_world("killed", 2)
    began = time.monotonic()
    players = play(world, {3: lambda: world.kill("s0")})
    assert world.end() == expected
    check_rounds(world)
    assert [player.joined for player in players] == [1, 1]
    assert time.monotonic() - began < 30
    assert any("server s0 is lost" in line for line in world.said), world.said
    assert any("only 1 copy of each, not 2" in line for line in world.said), world.said
    assert not any("abandoned" in line for line in world.said)
    entries = world.coordinator._log.read("run")
    placement = make_history(entries).placement
    assert placement.members == ("s1",) and placement.is_settled


def test_a_new_backup_is_filled_while_training_goes_on(make_world, expected):
    """Each of the servers that were there at first dies, one after the other.

    Learner 1 has contributed by then: what it sent is copied too.
    """
    world = make_world("refilled", 3)

    def replace(old: str, new: str, round: int):
        def act() -> None:
            world.until(lambda: world.job.engine.members[1].contributed == round)
            epoch = world.job.servers.placement.epoch
            world.kill(old)
            world.add(new)
            job = world.job
            world.until(
                lambda: (
                    job.servers.placement.epoch > epoch
                    and job.servers.placement.is_settled
                    and new in job.servers.placement.members
                )
            )

        return act

    names = {3: ("s0", "s3"), 5: ("s1", "s4"), 8: ("s2", "s5")}
    players = play(world, {n: replace(*pair, n) for n, pair in names.items()})
    assert world.end() == expected
    check_rounds(world)
    assert [player.joined for player in players] == [1, 1]
    placement = world.job.servers.placement
    assert placement.members == ("s3", "s4", "s5") and placement.is_settled
    held = world.job.servers.held
    assert sum(map(len, held.values())) == 2 * len(LAYOUT.blocks)
    assert all(blocks for blocks in held.values())
    assert not any("abandoned" in line for line in world.said)


def test_published_versions_are_copied_with_what_is_exact(make_world, tmp_path):
    """A server dies, and one that came meanwhile goes on in its place."""
    pulls = {"compression": {"push": "float32", "pull": "int8"}}
    alone = make_world("alone", 1)
    play(alone, copies=1, **pulls)
    world = make_world("packed", 2)

    def replace() -> None:
        world.add("s2")
        world.until(lambda: "s2" in world.job.servers.placement.before)
        world.kill("s0")

    play(world, {4: replace}, **pulls)
    assert world.end() == alone.end()
    assert world.job.servers.placement.members == ("s1", "s2")
    # What is saved was compared: exact parameters are among it.
    assert not any("abandoned" in line or "differ" in line for line in world.said)


def test_a_server_that_is_started_again_gets_what_it_had_received(make_world, expected):
    """It has the same name, and lost a contribution that is not contributed yet."""
    world = make_world("again", 2)

    def start_again() -> None:
        epoch = world.job.servers.placement.epoch
        world.kill("s0")
        world.add("s0")
        placed = world.job.servers
        world.until(
            lambda: (
                placed.placement.epoch > epoch + 1
                and placed.placement.is_settled
                and placed.placement.members == ("s0", "s1")
            )
        )

    play(world, holds={5: start_again})
    assert world.end() == expected
    check_rounds(world)


def test_blocks_come_from_the_other_copy_if_one_server_cannot_be_reached(
    make_world, expected, monkeypatch
):
    world = make_world("unreached", 3)
    nobody, away = "127.0.0.1:1", world.servers["s0"].address

    def channel(address: str, **about) -> Channel:
        return Channel(nobody if address == away else address, **about)

    def grow() -> None:
        monkeypatch.setattr(server_lib, "Channel", channel)
        world.add("s3")
        world.until(lambda: "s3" in world.job.servers.placement.before)

    play(world, {3: grow})
    assert world.end() == expected
    assert any(f"did not arrive from {away}" in line for line in world.said)


def test_a_server_that_comes_takes_its_share(make_world, expected):
    """What was pushed before it came, and not contributed, is pushed to it as well."""
    world = make_world("grown", 3)
    before = {}

    def grow() -> None:
        before.update({n: set(x) for n, x in world.job.servers.held.items()})
        world.add("s3")
        world.until(lambda: "s3" in world.job.servers.placement.before)

    play(world, holds={3: grow})
    assert world.end() == expected
    after = world.job.servers.held
    assert world.job.servers.placement.members == ("s0", "s1", "s2", "s3")
    # Nobody but the new server got a block.
    assert after["s3"] and all(after[name] <= before[name] for name in before)
    assert sum(map(len, after.values())) == 2 * len(LAYOUT.blocks)
    share = len(after["s3"]) / (2 * len(LAYOUT.blocks))
    assert 0.15 < share < 0.35, share  # ideally a quarter


def test_the_loss_of_both_copies_goes_back_to_a_checkpoint(make_world, expected):
    world = make_world("lost", 3)

    def kill() -> None:
        world.kill("s0")
        world.kill("s1")

    players = play(world, {7: kill})
    assert world.end() == expected
    assert [player.joined for player in players] == [2, 2]
    assert any("continues from version 4; 2 commits abandoned" in x for x in world.said)
    blocks = sorted(
        tuple(b) for r in world.rows() for c in r["contributions"] for b in c["blocks"]
    )
    assert blocks == [(2 * k, 2 * k + 2) for k in range(2 * ROUNDS)]


def test_a_contribution_that_missed_a_new_server_is_sent_to_it(
    make_world, expected, monkeypatch
):
    """Learners that do not know of it push where blocks were once they are copied."""
    world, may_settle = make_world("missed", 3), threading.Event()
    settle = moving.Moving._settle
    monkeypatch.setattr(
        moving.Moving, "_settle", lambda self: may_settle.is_set() and settle(self)
    )
    names = ["s0", "s1", "s2", "s3"]
    found = hashing.holders(LAYOUT, "run", names, 2).items()
    wanted = {block for block, servers in found if "s3" in servers}

    def grow() -> None:
        world.add("s3")
        world.until(lambda: world.job.servers.held.get("s3") == wanted)

    players = play(world, {3: grow, 5: may_settle.set})
    assert world.end() == expected
    check_rounds(world)
    assert [player.joined for player in players] == [1, 1]


def test_a_push_while_servers_are_told_is_not_the_end_of_a_round(
    make_world, expected, monkeypatch
):
    """One has given blocks away already, and the learner has not heard of it."""
    world, is_given = make_world("told", 3), threading.Event()
    place, giving = JobStore.place, []

    def one_before_the_others(self, blocks, counted):
        if not self.accepted - {*blocks}:
            return place(self, blocks, counted)
        giving.append(self)
        if giving[0] is not self:
            time.sleep(1.5)
        place(self, blocks, counted)
        is_given.set()

    monkeypatch.setattr(JobStore, "place", one_before_the_others)

    def grow() -> None:
        world.add("s3")
        assert is_given.wait(LIMIT)

    players = play(world, {3: grow})
    assert world.end() == expected
    check_rounds(world)
    assert [player.joined for player in players] == [1, 1]


def test_a_coordinator_that_is_away_is_asked_again_where_blocks_are(monkeypatch):
    monkeypatch.setattr(mover, "PAUSE_SECONDS", 0.01)
    answers = iter([Unavailable("away"), Unavailable("away"), None])

    class Asked:
        def refresh(self):
            if (answer := next(answers)) is not None:
                raise answer

    found = mover.Mover("run", LAYOUT, Asked())  # type: ignore
    found.refresh()
    assert next(answers, "none left") == "none left"


def test_a_server_that_asks_to_leave_takes_no_block_with_it(make_world, expected):
    world = make_world("left", 3)
    before = {}

    def leave() -> None:
        before.update({n: set(x) for n, x in world.job.servers.held.items()})
        world.until(world.servers["s1"].may_leave)
        world.kill("s1")

    play(world, {3: leave})
    assert world.end() == expected
    assert world.job.servers.placement.members == ("s0", "s2")
    after = world.job.servers.held
    assert all(after[name] >= before[name] for name in ("s0", "s2"))
    assert sum(map(len, after.values())) == 2 * len(LAYOUT.blocks)
    world.until(lambda: any("server s1 has left" in line for line in world.said))
    assert not any("is lost" in line for line in world.said), world.said


def test_a_coordinator_and_a_server_that_die_together(make_world, expected):
    """The next coordinator waits for the server for a while, and goes on without it."""
    world = make_world("both", 3)

    def kill() -> None:
        port = world.port.port
        world.restart(lambda: world.kill("s2"))
        assert world.port.port == port

    players = play(world, {4: kill})
    assert world.end() == expected
    check_rounds(world)
    assert [player.joined for player in players] == [1, 1]
    assert not any("abandoned" in line for line in world.said)
    assert world.job.servers.placement.members == ("s0", "s1")


def test_a_server_that_is_back_without_its_blocks_does_not_pass_for_one_that_has_them(
    make_world, expected
):
    """The blocks are on the third one, which takes longer than a lease to come."""
    world = make_world("empty", 3)

    def kill() -> None:
        late = world.servers.pop("s2")
        late._is_closing.set()  # it is alive, but cannot reach the coordinator

        def meanwhile() -> None:
            world.kill("s0")

        world.restart(meanwhile)
        world.add("s0")
        time.sleep(LEASE + 2)
        late._is_closing.clear()
        late._register()
        late._thread = threading.Thread(target=late._beat, daemon=True)
        late._thread.start()
        world.servers["s2"] = late

    play(world, {4: kill})
    assert world.end() == expected
    check_rounds(world)
    assert not any("abandoned" in line for line in world.said), world.said
