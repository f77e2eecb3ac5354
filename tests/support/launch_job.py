"""The job that tests of launchers start, each in its own way and with interruptions.

Two processes with one device each, whose parameters are sharded across them. However it
was launched and interrupted, it must compute what it computes without interruptions.
"""

from pathlib import Path

import numpy as np
from bigram import CONFIG
from launched import losses
from paths import SUPPORT

from meshloom.trainer.cli import main

NUM_STEPS, SAVE_EVERY = 40, 5  # of bigram.gin
# For its modules, wherever the processes are.
ENV = {"PYTHONPATH": str(SUPPORT)}
# With this, a step takes a quarter of a second: there is time to interrupt it.
SLOWLY = ENV | {"MORTAL_SECONDS": str(1 / 16)}


def train(run: Path, *flags: str) -> list[str]:
    """Returns the arguments of `meshloom` that train in this folder."""
    return ["train", "--config", CONFIG, "--workdir", str(run), *flags]


def check_same(run: Path, whole: Path) -> None:
    """Checks that a run ended as the one without interruptions did, bit for bit."""
    np.testing.assert_array_equal(losses(run), losses(whole))
    assert len(losses(run)) == NUM_STEPS
    assert main(["ledger", "audit", str(run)]) == 0
    last = f"checkpoints/{NUM_STEPS}"
    assert main(["ckpt", "diff", str(run / last), str(whole / last)]) == 0
