"""Images in memory, and the digits of scikit-learn."""

import sys

import numpy as np
import pytest
from sklearn.datasets import load_digits

from meshloom.trainer import data
from meshloom.trainer.data import images


def test_every_image_is_in_one_split():
    splits = {name: data.Digits().open(name) for name in ("train", "eval", "test")}
    assert {k: len(v) for k, v in splits.items()} == {
        "train": 1199,
        "eval": 299,
        "test": 299,
    }
    found = sorted(
        (row["image"].tobytes(), int(row["label"]))
        for split in splits.values()
        for row in (split[i] for i in range(len(split)))
    )
    pixels, labels = load_digits(return_X_y=True)
    rows = [(image / 16).astype(np.float32).tobytes() for image in pixels]
    assert found == sorted(zip(rows, labels.tolist(), strict=True))


def test_each_split_has_all_classes_about_equally():
    for name in ("train", "eval", "test"):
        split = data.Digits().open(name)
        labels = [int(split[i]["label"]) for i in range(len(split))]
        counts = np.bincount(labels, minlength=10)
        assert counts.min() > 0.06 * len(split) and counts.max() < 0.14 * len(split)


def test_examples_and_description():
    split = data.Digits().open("eval")
    row = split[0]
    assert row["image"].shape == (8, 8, 1) and row["image"].dtype == np.float32
    assert 0 <= row["image"].min() and row["image"].max() == 1
    assert row["label"].dtype == np.int32 and row["label"].shape == ()
    about = split.describe()
    assert about["num_classes"] == 10 and about["examples"] == 299
    assert split.unit == "images" and split.loss_units(1.0) == {}
    # Another order or another split would train on what others hold out.
    assert about["digest"] == data.Digits().open("eval").describe()["digest"]
    assert about["digest"] != data.Digits().open("test").describe()["digest"]
    with pytest.raises(IndexError, match="example 299 of a dataset of 299"):
        split[299]
    with pytest.raises(ValueError, match="Digits: no split 'valid'"):
        data.Digits().open("valid")  # type: ignore


def test_the_digest_knows_every_array():
    x, y = np.arange(4.0), np.arange(4)
    first = data.Arrays({"x": x, "y": y}, {}).describe()["digest"]
    assert data.Arrays({"y": y, "x": x}, {}).describe()["digest"] == first
    assert data.Arrays({"x": x, "y": y + 1}, {}).describe()["digest"] != first
    assert data.Arrays({"x": x, "z": y}, {}).describe()["digest"] != first
    with pytest.raises(ValueError, match="the same length, got {'x': 4, 'y': 3}"):
        data.Arrays({"x": x, "y": y[:3]}, {})


def test_without_scikit_learn_it_says_what_to_install(monkeypatch):
    images._digits.cache_clear()
    monkeypatch.setitem(sys.modules, "sklearn", None)
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(ValueError, match=r"pip install 'meshloom\[digits\]'") as error:
        data.Digits().open("train")
    assert "\n" not in str(error.value)
