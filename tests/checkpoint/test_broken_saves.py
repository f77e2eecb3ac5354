"""A folder that breaks while a run saves: one line, and older saves stay intact."""

import contextlib
import os
import pathlib
import shutil
import signal
import subprocess
import sys

import pytest
from paths import SUPPORT
from tiny_runs import main, train

SCRIPT = str(SUPPORT / "broken_saves.py")

# Only this shell sees the mount, which ends with it; the run folder is copied out.
DISK = """
run=$1; kept=$2; shift 2
mkdir -p "$run/checkpoints"
if test $1 = read-only; then mount -t tmpfs none "$run/checkpoints" || exit 3; fi
"$PYTHON" "$SCRIPT" "$@"; status=$?
if test -e "$run"; then cp -r "$run" "$kept"; fi
exit $status
"""
GONE = (
    "the folder is gone or has been replaced since the start. The checkpoints saved "
    "there are gone with it. Restore it, or choose another --workdir, then run the "
    "same command again to continue."
)
LOCKED = (
    "Read-only file system. The newest complete checkpoint there is of step 4. Make "
    "the folder writable, then run the same command again to continue."
)


def broken(tmp_path, fault: str, when: str) -> tuple[pathlib.Path, str]:
    """Returns (the run folder as it was left, stderr) of a run whose folder broke."""
    folder, kept = tmp_path / "run", tmp_path / "kept"
    unshare = ["unshare", "-m"] if os.geteuid() == 0 else ["unshare", "-rm"]
    argv = [fault, when, *train(folder), "--steps", "12"]
    process = subprocess.Popen(
        [*unshare, "sh", "-c", DISK, "sh", str(folder), str(kept), *argv],
        env={**os.environ, "PYTHON": sys.executable, "SCRIPT": SCRIPT},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        _, stderr = process.communicate(timeout=100)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 2, stderr
    return kept, stderr


@pytest.mark.parametrize(
    ("fault", "when", "reason"),
    [
        ("read-only", "before", LOCKED),
        ("read-only", "during", LOCKED),
        ("removed", "before", GONE),
        ("moved", "during", GONE),
        ("run-removed", "before", GONE),
    ],
)
def test_a_folder_that_breaks(fault, when, reason, tmp_path, capfd):
    folder, stderr = broken(tmp_path, fault, when)
    (line,) = stderr.splitlines()
    assert line.startswith("meshloom: the checkpoint of step 8 was not written to ")
    assert line.endswith(f"/checkpoints: {reason}")
    if fault == "run-removed":
        return
    if fault == "moved":
        # Orbax may have recreated it in the background.
        shutil.rmtree(folder / "checkpoints", ignore_errors=True)
        (folder / "moved").rename(folder / "checkpoints")
    capfd.readouterr()
    assert main([*train(folder), "--steps", "12"]) == 0
    output = capfd.readouterr().out
    assert ("Resuming from step 4" in output) == (fault != "removed")
