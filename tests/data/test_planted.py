"""Planted data: the same every time, splits that share nothing, and known answers."""

import dataclasses

import numpy as np
import pytest

from meshloom.trainer.data import PlantedChoices, PlantedClicks, PlantedMatrix
from meshloom.trainer.data.planted import factors
from meshloom.trainer.data.planted_clicks import auc

MATRIX = PlantedMatrix(num_users=40, num_items=30, width=3, noise=0.1)
CHOICES = PlantedChoices(
    num_users=50, num_items=40, num_examples=4000, num_eval_examples=2000
)
CLICKS = PlantedClicks(
    num_users=50, num_items=40, num_examples=4000, num_eval_examples=4000
)


def arrays(dataset):
    rows = [dataset[i] for i in range(len(dataset))]
    return {name: np.stack([row[name] for row in rows]) for name in rows[0]}


def test_factors_are_functions_of_seed_and_id():
    every = factors(0, 0, np.arange(1000), 4)
    np.testing.assert_array_equal(factors(0, 0, np.array([7, 3]), 4), every[[7, 3]])
    assert (factors(1, 0, np.arange(9), 4) != every[:9]).all()
    products = every @ factors(0, 1, np.arange(1000), 4).T
    assert products.std() == pytest.approx(1, abs=0.05)


def test_entries_of_the_splits_are_different_ones():
    found = {split: arrays(MATRIX.open(split)) for split in ("train", "eval", "test")}
    assert [len(x["user"]) for x in found.values()] == [600, 60, 60]
    numbers = [x["user"] * 30 + x["item"] for x in found.values()]
    assert len(np.unique(np.concatenate(numbers))) == 720
    planted = MATRIX.planted()
    for split, x in found.items():
        noise = x["value"] - planted[x["user"], x["item"]]
        expected = 0.1 if split == "train" else 0
        assert noise.std() == pytest.approx(expected, rel=0.1)
    assert MATRIX.open("eval").loss_units(0.04) == {"rmse": pytest.approx(0.2)}


def test_rows_are_those_of_the_matrix():
    rows = dataclasses.replace(MATRIX, form="rows")
    planted = rows.planted()
    for split, users in (("eval", slice(0, 40, 2)), ("test", slice(1, 40, 2))):
        found = arrays(rows.open(split))
        np.testing.assert_array_equal(found["values"], planted[users])
        np.testing.assert_array_equal(found["user"], np.arange(40)[users])
    noise = arrays(rows.open("train"))["values"] - planted
    assert (
        noise.std() == pytest.approx(0.1, rel=0.05)
        and rows.open("train").unit == "rows"
    )


@pytest.mark.parametrize(
    "source", [MATRIX, CHOICES, CLICKS], ids=lambda s: type(s).__name__
)
def test_a_split_is_always_the_same_and_no_other(source):
    digests = [source.open(x).describe()["digest"] for x in ("train", "eval", "test")]
    assert len(set(digests)) == 3
    assert source.open("eval").describe()["digest"] == digests[1]
    with pytest.raises(ValueError, match="no split 'dev'"):
        source.open("dev")


def test_choices_follow_likings_and_popularity():
    data = CHOICES.open("eval")
    found, facts = arrays(data), data.describe()
    weights = CHOICES.weights(found["user"], found["situation"])
    weights /= weights.sum(1, keepdims=True)
    np.testing.assert_allclose(
        np.bincount(found["item"], minlength=40) / 2000, weights.mean(0), atol=0.03
    )
    mine = weights[np.arange(2000), found["item"]]
    assert mine.mean() == pytest.approx(np.square(weights).sum(1).mean(), rel=0.1)
    # A model that knows the likings, and one that knows the shares alone.
    best = (np.argsort(-weights, axis=1)[:, :10] == found["item"][:, None]).any(1)
    assert facts["best_recall_at_10"] == pytest.approx(best.mean())
    assert facts["popularity_recall_at_10"] < best.mean() - 0.1
    shares = np.exp(found["log_share"])
    np.testing.assert_allclose(shares, CHOICES.shares()[found["item"]], rtol=1e-5)
    assert CHOICES.shares().sum() == pytest.approx(1)
    np.testing.assert_allclose(CHOICES.shares(), weights.mean(0), atol=0.03)


def test_clicks_follow_their_probabilities():
    data = CLICKS.open("train")
    found, facts = arrays(data), data.describe()
    assert facts["table_rows"] == (50, 40, 24)
    assert found["ids"].max(0).tolist() == [49, 39, 23]
    likings = CLICKS.likings()[found["ids"][:, 0], found["ids"][:, 1]]
    clicked = found["label"] == 1
    assert likings[clicked].mean() > likings[~clicked].mean() + 0.5
    assert found["dense"][clicked, 0].mean() > 0.05 > found["dense"][clicked, 2].mean()
    assert 0.5 < facts["popularity_auc"] < facts["best_auc"] - 0.1


def test_auc_is_the_share_of_pairs_in_order():
    assert auc(np.array([3, 1, 2, 0]), np.array([1, 0, 1, 0])) == 1
    assert auc(np.array([0, 1, 2, 3]), np.array([1, 0, 1, 0])) == 0.25
    assert auc(np.ones(4), np.array([1, 0, 1, 0])) == 0.5
    assert np.isnan(auc(np.ones(2), np.ones(2)))


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: PlantedMatrix(num_users=0, num_items=1, width=1), "num_users is 0"),
        (
            lambda: PlantedMatrix(num_users=2, num_items=2, width=1, observed=0.9),
            "observed is 0.9; expected a share of the entries, > 0 and <= 0.8",
        ),
        (
            lambda: PlantedMatrix(num_users=2, num_items=2, width=1, noise=0.0),
            "noise is 0.0; it must be > 0",
        ),
        (
            lambda: PlantedMatrix(num_users=2, num_items=2, width=1, form="x"),  # type: ignore
            "form is 'x'; expected 'entries' or 'rows'",
        ),
        (lambda: PlantedClicks(taste=-1.0), "PlantedClicks: taste is -1.0"),
    ],
)
def test_settings_that_cannot_work_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()
