"""A folder of images with a folder per class."""

import sys

import numpy as np
import pytest
from PIL import Image
from test_tables import refused, splits

from meshloom.trainer import data


def picture(path, level, size=(4, 4), mode="RGB") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new(mode, size, level if mode == "L" else (level, 0, 255)).save(path)


@pytest.fixture
def folder(tmp_path):
    for i in range(40):
        picture(tmp_path / "pets" / ("cat", "dog")[i % 2] / "more" / f"{i}.png", i)
    (tmp_path / "pets" / "about.txt").write_text("forty pets")
    return tmp_path / "pets"


def levels(dataset) -> list[int]:
    found = [dataset[i]["image"][0, 0, 0] for i in range(len(dataset))]
    return [round(float(level) * 255) for level in found]


def test_images_are_arrays_from_0_to_1_with_their_labels(folder):
    found = data.ImageFolder(path=str(folder), size=4, holdout=0).open("train")
    assert len(found) == 40 and found.unit == "images"
    row = found[21]
    assert row["image"].shape == (4, 4, 3) and row["image"].dtype == np.float32
    assert row["image"][0, 0].tolist() == [np.float32(levels(found)[21] / 255), 0, 1]
    assert row["label"] == levels(found)[21] % 2 and row["label"].dtype == np.int32
    about = found.describe()
    assert (about["num_classes"], about["classes"]) == (2, "cat, dog")
    assert found.files()["cat/more/0.png"] == str(folder / "cat/more/0.png")
    with pytest.raises(IndexError, match="example 40 of a dataset of 40"):
        found[40]


def test_other_sizes_and_modes_are_converted(folder):
    picture(folder / "dog" / "gray.png", 51, size=(9, 3), mode="L")
    Image.new("RGB", (4, 2), (255, 0, 0)).save(
        folder / "dog" / "turned.jpg", exif=_turned()
    )
    source = data.ImageFolder(path=str(folder), size=6, channels=1, holdout=0)
    found = source.open("train")
    names = [*found.files()]
    image = found[names.index("dog/gray.png")]["image"]
    assert image.shape == (6, 6, 1)
    np.testing.assert_allclose(image, 0.2, rtol=1e-6)
    assert found[names.index("dog/turned.jpg")]["image"].shape == (6, 6, 1)


def _turned():
    exif = Image.Exif()
    exif[0x0112] = 6
    return exif


def test_splits_by_share_name_and_file(folder, tmp_path):
    source = data.ImageFolder(path=str(folder), size=4, holdout=0.3, test_holdout=0.2)
    before = {k: set(levels(v)) for k, v in splits(source).items()}
    assert sorted(x for v in before.values() for x in v) == list(range(40))
    assert all(len(v) > 2 for v in before.values())
    picture(folder / "cat" / "new.png", 99)
    after = {k: set(levels(v)) for k, v in splits(source).items()}
    assert all(before[k] <= after[k] for k in before)
    picture(tmp_path / "held" / "dog" / "0.png", 7)
    held = str(tmp_path / "held")
    own = data.ImageFolder(path=str(folder), size=4, eval_path=held)
    assert levels(own.open("eval")) == [7] and own.open("eval")[0]["label"] == 1
    assert len(own.open("train")) == 41

    for split, count in (("train", 4), ("val", 2)):
        for i in range(count):
            picture(tmp_path / "named" / split / "ab"[i % 2] / f"{i}.png", i)
    names = {"train": "train", "eval": "val"}
    named = data.ImageFolder(path=str(tmp_path / "named"), size=4, split_names=names)
    assert levels(named.open("train")) == [0, 2, 1, 3]
    assert levels(named.open("eval")) == [0, 1]
    assert named.open("eval")[1]["label"] == 1


def test_labels_are_those_of_train_even_if_eval_lacks_a_class(tmp_path):
    for split, kinds in (("train", "abc"), ("val", "c")):
        for kind in kinds:
            picture(tmp_path / split / kind / "0.png", 1)
    names = {"train": "train", "eval": "val"}
    source = data.ImageFolder(path=str(tmp_path), size=4, split_names=names)
    assert source.open("eval")[0]["label"] == 2


def test_images_that_do_not_fit_are_one_line(folder, monkeypatch):
    def source(**settings):
        settings = {"path": str(folder), "size": 4, "holdout": 0} | settings
        return data.ImageFolder(**settings)

    refused(lambda: source(classes=("cat",)).open("train"), "of class 'dog', which is")
    refused(lambda: source(channels=2), "channels is 2; expected 3 or 1")
    refused(lambda: source(size=0), "size is 0; it must be >= 1")
    refused(lambda: source(holdout=1e-9).open("eval"), "split 'eval' is empty: a hash")
    (folder / "dog" / "odd.png").write_bytes(b"no image")
    found = source().open("train")
    refused(
        lambda: found[[*found.files()].index("dog/odd.png")], "odd.png' cannot be d"
    )
    picture(folder / "loose.png", 3)
    refused(lambda: source().open("train"), "loose.png' is not in the folder of a")
    monkeypatch.setitem(sys.modules, "PIL.Image", None)
    (folder / "loose.png").unlink()
    refused(lambda: source().open("train"), r"pip install 'meshloom\[images\]'")
