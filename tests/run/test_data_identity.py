"""A run continues with the data it was started with, or reports that it does not."""

import dataclasses
import io
import json
import os
import sys
import time
from pathlib import Path

import jobs
import npz_rows
import numpy as np
import pytest
from job_runs import write_config
from paths import SUPPORT
from rich.console import Console
from tiny_runs import main

from meshloom.sharding import MeshSpec
from meshloom.trainer import data
from meshloom.trainer.checkpoint import manifest
from meshloom.trainer.checkpoint.manager import committed_steps
from meshloom.trainer.job.group import Group
from meshloom.trainer.record import file_digests, ledger, ledger_audit
from meshloom.trainer.run import data_identity, train

FSDP = MeshSpec(data=2, fsdp=4)


def run(config, folder, **settings) -> str:
    console = Console(file=io.StringIO(), width=300)
    train.train(config, workdir=folder, console=console, **settings)
    return console.file.getvalue()  # type: ignore


def age(*paths: Path) -> None:
    """Makes files old enough to be recognized by their time."""
    then = time.time() - 3600
    for path in paths:
        os.utime(path, (then, then))


def text_config(folder: Path, **settings):
    source = data.Text(path=str(folder), length=16, holdout=0.25)
    tiny = npz_rows.config("", data=source, mesh=FSDP, **settings)
    return dataclasses.replace(tiny, model=npz_rows.Bigrams())


@pytest.fixture
def corpus(tmp_path) -> Path:
    folder = tmp_path / "corpus"
    folder.mkdir()
    for number in range(12):
        (folder / f"{number}.txt").write_text(f"{number} mesh loom " * 40)
    age(*folder.iterdir())
    return folder


def test_labels_reversed_in_an_npz_are_refused(tmp_path):
    path = npz_rows.write(tmp_path / "rows.npz")
    config, folder = npz_rows.config(path, mesh=FSDP), tmp_path / "run"
    run(config, folder)
    labels = np.load(path)["train_label"]
    npz_rows.write(tmp_path / "rows.npz", train_label=labels[::-1])
    longer = dataclasses.replace(config, num_steps=12)
    before = (folder / "data.json").read_text()
    with pytest.raises(ValueError) as caught:
        run(longer, folder)
    message = str(caught.value)
    assert f"the data is not what run folder {folder} was trained on" in message
    assert "pass --insist" in message
    assert "split 'train': 96 examples, as before; digest of the contents" in message
    assert "split 'eval'" not in message
    assert (folder / "data.json").read_text() == before


def test_a_file_added_to_a_corpus_is_refused_and_insisting_is_recorded(
    corpus, tmp_path
):
    config, folder = text_config(corpus), tmp_path / "run"
    run(config, folder)
    saved = manifest.read(folder / "checkpoints", 8)["data"]["splits"]
    kept = json.loads((folder / "data.json").read_text())["splits"]
    assert {k: v["digest"] for k, v in kept.items()} == {
        k: v["digest"] for k, v in saved.items()
    }
    assert saved.keys() == {"train", "eval"}

    (corpus / "weave.txt").write_text("weave " * 400)
    (corpus / "3.txt").write_text("3 MESH LOOM " * 40)  # as long as before
    longer = dataclasses.replace(config, num_steps=12)
    pattern = (
        r"split 'train': \d+ -> \d+ examples; added: weave.txt; changed: 3.txt; digest"
    )
    with pytest.raises(ValueError, match=pattern):
        run(longer, folder)

    output = run(longer, folder, insist=True)
    assert "Continuing with different data:\nsplit 'train'" in output
    (event,) = (
        row
        for row in ledger.Ledger(folder, is_writer=False).read()
        if row["event"] == "data_changed"
    )
    assert event["files"] == {
        "added": ["weave.txt"],
        "removed": [],
        "changed": ["3.txt"],
    }
    found = ledger_audit.audit(folder)
    assert found.faults == []
    assert [part[:2] for part in found.parts] == [(1, 8), (9, 12)]
    assert "the data was changed on purpose" in str(found)
    # From now on this is the data of the run.
    assert "Continuing with different data" not in run(longer, folder)


def test_without_the_record_the_newest_checkpoint_is_used(corpus, tmp_path):
    config, folder = text_config(corpus), tmp_path / "run"
    run(config, folder)
    (folder / "data.json").unlink()
    (corpus / "weave.txt").write_text("weave " * 400)
    with pytest.raises(ValueError, match=r"split 'train': \d+ -> \d+ examples; digest"):
        run(config, folder)


def test_without_the_record_the_newest_intact_checkpoint_is_used(corpus, tmp_path):
    """Or else a line says that nothing was compared."""
    config, folder = text_config(corpus), tmp_path / "run"
    run(config, folder)
    (folder / "data.json").unlink()
    (corpus / "weave.txt").write_text("weave " * 400)
    steps = committed_steps(folder / "checkpoints")
    *older, newest = (folder / "checkpoints" / str(x) / "manifest" for x in steps)
    (newest / "metadata").write_text("{")
    with pytest.raises(ValueError, match=r"split 'train': \d+ -> \d+ examples; digest"):
        established(corpus, folder)
    for path in older:
        (path / "metadata").write_text("{")
    log = []
    assert established(corpus, folder, log=log.append).changes == ()
    assert "was not checked: the run folder has no data.json, and no" in log[-1]


def test_a_dry_run_refuses_changed_data_too(tmp_path, capfd):
    config = write_config(tmp_path)
    argv = ["train", "--config", str(config), "--workdir", str(tmp_path / "run")]
    argv += ["--steps", "2", "--set", "data=@data.Text()"]
    text = config.read_text().replace(
        "import recording", "from meshloom.trainer import data"
    )
    config.write_text(text.replace("recording.Text", "data.Text"))
    argv = argv[:-2]
    assert main(argv) == 0
    (tmp_path / "text" / "new.py").write_text("pass\n" * 2000)
    capfd.readouterr()
    assert main([*argv, "--dry-run"]) == 2
    assert "added: new.py" in capfd.readouterr().err


class Counting:
    """Wraps file_digests._stamp and records the files it reads."""

    def __init__(self):
        self.read: list[str] = []
        self._stamp = file_digests._stamp

    def __call__(self, path, progress):
        self.read.append(Path(path).name)
        return self._stamp(path, progress)


@pytest.fixture
def counting(monkeypatch):
    found = Counting()
    monkeypatch.setattr(file_digests, "_stamp", found)
    return found


def established(corpus, folder, **settings):
    source = data.Text(path=str(corpus), length=16, holdout=0)
    datasets = {"train": source.open("train")}
    settings = {"insist": False, "log": print} | settings
    saved = folder / "checkpoints"
    return data_identity.establish(datasets, Group(), [0], folder, saved, **settings)


def test_a_resume_reads_only_files_that_look_changed(corpus, tmp_path, counting):
    folder = tmp_path / "run"
    folder.mkdir()
    first = established(corpus, folder)
    first.write(folder, 0)
    assert len(counting.read) == 12
    counting.read.clear()
    assert established(corpus, folder).splits == first.splits
    assert counting.read == []
    # Touched with the same contents: read again, but not a change.
    os.utime(corpus / "5.txt")
    assert established(corpus, folder).changes == ()
    assert counting.read == ["5.txt"]


def test_a_file_as_new_as_its_digest_is_read_again(corpus, tmp_path, counting):
    """Within one tick of the clock it could change without a new size or time."""
    folder = tmp_path / "run"
    folder.mkdir()
    path = corpus / "5.txt"
    path.write_text("x" * 100)
    established(corpus, folder).write(folder, 0)
    times = path.stat()
    path.write_text("y" * 100)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    with pytest.raises(ValueError, match="changed: 5.txt"):
        established(corpus, folder)


def test_another_name_in_the_same_place_is_the_same_data(corpus, tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    established(corpus, folder).write(folder, 0)
    (corpus / "11.txt").rename(corpus / "11a.txt")
    assert established(corpus, folder).changes == ()


def test_reading_that_takes_long_is_shown(corpus):
    log, now = [], iter(range(0, 1000, 3))
    files = {path.name: str(path) for path in corpus.iterdir()}
    file_digests.read(files, {}, log.append, clock=lambda: next(now))
    assert log[0].startswith("Reading the data once for its digest: ")
    assert " left" in log[0] and len(log) < len(files)


def test_a_large_dataset_without_files_is_covered_in_part_and_logged(monkeypatch):
    monkeypatch.setattr(data_identity, "MAX_EXAMPLES", 10)
    source = data.Synthetic(vocab_size=8, length=4, num_examples=100)
    numbers = source.open("train")
    numbers.describe = lambda: {}
    log = []
    splits = data_identity._splits({"train": numbers}, {}, log.append)
    assert splits["train"].examples == 100
    assert "covers 10 of its 100 examples" in log[0]


def test_a_damaged_record_is_named(tmp_path):
    (tmp_path / "data.json").write_text("{")
    with pytest.raises(ValueError, match=r"data\.json is not a record of a run's data"):
        data_identity._known_stamps(tmp_path)


PROGRAM = """
import sys
from meshloom.trainer import cli
from meshloom.trainer.job.group import Group
from meshloom.trainer.record import file_digests
own = file_digests._stamp
def stamp(path, progress):
    print("reads", path)
    return own(path, progress)
file_digests._stamp = stamp
sys.exit(cli.main())
"""


@pytest.mark.processes
def test_one_process_of_a_host_reads_and_all_refuse(tmp_path):
    """On a mesh that shards parameters across two processes."""
    config = write_config(tmp_path)
    recording = tmp_path / "recording"
    recording.mkdir()
    argv = [sys.executable, "-c", PROGRAM, "train", "--config", str(config)]
    argv += ["--workdir", str(tmp_path / "run"), "--cpu-devices", "2", "--steps", "4"]
    argv += ["--mesh", "fsdp=4", "--set", "eval_batches=0", "--set", "save_every=2"]
    argv += ["--set", "sample_prompt=None", "--set", "schedule.warmup_share=0.0"]
    env = {"PYTHONPATH": str(SUPPORT), "RECORDING_FOLDER": str(recording)}

    first, second = jobs.run_job(2, 2, argv, 240, env=env)
    assert (first.status, second.status) == (0, 0), (first, second)
    assert first.stdout.count("reads ") > 10 and "reads " not in second.stdout
    (tmp_path / "text" / "zz.py").write_text("pass\n" * 2000)
    for process in jobs.run_job(2, 2, argv, 240, env=env):
        assert process.status == 2, process.stdout + process.stderr
        assert "added: zz.py" in process.stderr
