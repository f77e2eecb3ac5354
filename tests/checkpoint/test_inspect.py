"""`meshloom ckpt`: what is in a checkpoint, whether it is intact, how two differ."""

import json
import shutil
import struct
import sys

import ml_dtypes
import numpy as np
import pytest
import safetensors
from test_restore import DAMAGES
from tiny_runs import command, main, refused, train

from meshloom.trainer.checkpoint import inspect


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run of 8 steps on a mesh, saved at 4 and 8."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    assert main([*train(folder), "--steps", "8", "--mesh", "fsdp=2,data=4"]) == 0
    return folder


def ckpt(capfd, *argv) -> tuple[int, str]:
    capfd.readouterr()
    status = main(["ckpt", *map(str, argv)])
    return status, capfd.readouterr().out


def test_ls_shows_what_counts_and_what_does_not(run, tmp_path, capfd):
    folder = tmp_path / "run"
    shutil.copytree(run, folder)
    (folder / "checkpoints" / "12").mkdir()
    status, output = ckpt(capfd, "ls", folder)
    assert status == 0
    rows = [line.split()[:2] for line in output.splitlines()[1:]]
    assert rows == [["4", "committed"], ["8", "committed"], ["12", "not"]]
    assert "data=4, fsdp=2" in output


def test_inspect_shows_arrays_and_origin(run, capfd):
    status, output = ckpt(capfd, "inspect", run, "--step", "4")
    assert status == 0
    (line,) = [x for x in output.splitlines() if x.startswith("params/embedding ")]
    assert line.split()[1:5] == ["64x32", "float32", "8.0", "KiB"]
    assert "next example" in output and " 64\n" in output  # 4 steps of 16


def test_intact_checkpoints_are_verified(run, capfd):
    status, output = ckpt(capfd, "verify", run)
    assert status == 0
    assert output == "step 4: 33 arrays as saved\nstep 8: 33 arrays as saved\n"


@pytest.mark.parametrize("name", DAMAGES)
def test_damage_is_found(name, run, tmp_path, capfd):
    folder = tmp_path / "run"
    shutil.copytree(run, folder)
    DAMAGES[name](folder / "checkpoints" / "8")
    # In a process: reads that tensorstore's threads abandon print tracebacks.
    found = command("ckpt", "verify", str(folder))
    assert found.returncode == 1, found.stderr
    assert found.stdout.startswith("step 4: 33 arrays as saved\nstep 8: damaged\n  ")
    assert ckpt(capfd, "verify", folder / "checkpoints" / "4")[0] == 0


def test_diff_leaf_by_leaf(run, capfd):
    status, output = ckpt(capfd, "diff", run, run)
    assert (status, output) == (0, "No difference.\n")
    status, output = ckpt(capfd, "diff", run, run, "--step", "4")
    assert status == 1
    assert "~ step: largest difference 4\n" in output
    assert len(output.splitlines()) == 33


def test_export_is_a_safetensors_file(run, tmp_path, capfd):
    file = tmp_path / "weights.safetensors"
    status, output = ckpt(capfd, "export", run, "--output", file)
    assert (status, output) == (0, f"10 arrays of step 8 written to {file}\n")
    found = read_safetensors(file)
    stored = inspect.Stored.find(run)
    for path, array in stored.arrays():
        if path.startswith("params/"):
            name = path.removeprefix("params/")
            np.testing.assert_array_equal(found.pop(name), array)
    assert not found and list(tmp_path.iterdir()) == [file]
    with safetensors.safe_open(file, framework="numpy") as opened:
        assert opened.metadata() == {"step": "8"}
        assert len(opened.keys()) == 10
    assert ckpt(capfd, "export", run, "--all", "--output", file)[0] == 0
    assert len(read_safetensors(file)) == 33


class Arrays:
    """Stands for a checkpoint of arrays that a run does not have."""

    step = 8

    def __init__(self, **arrays):
        self._arrays = arrays

    def arrays(self):
        return ((f"params/{name}", array) for name, array in self._arrays.items())


def test_export_keeps_every_shape_type_and_order(tmp_path):
    file = tmp_path / "weights.safetensors"
    arrays = {
        "scalar": np.array(3, np.int32),
        "transposed": np.arange(6, dtype=np.float32).reshape(2, 3).T,
        "strided": np.arange(8, dtype=np.float32)[::2],
        "empty": np.zeros((0, 4), np.float32),
        "bfloat16": np.arange(3).astype(ml_dtypes.bfloat16),
    }
    assert inspect.export(Arrays(**arrays), file) == 5
    (tmp_path / "other").touch()
    assert file.stat().st_mode == (tmp_path / "other").stat().st_mode
    found = read_safetensors(file)
    assert found.keys() == arrays.keys()
    for name, array in arrays.items():
        assert found[name].dtype == array.dtype
        np.testing.assert_array_equal(found[name], array)


def test_export_refuses_a_type_that_the_format_lacks(tmp_path):
    file = tmp_path / "weights.safetensors"
    file.write_text("before")
    arrays = Arrays(x=np.zeros(2, ml_dtypes.int4))
    with pytest.raises(ValueError, match='cannot be exported: Unknown dtype "int4"'):
        inspect.export(arrays, file)
    assert file.read_text() == "before" and list(tmp_path.iterdir()) == [file]


def test_export_names_the_extra_that_is_missing(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(ValueError, match=r"pip install 'meshloom\[safetensors\]'"):
        inspect.export(Arrays(), tmp_path / "weights.safetensors")


DTYPES = {"F32": np.float32, "I32": np.int32, "BF16": ml_dtypes.bfloat16}


def read_safetensors(file) -> dict[str, np.ndarray]:
    """Reads a file by the specification: length, JSON with offsets, bytes."""
    content = file.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    assert length % 8 == 0
    head, data = json.loads(content[8 : 8 + length]), content[8 + length :]
    assert head.pop("__metadata__") == {"step": "8"}
    arrays = {}
    for name, about in head.items():
        start, stop = about["data_offsets"]
        dtype = DTYPES[about["dtype"]]
        arrays[name] = np.frombuffer(data[start:stop], dtype).reshape(about["shape"])
    assert max(about["data_offsets"][1] for about in head.values()) == len(data)
    return arrays


def test_wrong_places_and_steps(run, tmp_path, capfd):
    assert "holds no committed checkpoint" in refused(
        capfd, ["ckpt", "ls", str(tmp_path)]
    )
    assert "has no committed checkpoint of step 5; it has 4, 8" in refused(
        capfd, ["ckpt", "inspect", str(run), "--step", "5"]
    )
