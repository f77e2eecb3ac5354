"""Tests of stores: what is staged, versions, fragments, checkpoints and digests."""

import json
import threading

import jax
import numpy as np
import pytest
import stores
from stores import NESTEROV, row, same, send

from meshloom.service.blocks import digest
from meshloom.service.blocks.layout import Box, Leaf, make_layout
from meshloom.service.blocks.pieces import pieces
from meshloom.service.server.store import BlockStore
from meshloom.service.wire.errors import Refused
from meshloom.trainer.program.digest import tree_digests

LEAVES = [
    Leaf("table", (6, 4), "float32", (None, "embed")),
    Leaf("up", (3, 5, 4), "bfloat16", ("layer", None, "ff")),
    Leaf("scale", (), "float32", ()),
]
LAYOUT = make_layout(LEAVES, block_bytes=48)


def spec_of(layout=LAYOUT, outer=NESTEROV):
    policy = {"outer": outer, "compensation": 0.0}
    update = {"kind": "outer"}
    return {"job": "j", "policy": policy, "layout": layout.to_json(), "update": update}


def values(seed, layout=LAYOUT):
    return stores.values(seed, layout)


def commit(store, version, *, fragment=0, scale=1.0, keep=(), learner=0):
    arrays = values(100 + version, store.layout)
    send(store, learner, version, arrays, fragment)
    store.merge(version, fragment, [row(learner, version, version - 1)], 1.0)
    store.apply(version, scale, 0, 1.0, keep, [[learner, 0, version]])


def read(store, version):
    leaves = enumerate(store.layout.leaves)
    return [store.read(version, i, Box.whole(leaf.shape)) for i, leaf in leaves]


@pytest.fixture
def store():
    made = BlockStore(spec_of())
    send(made, 0, 0, values(0))
    return made


def test_the_initial_parameters_are_version_0(store):
    assert store.newest == 0 and same(read(store, 0), values(0))
    send(store, 1, 0, values(1))  # another learner, too late
    assert same(read(store, 0), values(0)) and store.status()["staged"] == []


def test_the_first_learner_that_is_complete_makes_version_0():
    store = BlockStore(spec_of())
    store.stage(
        1, 0, 0, 0, 0, LAYOUT.blocks[0].slabs[0].box.start, np.ones((3, 4), "f")
    )
    assert store.newest is None and not store.is_complete(1, 0, 0)
    send(store, 0, 0, values(0))
    assert same(read(store, 0), values(0)) and store.is_complete(1, 0, 0)


@pytest.mark.parametrize("version", [0, 1])
def test_versions_cannot_be_changed(store, version):
    commit(store, 1, keep=[0])
    boxes = [(0, Box((0, 0), (1, 4))), (2, Box((), ()))]
    for leaf, box in boxes:
        with pytest.raises(ValueError, match="read-only"):
            store.read(version, leaf, box)[...] = 1


def test_only_versions_that_are_kept_can_be_read(store):
    commit(store, 1, keep=[0])
    assert same(read(store, 0), values(0))
    commit(store, 2, keep=[0])
    assert store.status()["versions"] == [0, 2]
    with pytest.raises(Refused, match="version 1 of job 'j' is not here; .* is 2"):
        store.read(1, 0, Box.whole((6, 4)))


def test_a_box_may_span_blocks(store):
    box = Box((1, 1), (6, 3))
    assert len(pieces(LAYOUT, 0, box)) > 1
    assert np.array_equal(store.read(0, 0, box), values(0)[0][1:6, 1:3])


def test_what_is_not_held_here_is_refused():
    store = BlockStore(spec_of(), owned=[0])
    box = LAYOUT.blocks[0].slabs[0].box
    store.stage(0, 0, 0, 0, 0, box.start, np.ones(box.shape, np.float32))
    assert store.newest == 0
    with pytest.raises(Refused, match="block 1 is not held by this server"):
        store.stage(0, 0, 1, 1, 0, (3, 0), np.ones((3, 4), np.float32))
    with pytest.raises(Refused, match=r"table\[3:6, 0:4\] is in block 1, which is not"):
        store.read(0, 0, Box.whole((6, 4)))
    with pytest.raises(Refused, match="has 3 leaves, not 7"):
        store.read(0, 7, Box((), ()))


def test_a_server_without_blocks_takes_part():
    store = BlockStore(spec_of(), owned=[])
    assert store.merge(1, 0, [row(0, 1)], 1.0) == {
        "sum_of_squares": 0.0,
        "finite": True,
    }
    assert store.apply(1, 1.0, 0, 1.0) == {"version": 1}


@pytest.mark.parametrize(
    ("piece", "message"),
    [
        ((0, 3, (0, 0), (3, 4), "float32"), "block 0 has 1 slabs, not slab 3"),
        (
            (0, 0, (1, 0), (3, 4), "float32"),
            r"table\[1:4, 0:4\] .* outside of its slab",
        ),
        ((0, 0, (0, 0), (0, 4), "float32"), "is empty or outside"),
        ((0, 0, (0, 0), (3, 4), "int32"), "is of dtype int32"),
        ((0, 0, (0,), (3, 4), "float32"), "as many starts as dimensions"),
    ],
)
def test_pieces_that_do_not_fit_are_refused(store, piece, message):
    block, slab, start, shape, dtype = piece
    with pytest.raises(ValueError, match=message):
        store.stage(0, 0, 1, block, slab, start, np.ones(shape, dtype))


def test_pieces_that_overlap_are_refused_and_repeated_ones_are_not(store):
    store.stage(0, 0, 1, 0, 0, (0, 0), np.ones((2, 4), np.float32))
    with pytest.raises(Refused, match=r"round 1: piece table\[1:3, 0:4\] .* overlaps"):
        store.stage(0, 0, 1, 0, 0, (1, 0), np.ones((2, 4), np.float32))
    store.stage(0, 0, 1, 0, 0, (0, 0), np.ones((2, 4), np.float32))
    store.stage(0, 0, 1, 0, 0, (2, 0), np.ones((1, 4), np.float32))
    assert not store.is_complete(0, 0, 1)
    with pytest.raises(
        Refused, match=r"is not complete: table\[3:6, 0:4\] \(block 1\)"
    ):
        store.merge(1, 0, [row(0, 1)], 1.0)


def test_merge_names_what_is_missing(store):
    with pytest.raises(Refused, match="learner 3 .*round 9: nothing of it is staged"):
        store.merge(1, 0, [row(3, 9)], 1.0)
    with pytest.raises(Refused, match="the newest here is 0, so only 1 can follow"):
        store.merge(2, 0, [], 1.0)
    with pytest.raises(Refused, match="apply of version 1 .* merge first"):
        store.apply(1, 1.0, 0, 1.0)
    empty = BlockStore(spec_of())
    with pytest.raises(Refused, match="the initial parameters .* have not arrived"):
        empty.merge(1, 0, [], 1.0)


def test_apply_and_merge_can_be_repeated(store):
    send(store, 0, 1, values(5))
    first = store.merge(1, 0, [row(0, 1)], 2.0)
    assert store.merge(1, 0, [row(0, 1)], 2.0) == first
    store.apply(1, 1.0, 0, 1.0)
    once = read(store, 1)
    assert store.apply(1, 1.0, 0, 1.0) == {"version": 1}
    assert same(read(store, 1), once) and not same(once, values(0))


def test_a_skipped_commit_changes_nothing_but_the_number(store):
    commit(store, 1)
    commit(store, 2, scale=0.0, keep=[1])
    assert store.newest == 2 and same(read(store, 2), read(store, 1))
    twin = BlockStore(spec_of())
    send(twin, 0, 0, values(0))
    commit(twin, 1)
    # The momentum stayed too: the commit after it is that of a store without the skip.
    for each, version in ((store, 3), (twin, 2)):
        send(each, 0, version, values(9))
        each.merge(version, 0, [row(0, version, version - 1)], 1.0)
        each.apply(version, 1.0, 0, 1.0)
    assert same(read(store, 3), read(twin, 2))


def test_a_reused_contribution_stays_until_it_is_dropped(store):
    send(store, 0, 1, values(5))
    for version in (1, 2):
        store.merge(version, 0, [row(0, 1)], 1.0)
        store.apply(version, 1.0, 0, 1.0)
    store.drop([[0, 0, 1]])
    assert store.status()["staged"] == []


def test_late_pieces_of_what_was_dropped_are_ignored(store):
    commit(store, 1)
    send(store, 0, 1, values(5))  # a repeated message
    assert store.status()["staged"] == []
    send(store, 0, 2, values(5))
    send(store, 1, 2, values(5))
    store.drop([[0, 0, None]])  # all of a learner that is gone
    send(store, 0, 7, values(5))
    assert store.status()["staged"] == [[1, 0, 2]]
    send(store, 0, 7, values(5), incarnation=1)
    assert store.status()["staged"] == [[0, 1, 7], [1, 0, 2]]


def test_buffers_are_used_again(store):
    for version in range(1, 4):
        commit(store, version)
    num_made = store._pool.num_made
    for version in range(4, 9):
        commit(store, version)
    assert store._pool.num_made == num_made


def test_a_buffer_that_is_being_written_is_not_used_again(store):
    """A contribution is dropped while a late thread still copies a piece of it."""
    is_copying, may_go_on = threading.Event(), threading.Event()

    class Lazy:
        """Stops where numpy asks for its values."""

        shape, dtype = (3, 4), np.dtype("float32")

        def __array__(self, dtype=None, copy=None):
            is_copying.set()
            assert may_go_on.wait(20)
            return np.full((3, 4), 7, np.float32)

    args = (0, 0, 1, 0, 0, (0, 0), Lazy())
    thread = threading.Thread(target=store.stage, args=args)
    thread.start()
    assert is_copying.wait(20)
    store.drop([[0, 0, 1]])
    send(store, 1, 1, values(5))
    may_go_on.set()
    thread.join()
    store.merge(1, 0, [row(1, 1)], 1.0)
    expected = BlockStore(spec_of())
    send(expected, 0, 0, values(0))
    send(expected, 1, 1, values(5))
    expected.merge(1, 0, [row(1, 1)], 1.0)
    for each in (store, expected):
        each.apply(1, 1.0, 0, 1.0)
    assert same(read(store, 1), read(expected, 1))


def test_a_fragment_leaves_other_blocks_as_they_are():
    layout = make_layout(LEAVES, block_bytes=48, fragments=2)
    store = BlockStore(spec_of(layout))
    send(store, 0, 0, values(0))
    send(store, 0, 1, values(5), fragment=1)
    assert store.is_complete(0, 0, 1, fragment=1)
    assert not store.is_complete(0, 0, 1, fragment=0)
    commit(store, 1, fragment=1, keep=[0], learner=1)
    old, new = store.versions[0], store.versions[1]
    for block in layout.blocks:
        index = block.index
        if layout.fragment_of(index) == 0:
            assert all(a is b for a, b in zip(old[index], new[index], strict=True))
        else:
            assert not same(old[index], new[index])


@pytest.mark.parametrize("num_servers", [1, 2, 3])
def test_digests_equal_those_of_the_trainer(num_servers):
    blocks = range(len(LAYOUT.blocks))
    sums = {leaf.path: (0, 0) for leaf in LEAVES}
    for i in range(num_servers):
        store = BlockStore(spec_of(), blocks[i::num_servers])
        send(store, 0, 0, values(0))
        for path, lanes in store.digest_lanes(0).items():
            sums[path] = digest.add(sums[path], lanes)
    found = {leaf.path: digest.digest_of(leaf, sums[leaf.path]) for leaf in LEAVES}
    named = zip([leaf.path for leaf in LEAVES], values(0), strict=True)
    assert found == tree_digests({path: jax.numpy.asarray(x) for path, x in named})


def two(owned_lists, layout=LAYOUT):
    return [BlockStore(spec_of(layout), owned) for owned in owned_lists]


def test_any_number_of_servers_load_a_checkpoint(store, tmp_path):
    num = len(LAYOUT.blocks)
    servers = two([range(0, num, 2), range(1, num, 2)])
    for server in servers:
        send(server, 0, 0, values(0))
        commit(server, 1)
        commit(server, 2)
        server.save(tmp_path / "2", 2)
    loaded = BlockStore(spec_of())
    loaded.load(tmp_path / "2", 2)
    for version in (1, 2):
        commit(store, version)
    assert loaded.newest == 2 and same(read(loaded, 2), read(store, 2))
    # Momentum came along: the next commit is the same.
    for each in (loaded, store):
        commit(each, 3)
    assert same(read(loaded, 3), read(store, 3))


def test_only_the_newest_version_can_be_saved(store, tmp_path):
    commit(store, 1, keep=[0])
    with pytest.raises(Refused, match="save of version 0 .*the newest is 1"):
        store.save(tmp_path, 0)


def spoil_bit(folder):
    path = folder / "block-000001.npys"
    data = bytearray(path.read_bytes())
    data[-3] ^= 4
    path.write_bytes(data)


def spoil_version(folder):
    path = folder / "block-000001.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "version": 9}))


SPOILED = {
    "bit": (spoil_bit, "block-000001.npys is damaged"),
    "version": (spoil_version, "block-000001.json: version is 9, expected 1"),
    "no data": (lambda f: (f / "block-000001.npys").unlink(), "npys is missing"),
    "no index": (lambda f: (f / "block-000001.json").unlink(), "json is missing"),
    "torn": (lambda f: (f / "block-000001.json").write_text('{"ver'), "is not JSON"),
    "short": (lambda f: (f / "block-000001.npys").write_bytes(b"x"), "is damaged"),
}


@pytest.mark.parametrize("case", SPOILED)
def test_a_checkpoint_that_is_not_as_saved_is_refused_by_name(store, tmp_path, case):
    commit(store, 1)
    store.save(tmp_path, 1)
    spoil, message = SPOILED[case]
    spoil(tmp_path)
    other = BlockStore(spec_of())
    with pytest.raises(Refused, match=message):
        other.load(tmp_path, 1)
    assert other.newest is None


def test_a_checkpoint_of_another_optimizer_or_layout_is_refused(store, tmp_path):
    store.save(tmp_path, 0)
    with pytest.raises(Refused, match="optimizer state is not that of this job"):
        BlockStore(spec_of(outer={"learning_rate": 1.0})).load(tmp_path, 0)
    layout = make_layout(LEAVES)
    with pytest.raises(Refused, match="layout is .* expected"):
        BlockStore(spec_of(layout)).load(tmp_path, 0)
    assert not list(tmp_path.glob(".*")), "no temporary files are left"
