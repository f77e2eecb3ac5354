"""Tests of the subcommands in sequence: data build, train, generate, report."""

import gc
import json
import os
import re

import pytest
from tiny_runs import TINY, command

from meshloom.trainer.cli import main
from meshloom.trainer.commands import devices, train
from meshloom.trainer.config import files as config_files
from meshloom.trainer.record import metrics
from meshloom.trainer.run import train as train_lib


def output(capsys, *argv) -> str:
    """Returns the output of a command that succeeds in this process."""
    capsys.readouterr()
    assert main(list(argv)) == 0
    return capsys.readouterr().out


def refused(capsys, *argv) -> str:
    capsys.readouterr()
    assert main(list(argv)) == 2
    stderr = capsys.readouterr().err
    assert stderr.count("\n") == 1, stderr
    return stderr.removeprefix("meshloom: ").rstrip()


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """Returns a corpus that `meshloom data build` built from text."""
    root = tmp_path_factory.mktemp("corpus")
    (root / "text").mkdir()
    for number in range(40):
        (root / "text" / f"{number}.txt").write_text(f"abc {number} abcabc " * 12)
    argv = ["data", "build", "--input", str(root / "text"), "--shard-size", "4000"]
    assert main([*argv, "--output", str(root / "built")]) == 0
    return root / "built"


@pytest.fixture(scope="module")
def run(corpus, tmp_path_factory):
    """Returns a run on that corpus, started by the command."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    sets = ["data=@data.ArrayRecords()", f'data.path="{corpus}"', "data.length=16"]
    sets += ["data.holdout=0.25", "model.vocab_size=257"]
    result = command(
        *("train", "--config", TINY, "--workdir", str(folder), "--steps", "8"),
        *(flag for value in sets for flag in ("--set", value)),
        *("--mesh", "fsdp=2", "--cpu-devices", "2"),
    )
    assert result.returncode == 0, result.stderr
    assert "2 cpu devices in 1 process, mesh fsdp=2" in result.stdout
    assert "source ArrayRecords" in result.stdout
    assert f"Report: {folder / 'report.html'}" in result.stdout
    return folder


def test_cpu_devices_get_enough_threads(monkeypatch):
    for given, expected in ((None, max(32, os.cpu_count() or 1)), ("9", 9)):
        monkeypatch.delenv("NPROC", raising=False)
        if given:
            monkeypatch.setenv("NPROC", given)
        devices.use_cpu(8)
        assert int(os.environ["NPROC"]) == expected


def test_data_build(corpus, capsys):
    manifest = json.loads((corpus / "manifest.json").read_text())
    assert manifest["documents"] == 40 and len(manifest["shards"]) > 1
    source = str(corpus.parent / "text")
    argv = ("data", "build", "--input", source, "--output", str(corpus))
    again = output(capsys, *argv, "--shard-size", "4000")
    assert again.startswith(f"{corpus}: 40 documents, {manifest['tokens']} tokens")
    assert "contains a different build: num_shards is" in refused(capsys, *argv)


def test_a_corpus_can_be_trained_on(run):
    rows = metrics.read(run / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(1, 9))
    assert rows[-1]["loss"] < rows[0]["loss"]
    (last,) = [row for row in metrics.read(run / "eval.jsonl") if row["step"] == 8]
    assert last["bits_per_byte"] > 0


def test_config_gin_of_a_run_is_a_config(run, capsys):
    shown = output(capsys, "config", "diff", str(run / "config.gin"), str(run))
    assert shown == "No difference.\n"
    found = output(capsys, "config", "show", "--config", str(run / "config.gin"))
    assert re.search(r"num_steps += 8 ", found) and re.search(r"mesh.fsdp += 2 ", found)


def test_the_run_remembers_its_command(run):
    environment = json.loads((run / "environment.json").read_text())
    # As you would paste it into a shell.
    assert "meshloom train --config " in environment["command"]
    assert "'data=@data.ArrayRecords()'" in environment["command"]


def test_generate(run, capsys):
    argv = ("generate", str(run), "--prompt", "abc", "--tokens", "12")
    likeliest = output(capsys, *argv, "--temperature", "0")
    assert likeliest.startswith("abc") and len(likeliest) > len("abc\n")
    assert output(capsys, *argv, "--temperature", "0") == likeliest
    first = output(capsys, *argv, "--seed", "1", "--top-k", "20")
    assert output(capsys, *argv, "--seed", "1", "--top-k", "20") == first
    assert output(capsys, *argv, "--seed", "2", "--top-k", "20") != first
    older = output(capsys, *argv, "--temperature", "0", "--step", "4")
    assert older.startswith("abc")


@pytest.mark.parametrize(
    "flags, message",
    [
        (["--prompt", ""], "the prompt is empty; give at least one character"),
        (
            ["--prompt", "abc", "--tokens", "30"],
            "prompt tokens (3) plus new tokens (30) are 33, but the model's max_length "
            "is 32. Generate at most 29 tokens.",
        ),
        (
            ["--prompt", "abc" * 11, "--tokens", "1"],
            "prompt tokens (33) plus new tokens (1) are 34, but the model's max_length "
            "is 32. Shorten the prompt.",
        ),
        (["--prompt", "a", "--tokens", "0"], "--tokens must be >= 1, got 0"),
        (
            ["--prompt", "a", "--step", "5", "--tokens", "4"],
            "has no checkpoint of step 5; it has 4, 8. Pass one of these as --step, or "
            "omit it.",
        ),
        (
            ["--prompt", "a", "--tokens", "4", "--temperature", "-1"],
            "temperature must be >= 0 (0 takes the most likely token), got -1.0",
        ),
        (
            ["--prompt", "a", "--tokens", "4", "--top-k", "0"],
            "top_k must be from 1 to vocab_size (257), got 0",
        ),
    ],
)
def test_generate_refuses(run, capsys, flags, message):
    assert message in refused(capsys, "generate", str(run), *flags)


def test_generate_needs_a_run_folder(tmp_path, capsys):
    for folder in (tmp_path, tmp_path / "none"):
        assert refused(capsys, "generate", str(folder), "--prompt", "a") == (
            f"{folder} does not contain a trained model: expected config.gin and a "
            "checkpoint. Give the folder of a run that has saved one."
        )


def test_test(run, capsys, tmp_path):
    argv = ("test", str(run), "--split", "eval", "--mesh", "data=1")
    shown = output(capsys, *argv, "--step", "best").splitlines()
    document = json.loads((run / "test" / "eval-8.json").read_text())
    count = document["examples"]
    assert shown[0] == f"{run}, step 8: held-out split, {count} examples"
    metrics_shown = {line.split()[0] for line in shown[1:3]}
    assert metrics_shown == {"loss", "bits"}
    (last,) = [row for row in metrics.read(run / "eval.jsonl") if row["step"] == 8]
    for name in ("loss", "bits_per_byte"):
        low, high = document["metrics"][name]["interval"]
        assert low < document["metrics"][name]["value"] < high
        assert document["metrics"][name]["value"] == pytest.approx(last[name], rel=0.2)
    assert "95% confidence intervals: bootstrap, 2,000 draws of" in shown[3]
    assert re.search(r"None of its \d+ documents are among the \d+ of the", shown[4])
    page = run / "test" / "eval-8.html"
    assert shown[5:] == [str(page.with_suffix(".json")), str(page)]
    assert "Bits per byte" in page.read_text()
    mine = tmp_path / "mine.json"
    older = output(capsys, *argv, "--step", "4", "--output", str(mine))
    assert json.loads(mine.read_text())["step"] == 4
    assert older.splitlines()[-1] == str(tmp_path / "mine.html")


@pytest.mark.parametrize(
    "flags, message",
    [
        ([], "test_holdout=0.0 of 40 documents selects none. Set test_path to"),
        (
            ["--set", "model.num_layers=3"],
            "--set model.num_layers: only the data may differ from the run's config, "
            "because the checkpoint belongs to its model. Set data.NAME=VALUE.",
        ),
        (
            ["--output", "none/there.json"],
            "--output none/there.json: folder none does not exist; create it first",
        ),
        (["--output", "scores"], "--output scores: expected a name that ends with"),
        (["--step", "last"], "--step 'last': expected newest, best or the number of a"),
        (
            ["--split", "eval", "--step", "5"],
            "has no checkpoint of step 5; it has 4, 8.",
        ),
    ],
)
def test_test_refuses(run, capsys, flags, message):
    assert message in refused(capsys, "test", str(run), *flags)


def test_predict(run, capsys, tmp_path):
    (tmp_path / "a.txt").write_text("abc 1 abcabc " * 4)
    path = tmp_path / "scores.jsonl"
    argv = ("predict", str(run), "--input", str(tmp_path / "a.txt"))
    shown = output(capsys, *argv, "--output", str(path))
    assert shown == f"4 predictions of {run}, step 8\n{path}\n"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [row["start"] for row in rows] == [0, 16, 32, 48]
    assert sum(row["tokens"] for row in rows) == 53
    assert all(row["file"] == "a.txt" and 0 < row["loss"] < 6 for row in rows)
    argv = ("predict", str(run), "--split", "eval", "--step", "best")
    shown = output(capsys, *argv, "--output", str(tmp_path / "eval.npz"))
    assert shown.endswith("eval.npz\n")


@pytest.mark.parametrize(
    "flags, message",
    [
        (["--output", "scores"], "--output scores: expected a name that ends with .j"),
        (["--output", "none/a.npz"], "folder none does not exist; create it first"),
        (
            ["--output", "a.npz", "--batch-size", "0"],
            "--batch-size must be >= 1, got 0",
        ),
        (["--output", "a.npz", "--set", "seed=1"], "--set seed: only the data may"),
    ],
)
def test_predict_refuses(run, capsys, flags, message):
    argv = ("predict", str(run), "--split", "eval")
    assert message in refused(capsys, *argv, *flags)


def test_report(run, tmp_path, capsys):
    path = tmp_path / "mine.html"
    shown = output(capsys, "report", str(run), "--output", str(path))
    assert shown == f"{path}\n"
    assert "<svg" in path.read_text()
    assert output(capsys, "report", str(run)) == f"{run / 'report.html'}\n"
    assert "does not exist" in refused(capsys, "report", str(tmp_path / "none"))
    assert "no metrics.jsonl" in refused(capsys, "report", str(tmp_path))


def test_config_diff(capsys, run):
    shown = output(capsys, "config", "diff", "default", "gpt2_124m")
    assert re.search(r"model.num_layers +4 -> 12\n", shown)
    assert output(capsys, "config", "diff", "default", "default") == "No difference.\n"
    with_run = output(capsys, "config", "diff", TINY, str(run))
    assert re.search(r"data +'sources.Synthetic' -> 'sources.ArrayRecords'", with_run)
    assert "did you mean 'default'?" in refused(
        capsys, "config", "diff", "default", "defalt"
    )


@pytest.mark.parametrize(
    ("full", "now", "given", "expected"),
    [
        (1, 1, None, None),
        (2, 2, 4, 4),
        (1, 2, None, None),  # it grew
        (2, 1, None, 2),
        (4, 3, None, 2),
        (4, 3, 2, 4),  # 8/3, and the next that divides 16
        (4, 1, 4, 16),
        (8, 1, 16, 16),
    ],
)
def test_fewer_processes_use_more_microbatches(monkeypatch, full, now, given, expected):
    monkeypatch.setenv("MESHLOOM_FULL_PROCESSES", str(full))
    sets = [f"num_microbatches={given}"]
    loaded = config_files.load([TINY], sets, root=train_lib.Config)
    found = train.with_fewer_processes(loaded, now)
    assert found.config.num_microbatches == expected
    if expected != given:
        origin = found.origins["num_microbatches"]
        assert origin == f"{now} of {full} processes"


def num_collections() -> int:
    return sum(generation["collections"] for generation in gc.get_stats())


def test_imports_are_not_interrupted_by_garbage_collections():
    before = num_collections()
    with pytest.raises(ImportError), devices.without_collection():
        kept = [[] for _ in range(2 * gc.get_threshold()[0])]
        assert num_collections() == before
        raise ImportError
    kept += [[] for _ in range(2 * gc.get_threshold()[0])]
    assert gc.isenabled() and num_collections() > before
