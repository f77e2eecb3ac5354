"""Tests of the run folder: its lock, its config, and what is never saved."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading

import pytest
from tiny_runs import COMMAND, NUM_STEPS, TINY, digest, refused, sets_of, train

from meshloom.trainer.checkpoint import manager
from meshloom.trainer.cli import main


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Returns a run folder written by `meshloom train`."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    assert main(train(folder)) == 0
    return folder


def test_unwritable_folder(tmp_path, capfd):
    """Uses a file instead of a folder, because permissions do not apply to root."""
    file = tmp_path / "notes"
    file.write_text("mine")
    for folder in (file, file / "run"):
        line = refused(capfd, train(folder))
        assert line == (
            f"run folder {folder} cannot be written: it, or a parent, is a file. "
            "Choose another --workdir, or make this one a writable folder."
        )
    assert file.read_text() == "mine"


@pytest.mark.parametrize("name", ["metrics.jsonl", "eval.jsonl", "ledger.jsonl"])
def test_a_file_that_cannot_be_written_is_found_before_anything_slow(
    name, tmp_path, capfd
):
    """Uses a dangling link, because permissions do not apply to root."""
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / name).symlink_to(tmp_path / "nowhere" / name)
    assert main(train(folder)) == 2
    out, err = capfd.readouterr()
    assert err == (
        f"meshloom: {folder / name} cannot be written: No such file or directory. Make "
        "it writable, remove it, or choose another --workdir.\n"
    )
    assert out == ""
    assert {path.name for path in folder.iterdir()} == {name, ".lock"}


# Only this shell sees the mounts, and they end with it.
DISKS = """
disk=$1; shift
mount -t tmpfs -o size=104k none "$disk" || exit 3
"$@"; echo "full: $?" >&2
mount -o remount,ro "$disk" || exit 3
"$@"; echo "read-only: $?" >&2
mount -o remount,rw,size=10m "$disk" || exit 3
"$@"; echo "enough room: $?" >&2
ls "$disk/run/checkpoints" >&2
"""


def test_full_disk_and_read_only_disk(tmp_path):
    """On the full disk the files fit, but the first checkpoint does not."""
    script = [str(tmp_path), COMMAND, *train(tmp_path / "run")]
    # Root needs no user namespace, and some machines have none.
    unshare = ["unshare", "-m"] if os.geteuid() == 0 else ["unshare", "-rm"]
    process = subprocess.Popen(
        [*unshare, "sh", "-c", DISKS, "sh", *script],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        _, stderr = process.communicate(timeout=200)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 0, stderr
    full, rest = stderr.split("full: 2\n")
    assert full == (
        f"meshloom: the checkpoint of step {NUM_STEPS} was not written to "
        f"{tmp_path / 'run' / 'checkpoints'}: No space left on device. There is no "
        "complete checkpoint there. Free some space, then run the same command "
        "again to continue.\n"
    )
    assert rest.startswith(
        f"meshloom: run folder {tmp_path / 'run'} cannot be written: Read-only file "
        "system. Choose another --workdir, or make this one a writable "
        "folder.\nread-only: 2\n"
    )
    assert rest.endswith(f"enough room: 0\n{NUM_STEPS}\n")


HOLDER = """
import pathlib, sys, time
from meshloom.trainer.record.run_folder import RunFolder
with RunFolder(pathlib.Path(sys.argv[1])).claim():
    print("held", flush=True)
    time.sleep(120)
"""


@pytest.fixture
def holder(run):
    """Yields another process that has locked the run folder."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(run)],
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    assert process.stdout is not None
    watchdog = threading.Timer(60, os.killpg, (process.pid, signal.SIGKILL))
    watchdog.start()
    try:
        assert process.stdout.readline() == b"held\n"
        yield process
    finally:
        watchdog.cancel()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(timeout=20)
        process.stdout.close()


def test_two_processes_in_one_folder(run, holder, capfd):
    before = digest(run)
    line = refused(capfd, train(run))
    assert line == (
        f"run folder {run} is in use by another process (process {holder.pid} on "
        f"{os.uname().nodename}). Wait for it, stop it, or choose another --workdir."
    )
    assert digest(run) == before
    os.killpg(holder.pid, signal.SIGKILL)
    holder.wait(timeout=20)
    assert main(train(run)) == 0  # the lock is released with its process


def test_folder_of_another_config(run, capfd):
    before = digest(run)
    flags = sets_of("seed=3", "schedule.peak=0.5")
    assert main(train(run, *flags, "--mesh", "fsdp=8")) == 2
    line, *changes = capfd.readouterr().err.splitlines()
    assert line == (
        f"meshloom: run folder {run} was started with a different config (2 values "
        "differ). Choose another --workdir, or pass --insist to continue it with the "
        "new values:"
    )
    # The mesh may differ, so it is not listed.
    assert changes == ["schedule.peak  0.01 -> 0.5", "seed           0 -> 3"]
    assert digest(run) == before
    assert main(train(run, *flags, "--dry-run")) == 2
    assert digest(run) == before


def test_a_folder_of_a_version_that_had_fewer_fields(run, capfd):
    """A field that the folder does not have counts as its default."""
    file = run / "config.json"
    kept = file.read_text()
    record = json.loads(kept)
    for name in ("skip_grad_norm", "optimizer.b1"):
        del record["values"][name]
    file.write_text(json.dumps(record))
    try:
        assert main(train(run, *sets_of("optimizer.b1=0.5"))) == 2
        assert "optimizer.b1  (absent) -> 0.5" in capfd.readouterr().err
        assert main(train(run)) == 0
        assert "other settings" not in capfd.readouterr().out
    finally:
        file.write_text(kept)


def test_insisting_and_what_is_free_to_change(run, capfd):
    """Both are reported; a finished run shows them without training."""
    assert main(train(run, "--mesh", "fsdp=8", *sets_of('plan="data+fsdp"'))) == 0
    output = capfd.readouterr().out
    assert "Continuing with different settings:" in output
    assert re.search(r"mesh.data +-1 -> 1\n", output)
    assert re.search(r"mesh.fsdp +1 -> 8\n", output)
    assert re.search(r"plan +'auto' -> 'data\+fsdp'", output)
    assert main(train(run, "--insist", *sets_of("schedule.peak=0.5"))) == 0
    assert re.search(r"schedule.peak +0.01 -> 0.5", capfd.readouterr().out)
    # The folder now belongs to the new config.
    line = next(iter(capfd.readouterr().err.splitlines()), "")
    assert line == ""
    assert main(train(run)) == 2
    assert "schedule.peak  0.5 -> 0.01" in capfd.readouterr().err
    assert main(train(run, "--insist")) == 0


def test_a_loss_that_is_no_number_is_never_saved(tmp_path, capfd):
    flags = ["schedule.peak=1e30", "schedule.warmup_share=0.0", "eval_batches=0"]
    flags += ["save_every=1", "keep_checkpoints=None", "rewind_after=4"]
    argv = ["train", "--config", TINY, "--workdir", str(tmp_path), *sets_of(*flags)]
    line = refused(capfd, argv)
    match = re.fullmatch(
        r"4 steps in a row failed, the last at step (\d+) with loss (\S+), gradient "
        r"norm (\S+); (\d) rewinds? did not help\. Lower the learning rate "
        r"\(schedule\.peak\), clip gradients \(max_grad_norm\), or inspect the data of "
        r"these steps \(ledger\.jsonl\)\.",
        line,
    )
    assert match and {match[2], match[3]} & {"nan", "inf"}
    for step in manager.committed_steps(tmp_path / "checkpoints"):
        assert step < int(match[1]) - 3


def test_a_damaged_record_of_the_config(run, capfd):
    file = run / "config.json"
    kept = file.read_text()
    file.write_text(kept[: len(kept) // 2])
    try:
        before = digest(run)
        line = refused(capfd, train(run))
        assert line.startswith(f"{file} is not a recorded config; expected JSON")
        assert digest(run) == before
    finally:
        file.write_text(kept)
