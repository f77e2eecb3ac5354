"""Bytes on the sockets of real servers, against those of the parameters."""

import math

import numpy as np
import pytest
from relays import relays

from meshloom.service.blocks import hashing
from meshloom.service.blocks.box import Box
from meshloom.service.blocks.layout import Leaf, make_layout
from meshloom.service.blocks.placement import Placement
from meshloom.service.learner.mover import Mover
from meshloom.service.learner.servers import Servers
from meshloom.service.learner.shards import to_pieces
from meshloom.service.server.server import ServerProcess
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
    layout = make_layout(LEAVES, block_bytes=BLOCK_BYTES, fragments=request.param)
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
        for address, channel in channels.items():
            blocks = [block for block, owner in owners.items() if owner == address]
            assert len(blocks) > 2
            channel.call("Create", {"job": "job", "spec": spec, "blocks": blocks})
        servers_of = Servers("job", layout, opened, Channel, lambda: opened)
        mover = Mover("job", layout, servers_of)
        yield layout, mover, made
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
