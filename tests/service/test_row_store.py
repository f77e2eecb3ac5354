"""Tables on servers: rows, their optimizer, versions and checkpoints."""

import json

import numpy as np
import optax
import pytest

from meshloom.service.blocks.digest import digest_of
from meshloom.service.blocks.tables import Table
from meshloom.service.server import row_updates
from meshloom.service.server.row_store import RowStore
from meshloom.service.wire.errors import Refused

ROWS, WIDTH, LEARNERS = 103, 3, 3
TABLE = Table(name="items", rows=ROWS, width=WIDTH, learning_rate=0.5, block_bytes=120)
ALL = np.arange(ROWS)


def ids_of(seed: int, num: int = 12) -> np.ndarray:
    return np.unique(np.random.default_rng(seed).integers(0, ROWS, num))


def grads_of(seed: int, num: int, width: int = WIDTH) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(num, width)).astype(np.float32)


def key(learner: int, round: int) -> dict:
    return {"learner": learner, "incarnation": 1, "round": round}


def stage(stores, round: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Stages a contribution of each learner at whoever holds its rows."""
    made = []
    for learner in range(LEARNERS):
        ids = ids_of(10 * round + learner)
        grads = grads_of(10 * round + learner, ids.size)
        for store in stores:
            is_own = np.isin(TABLE.block_of(ids), store.owned)
            store.stage((learner, 1, round), ids[is_own], grads[is_own])
        made.append((ids, grads))
    return made


def commit(stores, round: int, **more) -> None:
    stage(stores, round)
    parts = [{**key(x, round), "coefficient": 0.5 + x} for x in range(LEARNERS)]
    about = {"scale": 0.8, "share": 1.0, "keep": [], **more}
    drop = [[learner, 1, round] for learner in range(LEARNERS)]
    for store in stores:
        store.merge(round, parts, 4.0)
        store.apply(round, drop=drop, **about)


def values(store, version: int, ids: np.ndarray = ALL) -> np.ndarray:
    return store.read(version, ids)[1]


def digest(stores, version: int) -> str:
    sums = np.sum([s.digest_lanes(version) for s in stores], axis=0) % 2**32
    return digest_of(TABLE.layout.leaves[0], [int(x) for x in sums])


def dealt(num: int) -> list[RowStore]:
    """The table on several servers."""
    blocks = range(len(TABLE.layout.blocks))
    return [RowStore("j", TABLE, blocks[i::num]) for i in range(num)]


def test_initial_values_are_the_same_on_every_machine_and_division():
    first = values(RowStore("j", TABLE), 0, np.arange(2))
    # From the first six words of numpy's Philox, whose stream numpy promises to keep.
    pinned = [0.0031687045, -0.0049950206, -0.0080009373]
    pinned += [0.0033895313, -0.0040486678, 0.0042006001]
    np.testing.assert_allclose(first.reshape(-1), pinned, rtol=1e-5)
    assert digest(dealt(1), 0) == digest(dealt(4), 0)
    other = Table(**{**TABLE.to_json(), "seed": 1})
    assert digest(dealt(1), 0) != digest([RowStore("j", other)], 0)
    everything = values(RowStore("j", TABLE), 0)
    assert np.abs(everything).max() <= 0.01 and abs(everything.mean()) < 1e-3
    assert len(np.unique(everything)) > 0.99 * everything.size


@pytest.mark.parametrize(
    "name, width, make",
    [
        ("sgd", WIDTH, optax.sgd),
        ("adagrad", 1, lambda rate: optax.adagrad(rate, 0.0, 1e-10)),
    ],
)
def test_rows_are_updated_as_by_optax(name, width, make):
    """With one column, an accumulator for each row is one for each number."""
    about = {"rows": ROWS, "width": width, "optimizer": name}
    table = Table(name="t", learning_rate=0.3, **about)
    now = grads_of(0, ROWS, width)
    state, tx = row_updates.initial_state(table, ROWS), make(0.3)
    expected, opt_state = now, tx.init(now)
    for seed in range(1, 4):
        grads = grads_of(seed, ROWS, width)
        now, state = row_updates.updated(table, now, grads, state, 1.0)
        updates, opt_state = tx.update(grads, opt_state, expected)
        expected = optax.apply_updates(expected, updates)
        # Differences of numbers of about 1, in float32.
        np.testing.assert_allclose(now, expected, rtol=1e-5, atol=1e-7)


def test_a_commit_is_the_mean_of_all_contributions_to_each_row():
    (store,) = dealt(1)
    total = np.zeros((ROWS, WIDTH))
    for learner, (ids, grads) in enumerate(stage([store], 1)):
        total[ids] += grads * (0.5 + learner)
    before = values(store, 0)
    parts = [{**key(x, 1), "coefficient": 0.5 + x} for x in reversed(range(LEARNERS))]
    merged = store.merge(1, parts, 4.0)
    mean = total / 4
    assert merged["finite"]
    assert merged["sum_of_squares"] == pytest.approx(np.square(mean).sum(), rel=1e-5)
    store.apply(1, scale=0.8, share=0.5)
    grads = 0.8 * mean
    accumulated = np.square(grads).mean(axis=1, keepdims=True)
    expected = before - 0.25 * grads / np.sqrt(accumulated + 1e-10)
    np.testing.assert_allclose(values(store, 1), expected, rtol=1e-5, atol=1e-7)


def test_the_order_of_a_message_does_not_change_the_bits():
    parts = [{**key(x, 1), "coefficient": 1.0} for x in range(LEARNERS)]
    found = []
    for order in (parts, parts[::-1]):
        (store,) = dealt(1)
        for learner in range(LEARNERS):
            store.stage((learner, 1, 1), ALL, grads_of(learner, ROWS))
        store.merge(1, order, 3.0)
        store.apply(1, scale=1.0, share=1.0)
        found.append(digest([store], 1))
    assert found[0] == found[1]


def test_rows_that_nobody_names_are_not_read_and_not_changed():
    (store,) = dealt(1)
    named = np.unique(np.concatenate([ids_of(10 + x) for x in range(LEARNERS)]))
    others = np.setdiff1d(ALL, named)
    assert others.size > 50
    before = values(store, 0)
    store._state[others] = np.nan  # would be seen in whatever is computed from it
    commit([store], 1)
    after = values(store, 1)
    np.testing.assert_array_equal(after[others], before[others])
    assert (
        np.isfinite(after).all() and (after[named] != before[named]).any(axis=1).all()
    )


def test_versions_stay_readable_as_long_as_they_are_kept():
    (store,) = dealt(1)
    seen = {0: values(store, 0)}
    for round in range(1, 7):
        skipped = {"scale": 0.0} if round == 4 else {}
        commit([store], round, keep=[min(2, round - 1)], **skipped)
        seen[round] = values(store, round)
    for version in range(2, 7):
        np.testing.assert_array_equal(values(store, version), seen[version])
        np.testing.assert_array_equal(
            values(store, version, ids_of(1)), seen[version][ids_of(1)]
        )
    np.testing.assert_array_equal(seen[3], seen[4])
    assert (seen[2] != seen[3]).any()
    with pytest.raises(
        Refused, match="version 1 of table 'items' is not here; the new"
    ):
        values(store, 1)
    commit([store], 7, scale=0.0)
    with pytest.raises(Refused, match="version 6"):
        values(store, 6)
    assert not store._before and not store.staged()


def test_what_was_read_ahead_is_brought_up_to_date_by_what_has_changed():
    (store,) = dealt(1)
    ids = ids_of(5, 40)
    _, ahead = store.read(0, ids)
    commit([store], 1, keep=[0])
    commit([store], 2, keep=[0])
    at, newer = store.read(2, ids, since=0)
    assert 0 < at.size < ids.size
    changed = (values(store, 2, ids) != ahead).any(axis=1)
    np.testing.assert_array_equal(np.flatnonzero(changed), at)
    ahead[at] = newer
    np.testing.assert_array_equal(ahead, values(store, 2, ids))
    assert store.read(2, ids, since=2)[0].size == 0


def test_any_number_of_servers_computes_the_same_bits():
    one, four = dealt(1), dealt(4)
    for round in (1, 2, 3):
        commit(one, round)
        commit(four, round)
    assert digest(one, 3) == digest(four, 3)
    assert digest(one, 3) != digest(dealt(1), 0)


def test_a_checkpoint_is_of_one_version_and_for_any_number_of_servers(tmp_path):
    three = dealt(3)
    commit(three, 1)
    expected = digest(three, 1)
    commit(three, 2, keep=[1])  # while version 1 is being saved
    for store in three:
        store.save(tmp_path, 1)
    commit(three, 3)
    two = dealt(2)
    for store in two:
        store.load(tmp_path, 1)
    assert digest(two, 1) == expected
    for round in (2, 3):
        commit(two, round)
    assert digest(two, 3) == digest(three, 3)  # with the state of the optimizer
    with pytest.raises(Refused, match="version 0 of table"):
        two[0].read(0, np.empty(0, np.int64))


def test_damaged_and_foreign_checkpoints_are_refused(tmp_path):
    (store,) = dealt(1)
    store.save(tmp_path, 0)
    other = RowStore("j", Table(**{**TABLE.to_json(), "learning_rate": 0.1}))
    with pytest.raises(Refused, match="table is .* checkpoint of another job"):
        other.load(tmp_path, 0)
    file = tmp_path / "items" / "block-000003.npys"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(Refused, match="block-000003.npys is damaged"):
        store.load(tmp_path, 0)
    assert digest([store], 0) == digest(dealt(1), 0)


def test_a_repeated_message_changes_nothing():
    (store,) = dealt(1)
    commit([store], 1)
    expected = digest([store], 1)
    store.apply(1, scale=0.8, share=1.0)
    stage([store], 1)  # late, of a round that is done with
    assert store.staged() == [] and digest([store], 1) == expected
    store.stage((0, 1, 2), ids_of(1), grads_of(1, ids_of(1).size))
    assert store.drop([[0, 1, None]]) == 4 * WIDTH * ids_of(1).size
    store.stage((0, 1, 3), ids_of(1), grads_of(1, ids_of(1).size))
    assert store.staged() == []


def test_what_is_not_finite_is_found():
    (store,) = dealt(1)
    bad = np.full((1, WIDTH), np.inf, np.float32)
    store.stage((0, 1, 1), np.array([4]), bad)
    merged = store.merge(1, [{**key(0, 1), "coefficient": 1.0}], 1.0)
    assert not merged["finite"]
    store.apply(1, scale=0.0, share=1.0)
    assert digest([store], 1) == digest(dealt(1), 0)


@pytest.mark.parametrize(
    "ids, width, found",
    [
        ([3, 3], WIDTH, "must be ascending, and each only once"),
        ([5, 3], WIDTH, "must be ascending"),
        ([-1], WIDTH, "row -1 is not in table 'items', which has 103 rows"),
        ([0, 103], WIDTH, "row 103 is not in table"),
        ([0, 60], WIDTH, r"row 60 is in block 6, which is not held by this server"),
        ([0], 2, r"float32\[1, 2\], expected float32\[1, 3\]"),
    ],
)
def test_rows_that_make_no_sense_are_refused(ids, width, found):
    store = RowStore("j", TABLE, [0, 1, 2])
    with pytest.raises(ValueError, match=f"learner 0 .*round 1: .*{found}"):
        store.stage((0, 1, 1), np.array(ids), grads_of(0, len(ids), width))


@pytest.mark.parametrize(
    "changes, found",
    [
        ({"name": "../x"}, "name of a folder"),
        ({"rows": 0}, "rows is 0, expected an integer >= 1"),
        ({"optimizer": "adam"}, "expected one of sgd, adagrad"),
        ({"learning_rate": float("nan")}, "learning_rate is nan"),
        ({"block_bytes": 8}, "at least the 12 bytes of a row"),
    ],
)
def test_a_table_that_cannot_be_is_refused(changes, found):
    with pytest.raises(ValueError, match=found):
        Table(**{**TABLE.to_json(), **changes})


def test_tables_go_to_json_and_back():
    assert Table.from_json(json.loads(json.dumps(TABLE.to_json()))) == TABLE
    with pytest.raises(ValueError, match="expected an object with block_bytes, learn"):
        Table.from_json({"name": "x"})
