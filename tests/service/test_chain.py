"""Published versions: packed changes, the same bits for all who apply them."""

import ml_dtypes
import numpy as np
import pytest
from stores import NESTEROV, row, same, send, values

from meshloom.service.blocks.layout import Box, Leaf, make_layout
from meshloom.service.blocks.pieces import pieces
from meshloom.service.server.store import BlockStore
from meshloom.service.wire import changes, codecs
from meshloom.service.wire.errors import Refused

LEAVES = [
    Leaf("table", (6, 200), "float32", (None, "embed")),
    Leaf("up", (3, 5, 70), "bfloat16", ("layer", None, "ff")),
    Leaf("scale", (), "float32", ()),
    Leaf("none", (0, 3), "float32", (None, None)),
]
LAYOUT = make_layout(LEAVES, block_bytes=1200)
# Not multiples of 64 columns, and across blocks.
BOXES = [
    (0, Box((0, 0), (6, 200))),
    (0, Box((1, 70), (5, 195))),
    (1, Box((0, 1, 3), (3, 4, 67))),
    (2, Box((), ())),
]


def spec_of(pull, outer=NESTEROV, layout=LAYOUT, compensation=0.0):
    return {
        "job": "j",
        "policy": {"outer": outer, "compensation": compensation},
        "layout": layout.to_json(),
        "update": {"kind": "outer"},
        "compression": {"push": "float32", "pull": pull},
    }


def store_of(pull, **settings):
    made = BlockStore(spec_of(pull, **settings))
    send(made, 0, 0, values(0, made.layout))
    return made


def commit(store, version, *, scale=1.0, fragment=0, keep=()):
    arrays = [np.float32(0.1) * x for x in values(100 + version, store.layout)]
    send(store, 0, version, [x.astype(np.float32) for x in arrays], fragment)
    merged = store.merge(version, fragment, [row(0, version, version - 1)], 1.0)
    store.apply(version, scale, 0, 1.0, keep, [[0, 0, version]])
    return merged


def whole(store, version):
    return [
        np.array(store.read(version, i, Box.whole(leaf.shape)))
        for i, leaf in enumerate(store.layout.leaves)
    ]


class Reader:
    """Reads boxes as a learner does, over messages."""

    def __init__(self, boxes):
        self.boxes = boxes
        self.held = {}
        self.version = None

    def read(self, store, version, spoil=lambda messages: messages):
        wanted = []
        for leaf, box in self.boxes:
            dtype = values(0, store.layout)[leaf].dtype
            for _, _, part in pieces(store.layout, leaf, box):
                known = ()
                if self.version is not None:
                    known = self.held[leaf, part], self.version
                into = np.full(part.shape, np.nan, np.float32)
                wanted.append(changes.Wanted(leaf, part, dtype, into, *known))
        found = []
        for w in wanted:
            ((block, slab, part),) = pieces(store.layout, w.leaf, w.box)
            since = store.chain.since(w.have, version, block, slab, part)
            found.append((store.read(version, w.leaf, w.box), since))
        boxes = [(w.leaf, w.box) for w in wanted]
        nbytes = changes.receive(iter(spoil(changes.encode(boxes, found))), wanted)
        self.held = {(w.leaf, w.box): w.into for w in wanted}
        self.version = version
        return nbytes

    def check(self, store):
        published = whole(store, self.version)
        for (leaf, box), array in self.held.items():
            expected = published[leaf][(*box.slices(), ...)].astype(np.float32)
            np.testing.assert_array_equal(array, expected)


@pytest.mark.parametrize("pull", ["float32", "bfloat16", "int8"])
def test_all_readers_have_the_bits_of_the_server_whenever_they_read(pull):
    store, plain = store_of(pull), store_of("float32")
    often, seldom, parts = Reader(BOXES[:1] + BOXES[3:]), Reader(BOXES), Reader(BOXES)
    sizes = {}
    for version in range(7):
        if version:
            commit(store, version, scale=0.0 if version == 4 else 1.0)
            commit(plain, version, scale=0.0 if version == 4 else 1.0)
        sizes[version] = often.read(store, version)
        often.check(store)
        if version in (0, 2, 6):
            seldom.read(store, version)
            seldom.check(store)
        if version >= 5:
            parts.read(store, version)
            parts.check(store)
    assert same(whole(plain, 6), whole(store, 6)) == (pull == "float32")
    # The skipped update published nothing new.
    assert (sizes[4] == 0) == (pull != "float32")
    dense = 4 * (1200 + 1)
    assert sizes[0] == dense
    layout_boxes = [b for i, x in BOXES[:1] + BOXES[3:] for b in pieces(LAYOUT, i, x)]
    each = sum(codecs.parse(pull).nbytes(box) for _, _, box in layout_boxes)
    assert sizes[1] == sizes[6] == (dense if pull == "float32" else each)
    assert pull == "float32" or each < (0.6 if pull == "bfloat16" else 0.32) * dense


@pytest.mark.parametrize("pull", ["bfloat16", "int8"])
def test_rounding_errors_do_not_add_up(pull):
    """What is published stays within one rounding of what is exact."""
    store, plain = store_of(pull), store_of("float32")
    last = values(0, LAYOUT)
    for version in range(1, 30):
        commit(store, version)
        commit(plain, version)
        for block in store.owned:
            before = plain.chain.exact(block, plain.versions[version][block])
            exact = store.chain.exact(block, store.versions[version][block])
            assert same(before, exact)  # the optimizer sees no rounding
        step = np.abs(whole(plain, version)[0] - last[0]).max()
        error = np.abs(whole(plain, version)[0] - whole(store, version)[0]).max()
        assert 0 < error <= step / (127 if pull == "int8" else 256), (version, error)
        last = whole(store, version)


def test_who_lacks_too_many_versions_gets_all_elements():
    store, late = store_of("int8"), Reader(BOXES)
    first = late.read(store, 0)
    for version in range(1, 4):
        commit(store, version)
    behind = Reader(BOXES)
    behind.held, behind.version = dict(late.held), 0
    three = behind.read(store, 3)  # three changes are less than all elements
    behind.check(store)
    commit(store, 4)
    four = late.read(store, 4)
    late.check(store)
    assert 0.7 * first < three < first and four >= 0.95 * first
    # One that claims a version which the chain does not have yet.
    behind.version = 9
    assert behind.read(store, 4) == first
    behind.check(store)


def test_fragments_have_changes_of_their_own():
    layout = make_layout(LEAVES, block_bytes=1200, fragments=2)
    store, reader = store_of("int8", layout=layout), Reader(BOXES)
    reader.read(store, 0)
    for version, fragment in enumerate([0, 1, 1, 0, 0], start=1):
        commit(store, version, fragment=fragment)
    dense = Reader(BOXES)
    assert reader.read(store, 5) < dense.read(store, 5)
    reader.check(store)
    dense.check(store)


def test_a_checkpoint_has_both_and_the_chain_goes_on_from_it(tmp_path):
    store = store_of("int8")
    for version in range(1, 4):
        commit(store, version)
    store.save(tmp_path, 3)
    again = BlockStore(spec_of("int8"))
    again.load(tmp_path, 3)
    assert same(whole(store, 3), whole(again, 3))
    reader = Reader(BOXES)
    reader.read(store, 3)
    for version in range(4, 6):
        commit(store, version)
        commit(again, version)
        assert same(whole(store, version), whole(again, version))
    for block in store.owned:
        exact = (s.chain.exact(block, s.versions[5][block]) for s in (store, again))
        assert same(*exact)
    # It began at 3, so it has two changes.
    assert reader.read(again, 5) < 0.6 * Reader(BOXES).read(again, 5)
    reader.check(again)
    early = Reader(BOXES)
    early.read(store, 5)
    early.version = 2  # before the checkpoint: nothing is known of it
    assert early.read(again, 5) == Reader(BOXES).read(again, 5)
    with pytest.raises(Refused, match="the optimizer state is not that of this job"):
        BlockStore(spec_of("float32")).load(tmp_path, 3)


def test_what_is_not_the_servers_is_noticed():
    store, reader = store_of("int8"), Reader(BOXES)
    reader.read(store, 0)
    commit(store, 1)
    commit(store, 2)
    reader.version = 1  # but it has version 0
    with pytest.raises(Refused, match=r"not the server's after 1 changes since ver"):
        reader.read(store, 2)


def spoiled_answers(messages):
    """Yields answers that are not what was asked for, by what is wrong."""
    first, *rest = messages
    yield "same\\s+version", [b"[]", *rest]
    yield "same\\s+version", [b'{"boxes": [[1, 2]]}', *rest]
    yield "same\\s+version", []
    yield "arrays of .* boxes did not come", [first]
    yield "was not asked for", [first, *rest, *rest]


def test_other_answers_are_refused():
    store, reader = store_of("int8"), Reader(BOXES)
    reader.read(store, 0)
    commit(store, 1)
    kept = []
    reader_messages = Reader(BOXES)
    reader_messages.held, reader_messages.version = dict(reader.held), 0
    reader_messages.read(store, 1, lambda m: kept.extend(m) or kept)
    for message, answer in spoiled_answers(kept):
        with pytest.raises(Refused, match=message):
            reader.read(store, 1, lambda _, answer=answer: answer)
    reader.read(store, 1)
    reader.check(store)
    fresh = Reader(BOXES)
    with pytest.raises(Refused, match="changes of a box of which nothing is known"):
        fresh.read(store, 1, lambda _: kept)


def test_what_is_not_finite_is_seen_by_all():
    store, reader = store_of("int8"), Reader(BOXES[:1])
    reader.read(store, 0)
    arrays = [np.zeros(x.shape, np.float32) for x in values(0, LAYOUT)]
    arrays[0][2, 3] = np.inf
    send(store, 0, 1, arrays, 0)
    store.merge(1, 0, [row(0, 1)], 1.0)
    store.apply(1, 1.0, 0, 1.0)
    reader.read(store, 1)
    reader.check(store)
    assert not np.isfinite(whole(store, 1)[0][2]).all()


def test_compensation_compares_with_what_was_published():
    outer = {"learning_rate": 1.0, "momentum": 0.0, "nesterov": False}
    store = store_of("int8", outer=outer, compensation=0.5)
    commit(store, 1, keep=[0])
    exact = store.chain.exact(0, store.versions[1][0])
    base = [np.array(x) for x in store.versions[0][0]]
    ones = [np.ones(x.shape, np.float32) for x in values(0, LAYOUT)]
    send(store, 1, 1, ones)
    store.merge(2, 0, [{**row(1, 1, 0), "weight": 1.0}], 1.0)
    expected = 1 + np.float32(0.5) * (exact[0] - base[0].astype(np.float32))
    np.testing.assert_allclose(store._merged.mean[0][0], expected, rtol=1e-6)


def test_top_k_is_refused():
    with pytest.raises(ValueError, match="compression of pulls topk:0.1: expected flo"):
        BlockStore(spec_of("topk:0.1"))
    assert ml_dtypes.bfloat16 == values(0, LAYOUT)[1].dtype
