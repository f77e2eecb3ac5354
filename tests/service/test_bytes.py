"""Bytes on the sockets of real servers, against those of the parameters."""

import contextlib
import math

import numpy as np
import pytest
from relays import relays

from meshloom.service.blocks import hashing
from meshloom.service.blocks.box import Box
from meshloom.service.blocks.layout import Leaf, make_layout
from meshloom.service.blocks.pieces import pieces
from meshloom.service.blocks.placement import Placement
from meshloom.service.learner.mover import Mover
from meshloom.service.learner.servers import Servers
from meshloom.service.learner.shards import to_pieces
from meshloom.service.server.server import ServerProcess
from meshloom.service.wire import codecs
from meshloom.service.wire.calls import Channel

BLOCK_BYTES = 256 << 10
# 2.1 million parameters: two large arrays, one of bfloat16, and many small ones.
LEAVES = [
    Leaf("embed/table", (512, 512), "float32", (None, "embed")),
    Leaf("blocks/up", (6, 256, 1024), "float32", ("layer", "embed", "mlp")),
    Leaf("blocks/down", (6, 256, 192), "bfloat16", ("layer", "mlp", "embed")),
    *(Leaf(f"norm/{i}", (6, 512), "float32", ("layer", None)) for i in range(8)),
]
NUM_PARAMS = sum(math.prod(leaf.shape) for leaf in LEAVES)
# Of gRPC, HTTP/2 and the headers of pieces, beside the elements.
FRAMING = 0.02
OUTER = {"learning_rate": 1.0, "momentum": 0.0, "nesterov": False}


def shards(ways: int) -> list[dict]:
    """What each process of a learner holds whose last dimensions are sharded."""
    found: list[dict] = [{} for _ in range(ways)]
    for number, leaf in enumerate(LEAVES):
        size = leaf.shape[-1] // ways
        for part in range(ways):
            start = (0,) * (len(leaf.shape) - 1) + (part * size,)
            box = Box.at(start, (*leaf.shape[:-1], size))
            random = np.random.default_rng(part).normal(size=box.shape)
            found[part][number, box] = random.astype(np.float32)
    return found


@pytest.fixture(params=[1, 3], ids="{0} fragments".format)
def service(request):
    """Two servers behind relays, a layout, and a process of a learner."""
    with serving(request.param) as found:
        yield found[:3]


@contextlib.contextmanager
def serving(fragments, pull="float32"):
    layout = make_layout(LEAVES, block_bytes=BLOCK_BYTES, fragments=fragments)
    assert len(layout.blocks) > 24
    servers = [ServerProcess(), ServerProcess()]
    with relays(*(server.address for server in servers)) as made:
        addresses = tuple(relay.address for relay in made)
        owners = hashing.owners(layout, "job", addresses)
        channels = {address: Channel(address) for address in addresses}
        placement = Placement(copies=1, before=addresses, members=addresses)
        opened = {"servers": dict(zip(addresses, addresses, strict=True))}
        opened["placement"] = placement.to_json()
        spec = {"job": "job", "policy": {"outer": OUTER, "compensation": 0.0}}
        spec |= {"layout": layout.to_json(), "update": {"kind": "outer"}}
        spec["compression"] = {"push": "float32", "pull": pull}
        for address, channel in channels.items():
            blocks = [block for block, owner in owners.items() if owner == address]
            assert len(blocks) > 2
            channel.call("Create", {"job": "job", "spec": spec, "blocks": blocks})
        servers_of = Servers("job", layout, opened, Channel, lambda: opened)
        mover = Mover("job", layout, servers_of)
        yield layout, mover, made, servers
        mover.close()
    for server in servers:
        server.close()


def moved(relays) -> np.ndarray:
    """Bytes sent to servers, and received from them, since the last time."""
    found = np.array([sum(r.up for r in relays), sum(r.down for r in relays)])
    for relay in relays:
        relay.up = relay.down = 0
    return found


@pytest.mark.parametrize("processes", [1, 2], ids="{0} processes".format)
def test_a_round_moves_the_parameters_once_each_way(service, processes):
    layout, mover, made = service
    hosts = shards(processes)
    for host in hosts:
        mover.push(to_pieces(layout, host, None), 0, 0, 0)
    moved(made)
    fragments = range(layout.num_fragments) if layout.num_fragments > 1 else [None]
    counted = np.zeros(2, int)
    for fragment in fragments:
        blocks = [
            block
            for block in layout.blocks
            if fragment in (None, layout.fragment_of(block.index))
        ]
        elements = sum(slab.box.size for block in blocks for slab in block.slabs)
        key = 0, 1, 1 + (fragment or 0)
        parts = [to_pieces(layout, host, fragment) for host in hosts]
        sent = sum(mover.push(pieces, *key) for pieces in parts)
        buffers = [{k: np.empty_like(x) for k, x in host.items()} for host in hosts]
        received = sum(mover.pull(0, into, fragment) for into in buffers)
        # Contributions are float32; parameters have their own dtype.
        assert sent == 4 * elements
        assert received == sum(layout.block_bytes(block.index) for block in blocks)
        up, down = moved(made)
        assert 0 <= up - sent <= FRAMING * sent
        assert 0 <= down - received <= FRAMING * received
        counted += up, down
    params = sum(leaf.nbytes for leaf in LEAVES)
    assert 1 <= counted[0] / (4 * NUM_PARAMS) <= 1 + FRAMING
    assert 1 <= counted[1] / params <= 1 + FRAMING
    assert params < 4 * NUM_PARAMS


def commit(servers, version):
    """Merges and applies a contribution on all servers."""
    who = {"incarnation": 0, "round": version, "base": version - 1, "coefficient": 1.0}
    contribution = {"learner": 0, **who}
    for server in servers:
        server.blocks.merge(
            {"job": "job", "version": version, "fragment": 0, "divisor": 1.0}
            | {"contributions": [contribution]}
        )
        server.blocks.apply(
            {"job": "job", "version": version, "scale": 1.0, "step": 0, "share": 1.0}
            | {"keep": [], "drop": [[0, 0, version]]}
        )


@pytest.mark.parametrize("pull", ["bfloat16", "int8"])
def test_changes_are_what_a_pull_moves(pull):
    """Two processes with half of the columns each; one lacks two versions once."""
    codec = codecs.parse(pull)
    with serving(1, pull) as (layout, mover, made, servers):
        hosts = shards(2)
        for host in hosts:
            mover.push(to_pieces(layout, host, None), 0, 0, 0)
        learners = [Mover("job", layout, mover._servers) for _ in "ab"]
        held: list[dict] = [{}, {}]

        def pull_in(number, version):
            """Pulls into new buffers; returns bytes of arrays, and on the sockets."""
            into = {k: np.empty_like(x) for k, x in hosts[number].items()}
            moved(made)
            nbytes = learners[number].pull(version, into, None, held[number])
            held[number] = into
            return nbytes, moved(made)

        boxes = [
            [b for leaf, box in host for *_, b in pieces(layout, leaf, box)]
            for host in hosts
        ]
        changes = [sum(map(codec.nbytes, own)) for own in boxes]
        dense = [pull_in(i, 0)[0] for i in range(2)]
        assert dense == [sum(leaf.nbytes for leaf in LEAVES) // 2] * 2
        for version in range(1, 4):
            mover.push(to_pieces(layout, hosts[0], None), 0, 0, version)
            mover.push(to_pieces(layout, hosts[1], None), 0, 0, version)
            commit(servers, version)
            for number in range(2):
                if number == 1 and version == 1:
                    continue  # it will lack two versions
                nbytes, (up, down) = pull_in(number, version)
                lacks = 2 if (number, version) == (1, 2) else 1
                if lacks == 1:
                    # Blocks of bfloat16 have no smaller change of bfloat16.
                    assert nbytes == changes[number]
                assert lacks * changes[number] >= nbytes >= 0.9 * changes[number]
                assert nbytes <= down <= nbytes * (1 + FRAMING)
                assert up <= FRAMING * nbytes  # the request
        for i, host in enumerate(held):
            again = {k: np.empty_like(x) for k, x in host.items()}
            learners[i].pull(3, again)
            for key, array in again.items():
                np.testing.assert_array_equal(host[key], array)
        assert changes[0] / dense[0] < {"bfloat16": 0.55, "int8": 0.29}[pull]


def test_an_array_without_dimensions_is_pulled():
    layout = make_layout([Leaf("one", (), "float32", ())])
    server = ServerProcess()
    channel = Channel(server.address)
    spec = {"job": "job", "policy": {"outer": OUTER}, "layout": layout.to_json()}
    spec |= {"update": {"kind": "outer"}}
    channel.call("Create", {"job": "job", "spec": spec, "blocks": [0]})
    placement = Placement(copies=1, before=("s",), members=("s",)).to_json()
    opened = {"servers": {"s": server.address}, "placement": placement}
    servers = Servers("job", layout, opened, Channel, lambda: opened)
    mover = Mover("job", layout, servers)
    box = Box((), ())
    mover.push(to_pieces(layout, {(0, box): np.float32(3).reshape(())}, None), 0, 0, 0)
    into = {(0, box): np.zeros((), np.float32)}
    assert mover.pull(0, into) == 4 and into[0, box] == 3
    mover.close()
    server.close()
