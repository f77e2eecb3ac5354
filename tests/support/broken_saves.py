"""The command line, with a folder that breaks while the run of 12 steps saves step 8.

`python broken_saves.py FAULT WHEN ARGV...`: FAULT is read-only, removed, moved or
run-removed; WHEN is before the save, or during what it does in the background.
"""

import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

from meshloom.trainer.checkpoint import manager
from meshloom.trainer.cli import main
from meshloom.trainer.run import hooks

STEP = 8


def strike(fault: str, folder: Path) -> None:
    if fault == "read-only":
        # A mount of its own, see test_broken_saves.
        command = ["mount", "-o", "remount,ro", str(folder)]
        while subprocess.run(command, stderr=subprocess.DEVNULL).returncode:
            time.sleep(0.05)  # busy: a file is still open for writing
    elif fault == "removed":
        shutil.rmtree(folder)
    elif fault == "moved":
        folder.rename(folder.with_name("moved"))
    else:
        shutil.rmtree(folder.parent)


def run(fault: str, when: str, argv: list[str]) -> int:
    written, broken = threading.Event(), threading.Event()
    save = hooks.Save.__call__

    def hook(self, step, state):
        if step != STEP:
            save(self, step, state)
            return
        self.checkpoints.wait()
        if when == "before":
            strike(fault, self.checkpoints.folder)
            save(self, step, state)
        else:
            nonlocal waits
            waits = True
            save(self, step, state)
            written.wait()
            try:
                strike(fault, self.checkpoints.folder)
            finally:
                broken.set()

    waits = False

    def before_commit():
        """All is written, and the folder of the step has not its name yet."""
        if waits:
            written.set()
            broken.wait()

    manager.Checkpoints._before_commit = lambda self: before_commit()
    hooks.Save.__call__ = hook
    return main(argv)


if __name__ == "__main__":
    sys.exit(run(sys.argv[1], sys.argv[2], sys.argv[3:]))
