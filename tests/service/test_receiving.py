"""Tests of pieces that are received in the place where they will be merged."""

import numpy as np
import pytest

from meshloom.service.blocks.layout import Box, Leaf, make_layout
from meshloom.service.server.receiving import Receiving
from meshloom.service.server.server import BlockServer
from meshloom.service.server.store import BlockStore
from meshloom.service.wire import codecs, tensors
from meshloom.service.wire.calls import Channel, Server
from meshloom.service.wire.errors import Refused, Unavailable
from meshloom.service.wire.tensors import Packed

SHAPE = (4, 300, 1000)
LAYOUT = make_layout([Leaf("w", SHAPE, "float32", ("layer", None, None))])
SPEC = {
    "job": "j",
    "policy": {"outer": {"learning_rate": 1.0}},
    "layout": LAYOUT.to_json(),
    "update": {"kind": "outer"},
}
KEY = (0, 0, 1)
(SLAB,) = {block.slabs[0].box for block in LAYOUT.blocks if block.index == 0}


@pytest.fixture
def store():
    found = BlockStore(SPEC)
    for block in LAYOUT.blocks:
        box = block.slabs[0].box
        found.stage(0, 0, 0, block.index, 0, box.start, values(0)[box.slices()])
    return found


def values(seed):
    return np.random.default_rng(seed).normal(size=SHAPE).astype(np.float32)


def messages(array, box=SLAB):
    """The stream of one piece of block 0, a chunk after the other."""
    place = {"block": 0, "slab": 0}
    return list(tensors.encode([(place, box.start, array[box.slices()])]))


def receive(store, sent):
    receiving = Receiving(store, KEY)
    try:
        tensors.decode(iter(sent), ("block", "slab"), receiving.target, receiving.done)
    finally:
        receiving.close()


def staged(store):
    found = store.staging.get(KEY)
    return found.arrays(0)[0], found.missing([0])


def test_bytes_arrive_in_place_and_count_at_the_end(store):
    array, seen = values(1), []

    def watched():
        for message in messages(array):
            buffer = store.staging.get(KEY)
            seen.append(buffer and staged(store))
            yield message

    receive(store, watched())
    assert len(seen) > 3 and all(missing for _, missing in seen[1:])
    buffer, missing = staged(store)
    assert missing is None and np.array_equal(buffer, array[SLAB.slices()])
    # Half of it was there before the end: it was not copied afterwards.
    assert np.shares_memory(seen[-1][0], buffer)


@pytest.mark.parametrize("name", ["bfloat16", "int8", "topk:0.1+int8"])
def test_packed_pieces_are_unpacked(name):
    """Over a socket, in as many bytes as the arithmetic says."""
    codec = codecs.parse(name)
    spec = {**SPEC, "compression": {"push": name}}
    server = BlockServer()
    server.create({"job": "j", "spec": spec, "blocks": [0]})
    listening = Server("127.0.0.1:0", server.methods, server.streams)
    channel = Channel(f"127.0.0.1:{listening.port}")
    array = values(1)[SLAB.slices()]
    packed = Packed(codec, SLAB.shape, codec.to_bytes(codec.pack(array, SLAB)))
    channel.push("j", 0, 0, 0, [(0, 0, SLAB.start, array)])  # parameters: never packed
    answer = channel.push("j", *KEY, [(0, 0, SLAB.start, packed)])
    assert answer == {"bytes": codec.nbytes(SLAB)}
    buffer, missing = staged(server._jobs["j"][1])
    expected = codec.from_bytes(packed.data, SLAB)
    assert missing is None and np.array_equal(buffer, expected)
    assert not np.array_equal(expected, array)
    server.create({"job": "k", "spec": {**spec, "job": "k"}, "blocks": [0]})
    for job, round, sent in (("j", 1, array), ("k", 0, packed)):
        with pytest.raises(Refused, match="in this job it must be"):
            channel.push(job, 1, 0, round, [(0, 0, SLAB.start, sent)])
    channel.close()
    listening.close(0)


def test_part_of_rows_is_copied(store):
    start, stop = SLAB.start, SLAB.stop
    left = Box(start, (*stop[:2], 600))
    right = Box((*start[:2], 600), stop)
    for box in (right, left):
        assert store.staging.get(KEY) is None or staged(store)[1]
        receive(store, messages(values(1), box))
    buffer, missing = staged(store)
    assert missing is None and np.array_equal(buffer, values(1)[SLAB.slices()])


@pytest.mark.parametrize("spoil", ["cut", "damaged"])
def test_a_piece_that_is_not_right_does_not_count_and_can_be_sent_again(store, spoil):
    sent = messages(values(1))
    if spoil == "damaged":
        sent[1] = bytes([sent[1][0] ^ 1]) + sent[1][1:]
    with pytest.raises(Unavailable if spoil == "damaged" else Refused):
        receive(store, sent if spoil == "damaged" else sent[:2])
    assert staged(store)[1] is not None
    receive(store, messages(values(1)))
    buffer, missing = staged(store)
    assert missing is None and np.array_equal(buffer, values(1)[SLAB.slices()])


def test_bytes_that_come_late_do_not_change_what_counts(store):
    """One stream stalls, the piece comes in another one, and the first goes on."""
    array = values(1)

    def stalled():
        first, *rest = messages(array)
        yield first
        receive(store, messages(array))
        assert staged(store)[1] is None
        for message in rest:
            yield b"\x55" * len(message)

    with pytest.raises(Unavailable, match="is damaged"):
        receive(store, stalled())
    buffer, missing = staged(store)
    assert missing is None and np.array_equal(buffer, array[SLAB.slices()])


def test_a_piece_in_another_buffer_than_at_its_beginning(store):
    """What arrives while the buffer is exchanged moves to the new one."""
    array, middle = values(1), SLAB.start[0] + 1
    top = Box(SLAB.start, (middle, *SLAB.stop[1:]))
    rest = Box((middle, *SLAB.start[1:]), SLAB.stop)

    def slowly():  # the rest, while the top comes twice
        first, *others = messages(array, rest)
        yield first
        stalled = iter(messages(array, top)[:2])
        receiving = Receiving(store, KEY)

        def again():
            yield from stalled
            receive(store, messages(array, top))

        with pytest.raises(Refused, match="is short"):
            tensors.decode(again(), ("block", "slab"), receiving.target, receiving.done)
        receiving.close()
        yield from others

    receive(store, slowly())
    buffer, missing = staged(store)
    assert missing is None and np.array_equal(buffer, array[SLAB.slices()])


def test_a_contribution_that_is_dropped_while_it_arrives(store):
    def sent():
        first, *rest = messages(values(1))
        yield first
        store.drop([KEY])
        yield from rest

    receive(store, sent())
    assert store.staging.get(KEY) is None
    receive(store, messages(values(1)))  # a repeated message is ignored
    assert store.staging.get(KEY) is None
