"""Tests that blocks are spread over servers, and stay where they are if they can."""

import pytest

from meshloom.service.blocks.hashing import holders, owners, ranked
from meshloom.service.blocks.layout import Leaf, make_layout

LAYOUT = make_layout([Leaf("w", (2000, 4), "float32", (None, None))], block_bytes=16)
SERVERS = [f"10.0.0.{i}:7000" for i in range(8)]


def test_blocks_are_spread_evenly():
    found = list(owners(LAYOUT, "job", SERVERS).values())
    counts = [found.count(server) for server in SERVERS]
    assert sum(counts) == 2000
    # 250 +- 15 (one standard deviation); the hash is fixed, so this never flickers.
    assert 200 <= min(counts) and max(counts) <= 300


def test_a_server_that_leaves_gives_up_only_its_own_blocks():
    before = owners(LAYOUT, "job", SERVERS)
    after = owners(LAYOUT, "job", SERVERS[:-1])
    moved = [block for block in before if before[block] != after[block]]
    assert moved and all(before[block] == SERVERS[-1] for block in moved)
    # The other way round: a server that joins takes only what it holds afterwards.
    assert len(moved) == list(before.values()).count(SERVERS[-1])


def test_neither_the_order_of_servers_nor_the_process_matters():
    assert owners(LAYOUT, "job", SERVERS) == owners(LAYOUT, "job", SERVERS[::-1])
    assert ranked("job/0", ["a", "b", "c"], 1) == ("b",)  # the same in every process


def test_copies_are_on_different_servers_and_the_backup_takes_over():
    before = holders(LAYOUT, "job", SERVERS, 2)
    assert all(len(set(names)) == 2 for names in before.values())
    after = holders(LAYOUT, "job", SERVERS[:-1], 2)
    for block, names in before.items():
        kept = [name for name in names if name != SERVERS[-1]]
        assert list(after[block][: len(kept)]) == kept  # in the same order
    assert holders(LAYOUT, "job", SERVERS[:1], 2)[0] == (SERVERS[0],)


def test_jobs_are_spread_differently():
    assert owners(LAYOUT, "one", SERVERS) != owners(LAYOUT, "two", SERVERS)


def test_no_servers_is_an_error():
    with pytest.raises(ValueError, match="block job/0: there are no servers"):
        ranked("job/0", [], 2)
