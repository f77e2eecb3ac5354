"""Tests of writing metric files, truncating them at a resume, and reading them."""

import json
import math
import os
import sys

import numpy as np
import pytest

from meshloom.trainer.record import metrics
from meshloom.trainer.record.metrics import FileWriter, JsonLines


def test_rows_come_back_as_written(tmp_path):
    file = JsonLines(tmp_path / "m.jsonl")
    file.write([{"step": 1, "loss": 2.5}, {"step": np.int64(2), "loss": 0.1}])
    file.write([{"step": 3, "loss": np.float32(0.5), "note": "naïve", "on": True}])
    assert metrics.read(file.path) == [
        {"step": 1, "loss": 2.5},
        {"step": 2, "loss": 0.1},
        {"step": 3, "loss": 0.5, "note": "naïve", "on": True},
    ]


def test_values_that_are_not_finite_are_valid_json_and_come_back(tmp_path):
    file = JsonLines(tmp_path / "m.jsonl")
    file.write([{"step": 1, "a": math.nan, "b": math.inf, "c": np.float32(-np.inf)}])

    def refuse(name):
        raise AssertionError(f"{name} is not JSON")

    json.loads(file.path.read_text(), parse_constant=refuse)
    (row,) = metrics.read(file.path)
    assert math.isnan(row["a"]) and row["b"] == math.inf and row["c"] == -math.inf


@pytest.mark.parametrize("row", [{"loss": 1.0}, {"step": 1.0}, {"step": "1"}])
def test_a_row_needs_an_integer_step(tmp_path, row):
    file = JsonLines(tmp_path / "m.jsonl")
    with pytest.raises(ValueError, match="needs an integer `step`"):
        file.write([{"step": 1}, row])
    # Nothing of the group is written.
    assert not file.path.exists()


def test_only_the_reader_ignores_a_torn_last_line(tmp_path):
    file = JsonLines(tmp_path / "m.jsonl")
    file.path.write_text('{"step": 1}\n{"step": 2}\n{"step": 3, "lo')
    assert [row["step"] for row in metrics.read(file.path)] == [1, 2]
    with pytest.raises(ValueError, match="m.jsonl.*incomplete.*truncate_after"):
        file.write([{"step": 4}])
    assert file.truncate_after(2) == 0
    file.write([{"step": 3}])
    assert [row["step"] for row in metrics.read(file.path)] == [1, 2, 3]


@pytest.mark.parametrize("bad", ["{", "", "[1]", '"NaN"', '\xff{"step": 2}'])
def test_any_other_bad_line_is_an_error_with_file_and_line(tmp_path, bad):
    path = tmp_path / "m.jsonl"
    path.write_bytes(b'{"step": 1}\n' + bad.encode("latin-1") + b'\n{"step": 3}\n')
    with pytest.raises(ValueError, match=r"m\.jsonl:2: found .* one JSON object"):
        metrics.read(path)
    with pytest.raises(ValueError, match=r"m\.jsonl:2: found"):
        JsonLines(path).truncate_after(1)


def test_truncate_drops_later_steps_and_keeps_the_rest_byte_for_byte(tmp_path):
    file = JsonLines(tmp_path / "m.jsonl")
    file.write([{"step": s, "loss": 1 / s} for s in range(1, 11)])
    lines = file.path.read_bytes().splitlines(keepends=True)
    assert file.truncate_after(7) == 3
    assert file.path.read_bytes() == b"".join(lines[:7])
    assert file.truncate_after(7) == 0
    assert file.truncate_after(0) == 7
    assert metrics.read(file.path) == []
    assert JsonLines(tmp_path / "absent").truncate_after(3) == 0
    assert os.listdir(tmp_path) == ["m.jsonl"]


def test_a_kill_while_truncating_loses_nothing(tmp_path, monkeypatch):
    file = JsonLines(tmp_path / "m.jsonl")
    file.write([{"step": s} for s in (1, 2, 3)])
    before = file.path.read_bytes()

    def killed(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        file.truncate_after(1)
    assert file.path.read_bytes() == before


def test_truncate_needs_steps(tmp_path):
    path = tmp_path / "m.jsonl"
    path.write_text('{"step": 1}\n{"loss": 1.0}\n')
    with pytest.raises(ValueError, match=r"m\.jsonl:2: no integer `step`"):
        JsonLines(path).truncate_after(1)


def test_file_writer_keeps_both_files_and_stamps_the_time(tmp_path):
    writer = FileWriter(tmp_path, clock=lambda: 1700000000.12345)
    writer.write("train", [{"step": 1, "loss": 3.0}, {"step": 2, "loss": 2.0}])
    writer.write("eval", [{"step": 2, "loss": 2.5}])
    writer.truncate_after(1)
    writer.close()
    assert metrics.read(tmp_path / "metrics.jsonl") == [
        {"step": 1, "loss": 3.0, "time": 1700000000.123}
    ]
    assert metrics.read(tmp_path / "eval.jsonl") == []


def test_tensorboard_writer_writes_event_files(tmp_path):
    writer = metrics.TensorBoardWriter(tmp_path, start=5)
    writer.write("train", [{"step": 6, "loss": 1.5, "note": "no number"}])
    writer.write("eval", [{"step": 6, "bits_per_byte": 2.25}])
    writer.close()
    (events,) = tmp_path.glob("events.out.tfevents.*")
    content = events.read_bytes()
    assert b"train/loss" in content and b"eval/bits_per_byte" in content
    assert b"note" not in content


@pytest.mark.parametrize(
    ("package", "extra", "make"),
    [
        ("wandb", "wandb", lambda path: metrics.WandbWriter(path, "project")),
        ("tensorboardX", "tensorboard", metrics.TensorBoardWriter),
    ],
)
def test_a_missing_package_names_its_extra(tmp_path, monkeypatch, package, extra, make):
    monkeypatch.delitem(sys.modules, package, raising=False)
    monkeypatch.setattr(sys, "path", [])
    message = rf"needs the package {package}.*pip install 'meshloom\[{extra}\]'"
    with pytest.raises(ValueError, match=message):
        make(tmp_path)
