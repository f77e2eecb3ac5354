"""Tests of splits: by fraction of the documents, by path, and within one file."""

import numpy as np
import pytest

from meshloom.trainer.data import ArrayRecords, Text, corpus

SPLITS = ("train", "eval", "test")


def content(dataset) -> bytes:
    """Returns the bytes of all complete examples, in order."""
    rows = [dataset[i] for i in range(len(dataset))]
    found = np.concatenate([row["inputs"] for row in rows] + [rows[-1]["targets"][-1:]])
    return bytes(found[found < 256].tolist())


@pytest.fixture
def book(tmp_path) -> bytes:
    """Returns the text of book/book.txt, 1000 bytes; also writes three/*.txt."""
    text = bytes(np.random.default_rng(0).integers(97, 123, 1000).tolist())
    (tmp_path / "book").mkdir()
    (tmp_path / "book" / "book.txt").write_bytes(text)
    (tmp_path / "three").mkdir()
    for name, letter in (("train", b"a"), ("val", b"b"), ("test", b"c")):
        (tmp_path / "three" / f"{name}.txt").write_bytes(letter * 100)
    return text


def test_the_end_of_a_single_file_is_held_out(book, tmp_path):
    source = Text(path=str(tmp_path / "book" / "book.txt"), length=5)
    train, held_out = source.open("train"), source.open("eval")
    assert content(train) == book[: len(content(train))]
    assert (train.num_tokens, held_out.num_tokens) == (950 + 1, 50 + 1)
    assert content(held_out) == book[950 : 950 + len(content(held_out))]


def test_three_parts_of_a_single_file(book, tmp_path):
    fractions = {"holdout": 0.2, "test_holdout": 0.1}
    source = Text(path=str(tmp_path / "book"), length=1, **fractions)
    parts = [content(source.open(split)) for split in SPLITS]
    assert [len(part) for part in parts] == [700, 200, 100]
    assert b"".join(parts) == book
    corpus.build(str(tmp_path / "book"), tmp_path / "built")
    built = ArrayRecords(path=str(tmp_path / "built"), length=1, **fractions)
    assert [content(built.open(split)) for split in SPLITS] == parts
    ratio = [built.open(split).loss_units(1.0) for split in SPLITS]
    assert ratio == [source.open(split).loss_units(1.0) for split in SPLITS]


@pytest.mark.parametrize("path", ["three", "three/train.txt"])
def test_files_by_name(book, tmp_path, path):
    """Also if the folder to train on contains the held-out files."""
    source = Text(
        path=str(tmp_path / path),
        length=10,
        eval_path=str(tmp_path / "three" / "val.txt"),
        test_path=str(tmp_path / "three" / "t*t.txt"),
    )
    assert [set(content(source.open(split))) for split in SPLITS] == [
        set(b"a"),
        set(b"b"),
        set(b"c"),
    ]
    assert list(source.open("eval").files()) == ["val.txt"]


def test_the_test_split_of_many_documents(tmp_path):
    for number in range(60):
        (tmp_path / f"{number}.txt").write_text(f"document {number}\n" * 3)
    two = Text(path=str(tmp_path), length=4, holdout=0.2)
    three = Text(path=str(tmp_path), length=4, holdout=0.2, test_holdout=0.3)
    found = {split: set(three.open(split).files()) for split in SPLITS}
    assert sum(map(len, found.values())) == 60 and min(map(len, found.values())) > 3
    assert not found["eval"] & found["test"] and not found["train"] & found["test"]
    # Adding a test split does not change the eval split.
    assert set(two.open("eval").files()) == found["eval"]
    assert set(two.open("train").files()) == found["train"] | found["test"]


def test_a_built_corpus_for_evaluation(book, tmp_path):
    for name in ("train", "val"):
        corpus.build(str(tmp_path / "three" / f"{name}.txt"), tmp_path / f"b-{name}")
    built = ArrayRecords(
        path=str(tmp_path / "b-train"), length=9, eval_path=str(tmp_path / "b-val")
    )
    assert set(content(built.open("train"))) == set(b"a")
    assert set(content(built.open("eval"))) == set(b"b")
    assert built.open("train").num_tokens == 101  # none of it is held out


def test_contradictory_settings_are_errors(book, tmp_path):
    three, val = str(tmp_path / "three"), str(tmp_path / "three" / "val.txt")
    with pytest.raises(ValueError, match="holdout=0.1 has no effect with eval_path"):
        Text(path=three, length=4, eval_path=val, holdout=0.1)
    with pytest.raises(ValueError, match="leave nothing to train on"):
        Text(path=three, length=4, holdout=0.5, test_holdout=0.5)
    with pytest.raises(
        ValueError, match=r"test_holdout=0.0 of 3 documents selects none. Set test_path"
    ):
        Text(path=three, length=4).open("test")
    with pytest.raises(ValueError, match=r"Text\(eval_path='.*vol.txt'\): no file or"):
        Text(path=three, length=4, eval_path=f"{three}/vol.txt").open("train")
    with pytest.raises(ValueError, match="no split 'valid'"):
        Text(path=three, length=4).open("valid")  # type: ignore
