"""Tests of building a corpus, resuming a killed build, and reading it back."""

import fcntl
import json
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from meshloom.trainer.data import corpus, corpus_files
from meshloom.trainer.data.sources import ArrayRecords, Text

SHARD_SIZE = 3000


@pytest.fixture
def folder(tmp_path):
    root = tmp_path / "text"
    for i in range(30):
        path = root / f"part{i % 3}" / f"{i:02d}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        # One document is longer than two records.
        size = 2 * corpus_files.RECORD_TOKENS + 100 if i == 7 else 37 * (i + 1)
        path.write_bytes(bytes((i + j * j) % 256 for j in range(size)))
    (root / "empty.txt").touch()
    return str(root)


def contents(path):
    return {file.name: file.read_bytes() for file in sorted(path.iterdir())}


@pytest.mark.parametrize(
    "holdout,split", [(0.0, "train"), (0.3, "train"), (0.3, "eval")]
)
def test_a_built_corpus_gives_the_examples_of_its_text(
    folder, tmp_path, holdout, split
):
    corpus.build(folder, tmp_path / "built", shard_size=SHARD_SIZE)
    settings = dict(length=128, holdout=holdout, separate_documents=True)
    text = Text(path=folder, **settings).open(split)
    built_source = ArrayRecords(path=str(tmp_path / "built"), **settings)
    built = built_source.open(split)
    assert len(built) == len(text)
    for i in range(len(text)):
        for name, array in text[i].items():
            np.testing.assert_array_equal(array, built[i][name])
            assert array.dtype == built[i][name].dtype
    assert text.loss_units(1.0) == built.loss_units(1.0)
    same = ("documents", "bytes", "tokens", "examples", "dropped_tokens", "vocab_size")
    for key in same:
        assert text.describe()[key] == built.describe()[key]
    assert built_source.tokenizer().decode([104, 105, 256]) == "hi"


def test_only_the_records_of_a_window_are_read(folder, tmp_path, monkeypatch):
    corpus.build(folder, tmp_path / "built")
    built = corpus_files.Corpus(str(tmp_path / "built"), what="")
    records, reads = built._records, []

    class Counted:
        def __getitem__(self, i):
            reads.append(i)
            return records[i]

    monkeypatch.setattr(built, "_records", Counted())
    document = int(built.index["tokens"].argmax())
    size = corpus_files.RECORD_TOKENS
    expected = [(7 + j * j) % 256 for j in range(2 * size + 100)]
    for start, stop, num_records in [
        (0, 5, 1),
        (size, 2 * size, 1),
        (size - 1, size + 1, 2),
        (2 * size + 99, 2 * size + 100, 1),
    ]:
        reads.clear()
        assert built.read(document, start, stop).tolist() == expected[start:stop]
        assert len(reads) == num_records


def test_the_manifest_counts_and_the_digest_ignores_shards(folder, tmp_path):
    manifest = corpus.build(folder, tmp_path / "small", shard_size=SHARD_SIZE)
    assert manifest["documents"] == 30
    assert manifest["bytes"] == manifest["tokens"]
    assert manifest["vocab_size"] == 257
    assert len(manifest["shards"]) > 3
    assert sum(shard["documents"] for shard in manifest["shards"]) == 30
    assert json.loads((tmp_path / "small/manifest.json").read_text()) == manifest

    one_shard = corpus.build(folder, tmp_path / "one_shard")
    assert len(one_shard["shards"]) == 1
    assert one_shard["digest"] == manifest["digest"]

    with open(f"{folder}/part0/00.txt", "r+b") as file:
        file.write(b"!")
    changed = corpus.build(folder, tmp_path / "changed")
    assert changed["digest"] != one_shard["digest"]


BUILD = """
import sys, time
from meshloom.trainer.data import corpus

def slowly(progress):
    time.sleep(0.02)

corpus.build(sys.argv[1], sys.argv[2], shard_size=int(sys.argv[3]), progress=slowly)
"""


def test_a_killed_build_resumes_to_the_same_bytes(folder, tmp_path):
    output = tmp_path / "killed"
    command = [sys.executable, "-c", BUILD, folder, str(output), str(SHARD_SIZE)]
    process = subprocess.Popen(command)
    try:
        deadline = time.monotonic() + 60
        while not (output / "shard-00001.json").exists():
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.002)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait(timeout=10)
    assert not (output / "manifest.json").exists()
    with pytest.raises(ValueError, match="not complete. Run the same"):
        ArrayRecords(path=str(output), length=8).open("train")
    done = {
        file.name: file.stat().st_mtime_ns for file in output.glob("shard-0000[01]*")
    }
    (output / "shard-00003.arrayrecord.tmp").write_bytes(b"half a shard")

    seen = []
    corpus.build(folder, output, shard_size=SHARD_SIZE, progress=seen.append)
    for name, changed in done.items():
        assert (output / name).stat().st_mtime_ns == changed
    assert seen[0].documents > 0 and seen[-1].bytes == seen[-1].num_bytes

    corpus.build(folder, tmp_path / "uninterrupted", shard_size=SHARD_SIZE)
    assert contents(output) == contents(tmp_path / "uninterrupted")


def test_a_complete_build_is_left_alone(folder, tmp_path):
    first = corpus.build(folder, tmp_path / "built")
    before = {p.name: p.stat().st_mtime_ns for p in (tmp_path / "built").iterdir()}
    assert corpus.build(folder, tmp_path / "built") == first
    after = {p.name: p.stat().st_mtime_ns for p in (tmp_path / "built").iterdir()}
    assert after == before


def test_a_different_build_in_the_folder_is_an_error(folder, tmp_path):
    output = tmp_path / "built"
    corpus.build(folder, output, shard_size=SHARD_SIZE)
    before = contents(output)
    with pytest.raises(
        ValueError, match=r"num_shards is \d+ there and 1 now; shard_size is 3000 there"
    ):
        corpus.build(folder, output)
    with open(f"{folder}/new.txt", "w") as file:
        file.write("more")
    with pytest.raises(
        ValueError, match="documents is 30 there and 31 now.*listing is"
    ):
        corpus.build(folder, output, shard_size=SHARD_SIZE)
    assert contents(output) == before


def test_a_folder_of_other_things_is_left_alone(folder, tmp_path):
    (tmp_path / "home").mkdir()
    (tmp_path / "home/notes.tmp").write_text("precious")
    with pytest.raises(ValueError, match="home' is not empty and contains no build"):
        corpus.build(folder, tmp_path / "home")
    assert contents(tmp_path / "home") == {"notes.tmp": b"precious"}
    with pytest.raises(ValueError, match=r"cannot write to the folder .*notes.tmp"):
        corpus.build(folder, tmp_path / "home/notes.tmp")


def test_two_builds_in_one_folder_are_an_error(folder, tmp_path):
    handle = os.open(tmp_path, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        with pytest.raises(ValueError, match="another process is building"):
            corpus.build(folder, tmp_path)
    finally:
        os.close(handle)


def test_an_output_inside_the_input_is_not_input(folder):
    output = os.path.join(folder, "built")
    first = corpus.build(folder, output)
    assert corpus.build(folder, output) == first


def test_bad_inputs_are_named(folder, tmp_path):
    with pytest.raises(ValueError, match="input '.*nowhere': no file or folder"):
        corpus.build(f"{folder}/nowhere", tmp_path / "built")
    with pytest.raises(ValueError, match="shard size is 0"):
        corpus.build(folder, tmp_path / "built", shard_size=0)
    assert not (tmp_path / "built").exists()


def test_damaged_and_missing_corpora_are_named(folder, tmp_path):
    def open_built():
        return ArrayRecords(path=str(tmp_path / "built"), length=8).open("train")

    with pytest.raises(ValueError, match="no folder '.*built'.*meshloom data build"):
        open_built()
    (tmp_path / "built").mkdir()
    with pytest.raises(ValueError, match="contains no manifest.json"):
        open_built()
    corpus.build(folder, tmp_path / "built")
    index = tmp_path / "built/shard-00000.npy"
    index.write_bytes(index.read_bytes()[:-1] + b"?")
    with pytest.raises(ValueError, match="shard-00000.npy' is missing or was changed"):
        open_built()
    data = tmp_path / "built/shard-00000.arrayrecord"
    data.write_bytes(data.read_bytes()[:-1])
    with pytest.raises(ValueError, match=r"has \d+ bytes, but the manifest says \d+"):
        open_built()


def test_a_corpus_of_another_tokenizer(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    vocabulary = {"[UNK]": 0, "low": 1, "high": 70000, "<|endoftext|>": 3, "<b>": 4}
    model = tokenizers.models.WordLevel(vocabulary, unk_token="[UNK]")
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "words.json"))
    (tmp_path / "text").mkdir()
    (tmp_path / "text/a").write_text("low high")
    (tmp_path / "text/b").write_text("high other low")
    settings = dict(tokenizer=tmp_path / "words.json")
    output = tmp_path / "built"
    manifest = corpus.build(str(tmp_path / "text"), output, end_token="<b>", **settings)
    # Token ids above 65535 need four bytes.
    assert (manifest["tokens"], manifest["dtype"]) == (5, "uint32")
    # The corpus has its own copy of the tokenizer.
    (tmp_path / "words.json").rename(tmp_path / "moved.json")
    source = ArrayRecords(path=str(output), length=6, holdout=0.0)
    dataset = source.open("train")
    assert dataset[0]["inputs"].tolist() == [1, 70000, 4, 70000, 0, 1]
    assert dataset[0]["targets"][-1] == 4
    assert source.tokenizer().end == 4
    assert source.tokenizer().decode([1, 70000]) == "low high"
    # 7 tokens for 22 bytes.
    nats = np.log(2) * 22 / 7
    assert dataset.loss_units(nats)["bits_per_byte"] == pytest.approx(1.0)

    with pytest.raises(ValueError, match="tokenizer is .* there and .*'bytes'"):
        corpus.build(str(tmp_path / "text"), output)
    (tmp_path / "text/c").write_bytes(b"low \xff")
    with pytest.raises(ValueError, match="text/c' is not UTF-8 text .byte 4"):
        corpus.build(
            str(tmp_path / "text"),
            tmp_path / "other",
            tokenizer=tmp_path / "moved.json",
        )


def test_progress_is_plain_lines_without_a_terminal(
    folder, tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(corpus, "_PRINT_SECONDS", 0.0)
    corpus.build_with_progress(folder, tmp_path / "built", shard_size=SHARD_SIZE)
    lines = capsys.readouterr().out.splitlines()
    assert lines[-2].startswith("100%: 30 of 30 documents")
    assert lines[-1].startswith(f"{tmp_path / 'built'}: 30 documents")
    assert not any("\x1b" in line for line in lines)


def test_progress_is_a_bar_on_a_terminal(folder, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    corpus.build_with_progress(folder, tmp_path / "built", shard_size=SHARD_SIZE)
    out = capsys.readouterr().out
    assert "shard " in out and "━" in out
