"""Tests of sources, documents, packing and tokenizers."""

import builtins
import dataclasses
import math
import os
import subprocess
import sys

import numpy as np
import pytest

from meshloom.trainer.data import documents
from meshloom.trainer.data.packing import PackedDataset
from meshloom.trainer.data.sources import ArrayRecords, Synthetic, Text, throughput_unit
from meshloom.trainer.data.tokenizer import Bytes, HuggingFaceTokenizer


def write(folder, files):
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return str(folder)


def names(found):
    return [document.name for document in found]


def stream(found):
    tokens = []
    for document in found:
        with open(document.path, "rb") as file:
            tokens += [*file.read(), 256]
    return tokens


@pytest.fixture
def folder(tmp_path):
    files = {f"part{i % 3}/{i:02d}.txt": b"text %d " % i * i for i in range(1, 41)}
    return write(tmp_path / "corpus", files)


def test_files_are_found_in_a_fixed_order(tmp_path):
    root = write(
        tmp_path,
        {
            "b.py": b"b",
            "a/z.py": b"z",
            "a/deep/er/y.py": b"y",
            "a.txt": b"text",
            "B.py": b"B",
            "empty.py": b"",
            ".hidden.py": b"h",
            ".git/x.py": b"x",
            "a/__pycache__/c.py": b"c",
        },
    )

    def find(path, pattern=None):
        return names(documents.find(path, pattern, what="Text"))

    python = ["B.py", "a/deep/er/y.py", "a/z.py", "b.py"]
    assert find(root, "**/*.py") == python
    assert find(f"{root}/**/*.py") == python
    assert find(root) == [*python[:1], "a.txt", *python[1:]]
    assert find(root, "*.py") == ["B.py", "b.py"]
    assert find(root, "a/**") == ["a/deep/er/y.py", "a/z.py"]
    assert find(root, "*/[x-z].py") == ["a/z.py"]
    assert find(root, "[!B].py") == ["b.py"]
    assert find(root, "?.???") == ["a.txt"]
    for crossing in ("a?z.py", "a[!x]z.py"):
        with pytest.raises(ValueError, match="no file matches"):
            find(root, crossing)
    assert find(f"{root}/b.py") == ["b.py"]


def test_the_standard_library_is_source_without_tests():
    found = documents.find("stdlib", what="Text")
    assert {"abc.py", "json/decoder.py", "asyncio/tasks.py"} <= set(names(found))
    for name in names(found):
        assert name.endswith(".py")
        assert not {"test", "tests", "site-packages"} & set(name.split("/"))
        assert "_sysconfigdata" not in name
    assert sum(document.num_bytes for document in found) > 5_000_000


def test_missing_and_empty_inputs_are_named(tmp_path):
    root = write(tmp_path, {"a.txt": b"text", "empty.log": b""})
    with pytest.raises(
        ValueError, match=r"Text\(path='.*nowhere'\): no file or folder.*relative to"
    ):
        Text(path=f"{root}/nowhere", length=4).open("train")
    with pytest.raises(ValueError, match="no file or folder '.*nowhere'"):
        Text(path=f"{root}/nowhere/*.txt", length=4).open("train")
    with pytest.raises(ValueError, match=r"no file matches '\*\.rst' in the folder"):
        Text(path=root, pattern="*.rst", length=4).open("train")
    with pytest.raises(ValueError, match="no file except 1 empty files matches"):
        Text(path=root, pattern="*.log", length=4).open("train")
    with pytest.raises(ValueError, match="needs a folder"):
        Text(path=f"{root}/*.txt", pattern="*.txt", length=4).open("train")


def test_an_unreadable_file_is_an_error(tmp_path):
    (tmp_path / "gone.txt").symlink_to(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="gone.txt' cannot be read .No such file"):
        Text(path=str(tmp_path), length=4).open("train")


@pytest.mark.parametrize("length", [1, 3, 16, 64, 1000])
def test_examples_are_windows_of_the_stream(folder, length):
    dataset = Text(path=folder, length=length, holdout=0.0).open("train")
    expected = stream(documents.find(folder, what="Text"))
    about = dataset.describe()
    assert about["tokens"] == len(expected)
    assert len(dataset) == about["examples"] == (len(expected) - 1) // length
    assert about["dropped_tokens"] == len(expected) - len(dataset) * length - 1
    for i in {0, 1 % len(dataset), len(dataset) // 2, len(dataset) - 1}:
        example = dataset[i]
        window = expected[i * length : i * length + length + 1]
        assert example["inputs"].tolist() == window[:-1]
        assert example["targets"].tolist() == window[1:]
        assert example["weights"].tolist() == [1.0] * length
        assert example["inputs"].dtype == example["targets"].dtype == np.int32
    with pytest.raises(IndexError):
        dataset[len(dataset)]


def test_packed_documents_can_be_separated(tmp_path):
    root = write(tmp_path, {"a": b"ab", "b": b"c", "c": b"defghij"})
    source = Text(path=root, length=6, holdout=0.0, separate_documents=True)
    first, second = source.open("train")
    assert first["inputs"].tolist() == [97, 98, 256, 99, 256, 100]
    # An end token starts the next document.
    assert first["segments"].tolist() == [1, 1, 2, 2, 3, 3]
    assert first["positions"].tolist() == [0, 1, 0, 1, 0, 1]
    assert second["inputs"].tolist() == [101, 102, 103, 104, 105, 106]
    assert second["segments"].tolist() == [1] * 6
    assert second["positions"].tolist() == list(range(6))
    assert second["targets"][-1] == 256


def test_segments_come_from_lengths_not_from_token_values():
    dataset = PackedDataset(
        np.array([3, 3]),
        lambda document, start, stop: np.full(stop - start, 9),
        end=9,
        length=7,
        num_bytes=6,
        separate_documents=True,
        what="",
        about={},
    )
    assert dataset[0]["segments"].tolist() == [1, 1, 1, 2, 2, 2, 2]


def test_holdout_is_a_partition_and_adding_files_moves_no_others(folder):
    def split_names(holdout):
        found = documents.find(folder, what="Text")
        keys = {name: documents.split_key(name) for name in names(found)}
        return {n for n, key in keys.items() if documents.is_held_out(key, holdout)}

    before = split_names(0.3)
    assert 4 < len(before) < 20
    counts = [
        Text(path=folder, length=8, holdout=0.3).open(split).describe()["documents"]
        for split in ("train", "eval")
    ]
    assert counts == [40 - len(before), len(before)]
    with open(f"{folder}/new.txt", "w") as file:
        file.write("more")
    assert split_names(0.3) - {"new.txt"} == before
    assert before <= split_names(0.5)


def test_the_split_rule_never_changes():
    """Old runs must not find their evaluation documents in the training data."""
    key = documents.split_key("json/decoder.py")
    assert key == 0x3B2E3CB3D29D57A5
    # 0x3B2E... is 0.2312 of 2**64.
    assert documents.is_held_out(key, 0.232)
    assert not documents.is_held_out(key, 0.231)


def test_too_little_data_is_named(folder, tmp_path):
    small = write(tmp_path / "small", {"a.txt": b"0123456789"})
    with pytest.raises(
        ValueError, match="has 11 tokens.*length 11 needs 12.*at most 10"
    ):
        Text(path=small, length=11, holdout=0.0).open("train")
    assert len(Text(path=small, length=10, holdout=0.0).open("train")) == 1
    with pytest.raises(ValueError, match="split 'eval' is empty.*raise holdout"):
        Text(path=folder, length=4, holdout=0.0).open("eval")
    with pytest.raises(ValueError, match="split 'train' is empty.*Lower holdout"):
        Text(path=small, length=4, holdout=0.96).open("train")


def test_a_file_that_shrinks_is_an_error(tmp_path):
    root = write(tmp_path, {"a.txt": b"0123456789"})
    dataset = Text(path=root, length=5, holdout=0.0).open("train")
    (tmp_path / "a.txt").write_bytes(b"0123")
    with pytest.raises(ValueError, match=r"a.txt' changed .* \(4 bytes, 10 when"):
        dataset[0]


def test_a_file_that_changes_and_keeps_its_size_is_an_error(tmp_path):
    root = write(tmp_path, {"a.txt": b"0123456789"})
    os.utime(tmp_path / "a.txt", (1, 1))
    dataset = Text(path=root, length=5, holdout=0.0).open("train")
    assert dataset[0]["inputs"].tolist() == list(b"01234")
    (tmp_path / "a.txt").write_bytes(b"9876543210")
    with pytest.raises(ValueError, match="a.txt' changed while it was in use"):
        dataset[0]


def test_bits_per_byte(tmp_path):
    root = write(tmp_path, {"a": b"abc", "b": b"d"})
    dataset = Text(path=root, length=2, holdout=0.0).open("train")
    # 6 tokens (two of them end tokens) for 4 bytes, at one bit per token.
    units = dataset.loss_units(math.log(2))
    assert units == pytest.approx({"bits_per_byte": 1.5}, rel=1e-12)


def test_bad_settings_raise_at_construction():
    for build, message in [
        (lambda: Text(path="", length=4), "Text: path is empty"),
        (lambda: Text(path="x", length=0), "Text: length is 0"),
        (lambda: Text(path="x", length=4, holdout=1.0), "holdout is 1.0"),
        (lambda: ArrayRecords(path="x", length=4, holdout=-0.1), "holdout is -0.1"),
        (lambda: Synthetic(vocab_size=0, length=4), "vocab_size is 0"),
        (lambda: Synthetic(vocab_size=3, length=4), r"branches is 4; .*\(3\)"),
    ]:
        with pytest.raises(ValueError, match=message):
            build()
    with pytest.raises(ValueError, match="Text: no split 'valid'"):
        Text(path="x", length=4).open("valid")  # type: ignore[arg-type]
    with pytest.raises(dataclasses.FrozenInstanceError):
        Text(path="x", length=4).length = 5  # type: ignore[misc]


def test_synthetic_is_reproducible_and_learnable():
    source = Synthetic(vocab_size=11, length=200, num_examples=30, branches=3, seed=4)
    train, again = source.open("train"), source.open("train")
    held_out = source.open("eval")
    successors = {}
    for dataset in (train, held_out):
        for i in range(20):
            example = dataset[i]
            assert example["inputs"].shape == (200,)
            np.testing.assert_array_equal(
                example["inputs"][1:], example["targets"][:-1]
            )
            pairs = zip(example["inputs"], example["targets"], strict=True)
            for token, successor in pairs:
                successors.setdefault(int(token), set()).add(int(successor))
    # Both splits use the same graph; each token has exactly `branches` successors.
    assert {len(following) for following in successors.values()} == {3}
    assert len(successors) == 11
    np.testing.assert_array_equal(train[7]["inputs"], again[7]["inputs"])
    assert (train[7]["inputs"] != held_out[7]["inputs"]).any()
    assert (train[7]["inputs"] != train[8]["inputs"]).any()
    other = dataclasses.replace(source, seed=5).open("train")
    assert (train[7]["inputs"] != other[7]["inputs"]).any()
    assert train.describe()["lowest_loss"] == pytest.approx(math.log(3))
    assert throughput_unit(source.open("train")) == ("tokens", source.length)


def test_bytes_round_trip():
    tokenizer = Bytes()
    text = "naïve Ω\n"
    ids = tokenizer.encode(text)
    assert ids.tolist() == list(text.encode())
    assert tokenizer.decode([*ids, tokenizer.end]) == text
    assert tokenizer.decode(ids[:3]) == "na\ufffd"
    assert tokenizer.decode([]) == ""
    with pytest.raises(ValueError, match="token 300 is outside 0..256"):
        tokenizer.decode([65, 300])
    assert Text(path="x", length=4).tokenizer().vocab_size == 257


def test_a_tokenizers_file(tokenizer_file):
    tokenizer = HuggingFaceTokenizer(tokenizer_file)
    assert (tokenizer.vocab_size, tokenizer.end) == (5, 4)
    ids = tokenizer.encode(b"low high low new")
    # The file asks for truncation to 2 tokens, which must not affect documents.
    assert ids.tolist() == [1, 2, 1, 0]
    assert tokenizer.decode([1, 2, 4]) == "low high"
    chosen = HuggingFaceTokenizer(tokenizer_file, end_token="</s>")
    assert chosen.end == 3
    with pytest.raises(ValueError, match="none of <stop> is among its 5 tokens"):
        HuggingFaceTokenizer(tokenizer_file, end_token="<stop>")


def test_bad_tokenizer_files_are_named(tmp_path):
    with pytest.raises(ValueError, match="none.json': no such file"):
        HuggingFaceTokenizer(tmp_path / "none.json")
    (tmp_path / "bad.json").write_text("{}")
    with pytest.raises(ValueError, match="bad.json': not a tokenizer.json file"):
        HuggingFaceTokenizer(tmp_path / "bad.json")


def test_the_missing_extra_is_named(monkeypatch, tokenizer_file):
    real_import = builtins.__import__

    def without_tokenizers(name, *args, **kwargs):
        if name == "tokenizers":
            raise ImportError(name)
        return real_import(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without_tokenizers)
    with pytest.raises(ValueError, match=r"pip install 'meshloom\[tokenizers\]'"):
        HuggingFaceTokenizer(tokenizer_file)


@pytest.fixture
def tokenizer_file(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    vocabulary = {"[UNK]": 0, "low": 1, "high": 2, "</s>": 3, "<|endoftext|>": 4}
    model = tokenizers.models.WordLevel(vocabulary, unk_token="[UNK]")
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(["</s>", "<|endoftext|>"])
    tokenizer.enable_truncation(2)
    path = tmp_path / "tokenizer.json"
    tokenizer.save(str(path))
    return path


def test_sources_do_not_import_jax():
    code = "import sys, meshloom.trainer.data.sources; assert 'jax' not in sys.modules"
    result = subprocess.run([sys.executable, "-c", code], timeout=60)
    assert result.returncode == 0
