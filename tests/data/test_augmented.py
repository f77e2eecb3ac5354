"""Augmented images: what the changes are, and what they depend on."""

import dataclasses

import numpy as np
import pytest

from meshloom.trainer import data
from meshloom.trainer.data.augmented import moved
from meshloom.trainer.data.batches import Batches

SOURCE = data.Augmented(source=data.Digits(), shift=1.0, rotate=15.0, zoom=0.1)


def gray(rows):
    return np.array(rows, np.float32)[..., None]


def test_images_are_shifted_turned_and_scaled():
    image = gray([[1, 2, 3], [4, 5, 6], [7, 8, 9]])
    np.testing.assert_array_equal(moved(image, (0, 0), 0.0, 1.0), image)
    down = gray([[0, 0, 0], [1, 2, 3], [4, 5, 6]])
    np.testing.assert_array_equal(moved(image, (1, 0), 0.0, 1.0), down)
    right = gray([[0, 1, 2], [0, 4, 5], [0, 7, 8]])
    np.testing.assert_array_equal(moved(image, (0, 1), 0.0, 1.0), right)
    half = gray([[0.5, 1.5, 2.5], [2, 4.5, 5.5], [3.5, 7.5, 8.5]])
    np.testing.assert_allclose(moved(image, (0, 0.5), 0.0, 1.0), half, atol=1e-6)
    turned = moved(image, (0, 0), np.pi / 2, 1.0)
    np.testing.assert_allclose(turned[..., 0], np.rot90(image[..., 0]), atol=1e-5)
    point = gray(np.eye(5)[2] * np.eye(5)[2][:, None])
    wide = moved(point, (0, 0), 0.0, 2.0)[..., 0]
    np.testing.assert_allclose(wide[2], [0, 0.5, 1, 0.5, 0], atol=1e-6)


def test_each_epoch_and_sample_has_a_change_of_its_own():
    split, plain = SOURCE.open("train"), data.Digits().open("train")
    seen = {
        split.example(i, epoch)["image"].tobytes() for i in (3, 4) for epoch in (0, 1)
    }
    assert len(seen) == 4
    again = SOURCE.open("train").example(np.int64(3), np.int64(1))
    np.testing.assert_array_equal(again["image"], split.example(3, 1)["image"])
    assert again["label"] == plain[3]["label"] and again["image"].dtype == np.float32
    other = dataclasses.replace(SOURCE, seed=1).open("train").example(3, 1)
    assert (other["image"] != again["image"]).any()
    np.testing.assert_array_equal(split[3]["image"], plain[3]["image"])
    assert split.unit == "images"


def test_a_batch_is_the_same_whichever_process_reads_it():
    split = SOURCE.open("train")
    order = data.Order(len(split), seed=1)
    step = len(split) // 32 + 1  # its rows are of two epochs
    whole = Batches(split, order, 32)[step]["image"]
    part = Batches(split, order, 32, rows=[3, 17])[step]["image"]
    np.testing.assert_array_equal(part, whole[[3, 17]])


def test_half_of_the_images_are_mirrored():
    split = data.Augmented(source=data.Digits(), flip=True).open("train")
    is_same = [
        (split.example(i, 0)["image"] == split[i]["image"]).all() for i in range(200)
    ]
    assert 60 < sum(is_same) < 140
    i = is_same.index(False)
    mirrored = split[i]["image"][:, ::-1]
    np.testing.assert_allclose(split.example(i, 0)["image"], mirrored, atol=1e-6)


def test_only_training_is_augmented_and_its_digest_says_so():
    for name in ("eval", "test"):
        assert SOURCE.open(name).describe() == data.Digits().open(name).describe()
    digests = [
        source.open("train").describe()["digest"]
        for source in (data.Digits(), SOURCE, dataclasses.replace(SOURCE, shift=2.0))
    ]
    assert len(set(digests)) == 3
    assert SOURCE.open("train").describe()["num_classes"] == 10


def test_what_cannot_be_augmented_is_refused():
    with pytest.raises(ValueError, match="Augmented: zoom must be >= 0, got -1"):
        data.Augmented(source=data.Digits(), zoom=-1.0)
    text = data.Synthetic(vocab_size=8, length=4)
    with pytest.raises(ValueError, match="source Synthetic has no array 'image'"):
        data.Augmented(source=text).open("train")
