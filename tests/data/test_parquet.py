"""Rows of Parquet files, and of datasets saved by Hugging Face `datasets`."""

import sys

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from test_tables import LABEL, NUM, X, firsts, refused, splits

from meshloom.trainer import data


def write(path, **columns) -> str:
    pq.write_table(pa.table(columns), path, row_group_size=32)
    return str(path)


def lists(array) -> pa.Array:
    return pa.array(list(array), pa.list_(pa.float32()))


def test_rows_of_parquet_files_have_their_types(tmp_path):
    pixels = [[[i % 256, 1], [2, 3]] for i in range(NUM)]
    path = write(
        tmp_path / "rows.parquet",
        x=lists(X),
        label=LABEL,
        kind=["ab"[i % 2] for i in range(NUM)],
        image=pa.array(pixels, pa.list_(pa.list_(pa.uint8()))),
        known=pa.array([i % 2 == 0 for i in range(NUM)]),
    )
    source = data.Parquet(path=path, classes={"kind": ("a", "b")}, holdout=0)
    found = source.open("train")
    assert firsts(found) == X[:, 0].tolist()
    assert found.describe()["arrays"] == (
        "x float32[3], label int32, kind int32, image uint8[2, 2], known bool"
    )
    assert found[33]["image"].tolist() == [[33, 1], [2, 3]]
    assert (found[33]["kind"], found[33]["known"]) == (1, False)
    assert found.files() == {"rows.parquet": path}


def test_any_order_reads_the_same_however_little_is_kept(tmp_path):
    path = write(tmp_path / "rows.parquet", x=lists(X))
    source = data.Parquet(path=path, holdout=0, cache_bytes=1)
    found, order = source.open("train"), np.random.default_rng(0).permutation(NUM)
    assert [float(found[i]["x"][0]) for i in order] == X[order, 0].tolist()
    cache = found._tables[0]._cache  # type: ignore
    assert len(cache._kept) == 1
    kept = data.Parquet(path=path, holdout=0).open("train")
    assert firsts(kept) == X[:, 0].tolist()
    assert len(kept._tables[0]._cache._kept) == -(-NUM // 32)  # type: ignore


def test_splits_of_parquet_files(tmp_path):
    for number, name in enumerate(("train-0", "train-1", "validation-0")):
        write(tmp_path / f"{name}.parquet", x=lists(X + 1000 * number))
    names = {"train": "train", "eval": "validation"}
    source = data.Parquet(path=str(tmp_path), split_names=names)
    assert len(source.open("train")) == 2 * NUM and len(source.open("eval")) == NUM
    shares = splits(data.Parquet(path=str(tmp_path), holdout=0.1, test_holdout=0.1))
    assert sum(map(len, shares.values())) == 3 * NUM


def test_parquet_that_does_not_fit_is_one_line(tmp_path, monkeypatch):
    def opened(**columns):
        path = write(tmp_path / "odd.parquet", **columns)
        return lambda: data.Parquet(path=path, holdout=0).open("train")

    refused(opened(x=pa.array([None, 1])), "row 0 of .*: 'x' has no value. Fill it in")
    refused(opened(x=pa.array([[1, None]])), "row 0 of .*: 'x' has no value")
    refused(opened(x=["a", "b"]), "'x' is the text 'a'. Name its classes")
    ragged = opened(x=pa.array([[1], [1, 2]]))()
    refused(lambda: ragged[1], r"'x' is int32\[2\], but int32\[1\] in the first row")
    (tmp_path / "odd.parquet").write_bytes(b"no table at all")
    source = data.Parquet(path=str(tmp_path / "odd.parquet"), holdout=0)
    refused(lambda: source.open("train"), "is not a Parquet file")
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    refused(lambda: source.open("train"), r"pip install 'meshloom\[parquet\]'")


def saved(folder, **settings) -> str:
    rows = datasets.Dataset.from_dict(
        {"x": X.tolist(), "label": LABEL.tolist()}, **settings
    )
    rows.save_to_disk(folder, num_shards=2)
    return str(folder)


def test_a_saved_dataset_is_split_by_share_or_by_folder(tmp_path, capfd):
    path = saved(tmp_path / "rows")
    found = data.HuggingFace(path=path, holdout=0).open("train")
    assert firsts(found) == X[:, 0].tolist()
    assert found.describe()["arrays"] == "x float32[3], label int32"
    assert len(found.files()) == 2
    shares = splits(data.HuggingFace(path=path, holdout=0.2, test_holdout=0.2))
    assert sorted(x for v in shares.values() for x in firsts(v)) == X[:, 0].tolist()
    other = saved(tmp_path / "other")
    assert len(data.HuggingFace(path=path, eval_path=other).open("eval")) == NUM


def test_a_saved_dict_has_its_own_splits_and_images_are_decoded(tmp_path):
    def part(low, high):
        pixels = np.arange(12, dtype=np.uint8).reshape(2, 2, 3)
        features = datasets.Features(
            image=datasets.Image(), label=datasets.ClassLabel(names=["a", "b"])
        )
        rows = {"image": [pixels + i for i in range(low, high)]}
        rows["label"] = [i % 2 for i in range(low, high)]
        return datasets.Dataset.from_dict(rows, features=features)

    both = {"train": part(0, 6), "validation": part(6, 9)}
    datasets.DatasetDict(both).save_to_disk(tmp_path / "both")
    source = data.HuggingFace(path=str(tmp_path / "both"))
    train, held_out = source.open("train"), source.open("eval")
    assert (len(train), len(held_out)) == (6, 3)
    assert held_out[0]["image"].tolist()[0][0] == [6, 7, 8]
    assert held_out[0]["image"].dtype == np.uint8 and held_out[1]["label"] == 1
    refused(lambda: source.open("test"), "test' is not a dataset that save_to_disk")
    named = data.HuggingFace(path=source.path, split_names={"train": "validation"})
    assert len(named.open("train")) == 3


def test_a_folder_without_a_dataset_is_one_line(tmp_path, monkeypatch):
    source = data.HuggingFace(path=str(tmp_path), holdout=0)
    refused(lambda: source.open("train"), "is not a dataset that save_to_disk wrote")
    path = saved(tmp_path / "rows")
    (tmp_path / "rows" / "state.json").write_text("{}")
    source = data.HuggingFace(path=path, holdout=0)
    refused(lambda: source.open("train"), "cannot be read .*Save it again")
    monkeypatch.setitem(sys.modules, "datasets", None)
    refused(lambda: source.open("train"), r"pip install 'meshloom\[huggingface\]'")


@pytest.fixture(autouse=True)
def quiet():
    datasets.disable_progress_bars()
