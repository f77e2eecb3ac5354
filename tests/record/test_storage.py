"""Tests of checkpoints in another folder and in a bucket."""

import json

import fake_gcs
import pytest
from tiny_runs import main, refused, sets_of, train

from meshloom.launch.exit_codes import UNREACHABLE
from meshloom.trainer.checkpoint.manager import committed_steps
from meshloom.trainer.record.run_folder import RunFolder

URL = f"gs://{fake_gcs.BUCKET}/runs/first"


@pytest.fixture(scope="module")
def bucket():
    """Yields the objects of a fake bucket behind gs://."""
    with (
        pytest.MonkeyPatch.context() as patch,
        fake_gcs.serving() as (address, objects),
    ):
        for name, value in fake_gcs.environment(address).items():
            patch.setenv(name, value)
        yield objects


def run(folder, steps: int, place: str) -> list[str]:
    flags = sets_of(f'checkpoint_folder="{place}"', "eval_batches=0")
    return [*train(folder), "--steps", str(steps), *flags]


def test_a_folder_elsewhere(tmp_path, capfd):
    folder, place = tmp_path / "run", tmp_path / "elsewhere"
    assert main(run(folder, 8, str(place))) == 0
    assert not (folder / "checkpoints").exists()
    assert committed_steps(place) == [4, 8]
    assert str(RunFolder(folder).checkpoints) == str(place)
    assert main([*run(folder, 12, str(place)), "--insist"]) == 0
    assert "Resuming from step 8" in capfd.readouterr().out
    assert main(["ckpt", "verify", str(folder)]) == 0
    assert "step 12: 33 arrays as saved" in capfd.readouterr().out
    line = refused(capfd, run(tmp_path / "new", 12, str(place)))
    assert line == (
        f"checkpoint_folder {place} holds checkpoints of another run (newest step "
        f"12), and run folder {tmp_path / 'new'} is new. Choose another, or pass "
        "--insist to continue from them."
    )


def test_a_bucket(bucket, tmp_path, capfd):
    """Saves, removes old steps, resumes, handles damage, runs tools and init_from."""
    folder = tmp_path / "run"
    assert main(run(folder, 8, URL)) == 0
    assert f"Checkpoints: {URL}\n" in capfd.readouterr().out
    assert committed_steps(URL) == [4, 8]
    assert not (folder / "checkpoints").exists()
    assert main([*run(folder, 12, URL), "--insist"]) == 0
    assert "Resuming from step 8" in capfd.readouterr().out
    assert committed_steps(URL) == [8, 12]
    assert not [name for name in bucket if name.startswith("runs/first/4/")]
    assert main(["ckpt", "verify", str(folder)]) == 0
    assert "step 12: 33 arrays as saved" in capfd.readouterr().out
    assert main(["ckpt", "ls", URL]) == 0
    rows = [line.split()[:2] for line in capfd.readouterr().out.splitlines()[1:]]
    assert rows == [["8", "committed"], ["12", "committed"]]

    # An unfinished upload does not count.
    mark = "runs/first/12/commit_success.txt"
    kept = bucket.pop(mark)
    assert committed_steps(URL) == [8]
    bucket[mark] = kept

    name = "runs/first/12/manifest/metadata"
    generation, content = bucket[name]
    found = json.loads(content)
    found["arrays"]["step"]["digest"] = "0" * 16
    bucket[name] = (generation + 1000, json.dumps(found).encode())
    assert main([*run(folder, 16, URL), "--insist"]) == 0
    output = capfd.readouterr().out
    assert f"Set aside as {URL}/corrupt-12." in output
    assert "Resuming from step 8" in output
    assert committed_steps(URL) == [12, 16]

    flags = sets_of(f'init_from="{URL}/16"')
    assert main([*train(tmp_path / "tuned"), *flags]) == 0
    assert f"Starting with the weights of {URL}/16" in capfd.readouterr().out


def test_a_bucket_that_fails_for_a_while_loses_no_checkpoint(bucket, tmp_path, capfd):
    folder, url = tmp_path / "run", f"gs://{fake_gcs.BUCKET}/runs/second"
    assert main(run(folder, 8, url)) == 0
    bucket.resets = 3  # tensorstore retries on its own
    assert main([*run(folder, 12, url), "--insist"]) == 0
    assert bucket.resets == 0
    bucket.refusals = 1
    assert main([*run(folder, 16, url), "--insist"]) == UNREACHABLE
    line = capfd.readouterr().err.splitlines()[-1]
    assert f"checkpoint {url}/12 could not be read by process 0" in line
    assert committed_steps(url) == [8, 12]
    assert main([*run(folder, 16, url), "--insist"]) == 0
    out = capfd.readouterr().out
    assert "Resuming from step 12" in out and "Set aside" not in out


@pytest.mark.parametrize(
    ("place", "message"),
    [
        ("runs/a", "checkpoint_folder is 'runs/a'; expected an absolute path"),
        (
            "s3://bucket/a",
            "checkpoint_folder is 's3://bucket/a'; expected a folder or "
            "gs://BUCKET/...: orbax cannot write arrays to a s3:// store. Mount it as "
            "a folder.",
        ),
    ],
)
def test_places_that_cannot_work(place, message, tmp_path, capfd):
    assert message in refused(capfd, run(tmp_path / "run", 4, place))
    assert not (tmp_path / "run").exists()


def test_a_bucket_needs_its_package(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    line = refused(capfd, run(tmp_path / "run", 4, URL))
    assert line == (
        f"checkpoint_folder '{URL}' needs the package gcsfs: pip install "
        "'meshloom[gcs]'"
    )
