"""Mixtures: shares, orders and forms of several sources."""

import dataclasses

import numpy as np
import pytest
from test_tables import refused

from meshloom.trainer import data
from meshloom.trainer.data import mixing
from meshloom.trainer.data.batches import Batches
from meshloom.trainer.data.orders import order_from


def numbers(first: int, count: int, split: str = "train") -> data.Arrays:
    x = np.arange(first, first + count, dtype=np.int32)
    return data.Arrays({"x": x}, {"split": split})


@dataclasses.dataclass(frozen=True, kw_only=True)
class Numbers:
    first: int
    count: int

    def open(self, split):
        return numbers(self.first, self.count, split)


THREE = {
    "a": Numbers(first=0, count=70),
    "b": Numbers(first=1000, count=11),
    "c": Numbers(first=2000, count=40),
}
WEIGHTS = {"a": 0.5, "b": 0.3, "c": 0.2}


def order_of(weights=WEIGHTS, later=None, seed=3) -> mixing.MixedOrder:
    source = data.Mixture(sources=THREE, weights=weights, weights_from=later or {})
    return source.open("train").order(seed, 4)


def sources(order, positions) -> np.ndarray:
    return np.searchsorted(np.cumsum(order.sizes), order.index(positions)[1], "right")


@pytest.mark.parametrize(
    ("weights", "expected"),
    [
        ((0.7, 0.3), (7, 3)),
        ((2, 1), (2, 1)),
        ((1, 0), (1, 0)),
        ((0.6, 0.4), (3, 2)),
        ((0.3333, 0.6667), (333, 667)),
        ((1 / 3, 2 / 3), (1, 2)),
    ],
)
def test_weights_become_places_in_a_block(weights, expected):
    assert mixing.places(dict(zip("ab", weights, strict=True)), "x") == expected


def test_each_block_has_the_shares_exactly_and_another_order():
    order = order_of()
    found = sources(order, np.arange(1000)).reshape(100, 10)
    for block in found:
        assert np.bincount(block).tolist() == [5, 3, 2]
    assert len({tuple(block) for block in found.tolist()}) > 50


def test_a_source_is_read_epoch_by_epoch_and_a_position_alone_is_enough():
    order = order_of()
    positions = np.arange(1500)
    epochs, ids = order.index(positions)
    for source, size in enumerate(order.sizes):
        mine = sources(order, positions) == source
        first = sum(order.sizes[:source])
        for epoch in range(int(epochs[mine].max())):
            found = ids[mine][epoch * size : (epoch + 1) * size]
            assert sorted(found.tolist()) == list(range(first, first + size))
        assert (np.diff(epochs[mine]) >= 0).all()
    backwards = np.array([order.index(int(k)) for k in positions[::-1]])[::-1]
    assert (backwards == np.stack([epochs, ids], 1)).all()
    assert (order_of(seed=4).index(positions)[1] != ids).any()


def test_weights_change_at_a_step_without_repeating_or_leaving_out_examples():
    later = {3: {"a": 1, "b": 0, "c": 1}, 50: {"a": 0, "b": 1, "c": 0}}
    order, before = order_of(later=later), order_of()
    assert [start for start, _ in order.phases] == [0, 12, 200]
    positions = np.arange(400)
    epochs, ids = order.index(positions)
    assert (ids[:12] == before.index(positions)[1][:12]).all()
    found = sources(order, positions)
    assert 1 not in found[12:200] and set(found[200:]) == {1}
    for source, size in enumerate(order.sizes):
        mine = ids[found == source]
        for epoch in range(len(mine) // size):
            part = mine[epoch * size : (epoch + 1) * size]
            assert len(set(part.tolist())) == size
    for position in (0, 5, 12, 13, 199, 200, 399):
        expected = np.bincount(found[:position], minlength=3)
        assert order.counts(position).tolist() == expected.tolist()
    assert mixing.shares(order, ["a", "b", "c"], 12) == {
        f"share_{name}": count / 12
        for name, count in zip("abc", np.bincount(found[:12]), strict=True)
    }


def test_a_ledger_describes_the_order():
    order = order_of(later={3: {"a": 1, "b": 1, "c": 1}})
    assert order_from(order.num_examples, order.seed, order.facts()) == order
    plain = data.Order(7, 2)
    assert order_from(7, 2, plain.facts()) == plain


def test_batches_of_any_rows_are_parts_of_the_same_batch():
    dataset = data.Mixture(sources=THREE, weights=WEIGHTS).open("train")
    order = dataset.order(3, 8)
    whole = Batches(dataset, order, 8)[5]["x"]
    halves = [Batches(dataset, order, 8, rows)[5]["x"] for rows in ([0, 1, 2], [5, 7])]
    assert np.concatenate(halves).tolist() == whole[[0, 1, 2, 5, 7]].tolist()


def test_held_out_splits_take_turns():
    dataset = data.Mixture(sources=THREE, weights=WEIGHTS).open("eval")
    found = [int(dataset[i]["x"]) for i in range(len(dataset))]
    assert len(set(found)) == len(dataset) == 121
    shares = np.bincount(np.array(found[:24]) // 1000) / 24
    np.testing.assert_allclose(shares, np.array([70, 11, 40]) / 121, atol=0.06)


def test_text_is_mixed_with_its_tokenizer_and_length(tmp_path):
    for name in "ab":
        (tmp_path / name).mkdir()
        for i in range(9):
            (tmp_path / name / f"{i}.txt").write_text(f"{name}{i} " * 30)

    def text(name, length=8):
        return data.Text(path=str(tmp_path / name), length=length, holdout=0.3)

    source = data.Mixture(
        sources={"a": text("a"), "b": text("b")}, weights={"a": 1, "b": 1}
    )
    assert source.tokenizer().decode([97]) == "a" and source.length == 8
    dataset = source.open("train")
    assert (dataset.unit, dataset.units_per_example) == ("tokens", 8)
    assert dataset.describe()["vocab_size"] == 257
    other = data.Mixture(
        sources={"a": text("a"), "b": text("b", 9)}, weights={"a": 1, "b": 1}
    )
    refused(lambda: other.open("train"), r"'b' has the arrays inputs int32\[9\]")
    assert not hasattr(other, "length")
    assert not hasattr(data.Mixture(sources=THREE, weights=WEIGHTS), "tokenizer")


@pytest.mark.parametrize(
    ("settings", "pattern"),
    [
        ({"sources": {}}, "sources is empty"),
        ({"sources": {"a b": THREE["a"]}}, "'a b' is not a word"),
        ({"weights": {"a": 1.0}}, "weights names a, but the sources are a, b, c"),
        ({"weights": {**WEIGHTS, "a": -1.0}}, "'a' is -1.0; it must be >= 0"),
        ({"weights": {**WEIGHTS, "a": float("nan")}}, "'a' is nan; it must be >= 0"),
        ({"weights": dict.fromkeys("abc", 0.0)}, "weights are all 0"),
        ({"weights": {**WEIGHTS, "a": 1e-6}}, "'a' has a share of 2e-06, less than"),
        ({"weights_from": {0: WEIGHTS}}, "step 0 must be >= 1"),
        ({"weights_from": {5: {"a": 1.0}}}, "weights_from 5 names a, but the sources"),
    ],
)
def test_settings_that_cannot_be_are_one_line(settings, pattern):
    settings = {"sources": THREE, "weights": WEIGHTS} | settings
    refused(lambda: data.Mixture(**settings), pattern)
