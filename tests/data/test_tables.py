"""Rows of arrays and CSV files: examples, splits, and errors in one line."""

import re

import numpy as np
import pytest

from meshloom.trainer import data

NUM = 200
X = np.arange(NUM * 3, dtype=np.float64).reshape(NUM, 3)
LABEL = np.arange(NUM, dtype=np.int64) % 4


def rows(dataset) -> list[dict]:
    return [dataset[i] for i in range(len(dataset))]


def firsts(dataset) -> list[float]:
    """The first feature of every example, which is different in each row."""
    return [float(row["x"].flat[0]) for row in rows(dataset)]


def refused(call, pattern: str) -> None:
    with pytest.raises(ValueError, match=pattern) as caught:
        call()
    assert "\n" not in str(caught.value)


@pytest.fixture
def npz(tmp_path) -> str:
    np.savez(tmp_path / "rows.npz", x=X, label=LABEL)
    return str(tmp_path / "rows.npz")


def splits(source) -> dict:
    return {name: source.open(name) for name in ("train", "eval", "test")}


def test_rows_of_an_npz_are_mapped_and_narrowed(npz):
    found = data.ArrayFiles(path=npz, holdout=0).open("train")
    row = found[7]
    assert row["x"].tolist() == X[7].tolist() and row["x"].dtype == np.float32
    assert row["label"] == 3 and row["label"].dtype == np.int32
    about = found.describe()
    assert about["arrays"] == "x float32[3], label int32" and about["examples"] == NUM
    assert found.files() == {"rows.npz": npz}
    assert isinstance(found._tables[0]._arrays["x"], np.memmap)  # type: ignore
    with pytest.raises(IndexError, match="example 200 of a dataset of 200"):
        found[NUM]


def test_compressed_fortran_and_empty_arrays_are_read_too(tmp_path):
    np.savez_compressed(tmp_path / "packed.npz", x=X)
    assert (
        firsts(
            data.ArrayFiles(path=str(tmp_path / "packed.npz"), holdout=0).open("train")
        )
        == X[:, 0].tolist()
    )
    np.savez(tmp_path / "columns.npz", x=np.asfortranarray(X))
    found = data.ArrayFiles(path=str(tmp_path / "columns.npz"), holdout=0).open("train")
    assert found[9]["x"].tolist() == X[9].tolist()
    np.savez(tmp_path / "none.npz", x=X[:0])
    source = data.ArrayFiles(path=str(tmp_path / "none.npz"), holdout=0)
    refused(lambda: source.open("train"), "split 'train' is empty: 1 files have 0 rows")


def test_npy_files_are_columns_of_the_table_that_is_their_folder(tmp_path):
    for number, part in enumerate(("a", "b")):
        (tmp_path / part).mkdir()
        np.save(tmp_path / part / "x.npy", X + 1000 * number)
        np.save(tmp_path / part / "label.npy", LABEL)
    found = data.ArrayFiles(path=str(tmp_path), holdout=0).open("train")
    assert len(found) == 2 * NUM
    assert firsts(found) == [*X[:, 0], *(X[:, 0] + 1000)]
    assert [*found.files()] == ["a/label.npy", "a/x.npy", "b/label.npy", "b/x.npy"]
    # A structured array has its fields as columns.
    both = np.array([(1.5, 2), (2.5, 3)], [("x", "f4"), ("label", "i4")])
    np.save(tmp_path / "both.npy", both)
    found = data.ArrayFiles(path=str(tmp_path / "both.npy"), holdout=0).open("train")
    assert found[1] == {"x": np.float32(2.5), "label": np.int32(3)}


def test_each_row_is_in_one_split_and_added_files_move_none(tmp_path):
    for name in ("b", "d"):
        np.savez(tmp_path / f"{name}.npz", x=X + 1000 * ord(name), label=LABEL)
    source = data.ArrayFiles(path=str(tmp_path), holdout=0.2, test_holdout=0.1)
    before = {name: firsts(split) for name, split in splits(source).items()}
    everything = sorted(x for split in before.values() for x in split)
    assert everything == sorted(float(x) for n in (98, 100) for x in X[:, 0] + 1000 * n)
    assert 0.1 < len(before["eval"]) / (2 * NUM) < 0.3
    assert 0.04 < len(before["test"]) / (2 * NUM) < 0.16
    for name in ("a", "c"):
        np.savez(tmp_path / f"{name}.npz", x=X + 1000 * ord(name), label=LABEL)
    for name, split in splits(source).items():
        assert set(before[name]) < set(firsts(split))


def test_splits_by_file_are_never_trained_on(tmp_path):
    for number, name in enumerate(("a", "b", "held", "last")):
        np.savez(tmp_path / f"{name}.npz", x=X + 1000 * number, label=LABEL)
    found = splits(
        data.ArrayFiles(
            path=str(tmp_path),
            eval_path=str(tmp_path / "held.npz"),
            test_path=str(tmp_path / "last.npz"),
        )
    )
    assert {k: [*v.files()] for k, v in found.items()} == {
        "train": ["a.npz", "b.npz"],
        "eval": ["held.npz"],
        "test": ["last.npz"],
    }
    assert firsts(found["eval"]) == (X[:, 0] + 2000).tolist()


def test_splits_by_name_are_files_folders_or_arrays(tmp_path):
    (tmp_path / "train").mkdir()
    for number, name in enumerate(("train/0", "train-1", "val", "trainer")):
        np.savez(tmp_path / f"{name}.npz", x=X + 1000 * number, label=LABEL)
    names = {"train": "train", "eval": "val"}
    source = data.ArrayFiles(path=str(tmp_path), split_names=names)
    assert [*source.open("train").files()] == ["train-1.npz", "train/0.npz"]
    assert [*source.open("eval").files()] == ["val.npz"]
    refused(lambda: source.open("test"), "names no split 'test', only train, eval")
    odd = data.ArrayFiles(path=str(tmp_path), split_names={"train": "fit"})
    refused(lambda: odd.open("train"), "nothing is called 'fit'. The files are train-1")

    arrays = {"x_train": X, "x_test": X[:9] + 7, "y_train": LABEL, "y_test": LABEL[:9]}
    np.savez(tmp_path / "classic.npz", **arrays)
    source = data.ArrayFiles(
        path=str(tmp_path / "classic.npz"),
        split_names={"train": "train", "eval": "test"},
        columns={"x": "x", "label": "y"},
    )
    assert len(source.open("train")) == NUM
    assert firsts(source.open("eval")) == (X[:9, 0] + 7).tolist()
    odd = data.ArrayFiles(path=source.path, split_names={"train": "fit"})
    refused(lambda: odd.open("train"), "no array of .* is called 'fit_...'")


def test_columns_are_combined_scaled_shaped_and_named(tmp_path):
    path = tmp_path / "flowers.csv"
    path.write_text("a,b,kind,id\n1,2.5,iris,7\n\n3,4,rose,8\n5,6,iris,9\n")
    source = data.Csv(
        path=str(path),
        columns={"x": ("b", "a"), "label": "kind", "image": "id"},
        classes={"label": ("rose", "iris")},
        scale={"image": 0.5},
        shapes={"image": (1, 1), "x": (2, 1)},
        holdout=0,
        unit="flowers",
    )
    found = source.open("train")
    assert found[0]["x"].tolist() == [[2.5], [1.0]] and found[0]["x"].dtype == "float32"
    assert [int(row["label"]) for row in rows(found)] == [1, 0, 1]
    assert found[2]["image"].tolist() == [[4.5]]
    assert found.describe()["num_classes"] == 2 and found.unit == "flowers"


def test_integers_of_a_later_file_become_floats_but_not_the_reverse(tmp_path):
    (tmp_path / "0.csv").write_text("x\n1.5\n")
    (tmp_path / "1.csv").write_text("x\n2\n")
    source = data.Csv(path=str(tmp_path), holdout=0)
    assert firsts(source.open("train")) == [1.5, 2.0]
    (tmp_path / "1.csv").rename(tmp_path / "-1.csv")
    refused(lambda: source.open("train"), "'x' is float32.., but int32.. in the first")


@pytest.mark.parametrize(
    ("text", "settings", "pattern"),
    [
        ("x,kind\n1,iris\n", {}, r"row 0 of .*: 'kind' is the text 'iris'. Name its c"),
        ("x\n1\n\n2,3\n", {}, "row 1 of .* has 2 values, but the header has 1"),
        ("", {}, "no file except 1 empty files matches"),
        ("\n", {}, "has no column|it has no header|is empty"),
        ("x,x\n1,2\n", {}, "two columns of the same name"),
        ("x\n1\nnone\n", {}, "row 0 of .*: 'x' is the text '1'"),
        ("x\n5000000000\n", {}, "has the value 5000000000, which does not fit"),
        ("x\n1\n", {"columns": {"y": "z"}}, "has no column 'z', only x"),
        ("x\n1\n", {"scale": {"y": 2.0}}, "scale names 'y', but the arrays are x"),
        ("x\n1\n", {"shapes": {"x": (2,)}}, "has 1 numbers, which do not have the sha"),
        ("x\na\n", {"classes": {"x": ("b",)}}, "is 'a', which is not one of its clas"),
        (b"x\n\xff\n", {}, "cannot be read as CSV"),
    ],
)
def test_a_csv_that_does_not_fit_is_one_line(tmp_path, text, settings, pattern):
    path = tmp_path / "rows.csv"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    source = data.Csv(path=str(path), holdout=0, **settings)
    refused(lambda: source.open("train"), pattern)


def test_arrays_that_do_not_fit_are_one_line(tmp_path, npz):
    def source(path="odd.npz", **settings):
        settings = {"holdout": 0, **settings}
        return data.ArrayFiles(path=str(tmp_path / path), **settings)

    np.savez(tmp_path / "odd.npz", x=X, label=LABEL[:3])
    refused(lambda: source().open("train"), "different numbers of rows, {'x': 200")
    assert len(source(columns={"x": "x"}).open("train")) == NUM
    np.savez(tmp_path / "odd.npz", x=X, count=np.array(3))
    refused(lambda: source().open("train"), "array 'count' is a single number")
    np.savez(tmp_path / "odd.npz", x=np.array([{}, []], object))
    refused(lambda: source().open("train"), "cannot be read .*without objects")
    (tmp_path / "odd.npz").write_bytes(b"no archive")
    refused(lambda: source().open("train"), "cannot be read .*not a zip file")
    (tmp_path / "odd.npy").write_bytes(b"no array")
    refused(lambda: source("odd.npy").open("train"), "cannot be mapped")
    np.savez(tmp_path / "odd.npz", x=np.array(["a", "b"]))
    refused(lambda: source().open("train"), "is the text .*Name its classes")
    np.savez(tmp_path / "odd.npz", x=np.array([1j]))
    refused(lambda: source().open("train"), "not numbers of one shape")
    (tmp_path / "a.txt").write_text("a")
    refused(lambda: source("a.txt").open("train"), "does not end in .npy or .npz")
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "a.txt").write_text("a")
    refused(lambda: source("empty").open("train"), "no file in the folder ends in")
    refused(lambda: source("nowhere").open("train"), "no file or folder")


def test_settings_that_exclude_each_other_are_one_line():
    def source(**settings):
        return lambda: data.Csv(path="x.csv", **settings)

    names = {"train": "train"}
    refused(source(split_names=names, holdout=0.1), "holdout has no effect with split_")
    refused(source(split_names={"fit": "train"}), "no split 'fit'")
    refused(source(holdout=0.1, eval_path="y.csv"), "has no effect with eval_path")
    one = data.Csv(path="x.csv", split_names=names)
    assert re.search("eval_batches=0", str(_error(lambda: one.split_name("eval"))))


def _error(call) -> Exception:
    with pytest.raises(ValueError) as caught:
        call()
    return caught.value
