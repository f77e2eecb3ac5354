"""The first SIGTERM makes a run save and stop, the second ends it at once."""

import contextlib
import os
import signal
import subprocess
import sys
import time

import numpy as np
from tiny_runs import COMMAND, TINY, main, sets_of

from meshloom.launch.exit_codes import PREEMPTED
from meshloom.trainer.checkpoint import manager
from meshloom.trainer.record import ledger, metrics

STEPS = 200
SETTINGS = sets_of("save_every=0", "eval_batches=0", "log_every=1")


def argv(folder) -> list[str]:
    flags = ["--workdir", str(folder), "--steps", str(STEPS), "--cpu-devices", "8"]
    return ["train", "--config", TINY, *flags, *SETTINGS]


@contextlib.contextmanager
def started(folder, *program):
    """Yields a run in a process of its own, past its first steps."""
    process = subprocess.Popen(
        [*(program or (COMMAND,)), *argv(folder)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        deadline = time.monotonic() + 120
        while len(steps(folder)) < 3:
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.02)
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        process.stdout.close()


def steps(folder) -> list[dict]:
    rows = ledger.Ledger(folder, is_writer=False).read()
    return [row for row in rows if row["event"] == "step"]


def test_the_first_saves_and_stops_and_the_run_continues_exactly(tmp_path, capfd):
    straight, preempted = tmp_path / "straight", tmp_path / "preempted"
    with started(preempted) as process:
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=120)
    assert process.returncode == PREEMPTED, output
    (step,) = manager.committed_steps(preempted / "checkpoints")
    assert 3 <= step < STEPS
    assert f"meshloom: asked to stop: saved at step {step}. Run the same" in output
    assert [row["step"] for row in steps(preempted)] == list(range(1, step + 1))
    assert main(argv(preempted)) == main(argv(straight)) == 0
    assert f"Resuming from step {step}" in capfd.readouterr().out
    losses = [
        [row["loss"] for row in metrics.read(folder / "metrics.jsonl")]
        for folder in (preempted, straight)
    ]
    np.testing.assert_array_equal(*losses)


SLOW_SAVE = """
import sys, time
from meshloom.trainer.run import hooks
from meshloom.trainer.cli import main

def save(self, step, state):
    print("saving", flush=True)
    time.sleep(100)

hooks.Save.now = save
sys.exit(main(sys.argv[1:]))
"""


def test_the_second_ends_a_run_that_is_stuck_while_it_saves(tmp_path):
    with started(tmp_path, sys.executable, "-c", SLOW_SAVE) as process:
        process.send_signal(signal.SIGTERM)
        assert any("saving" in line for line in process.stdout)
        time.sleep(1.2)  # sooner, it would count as the first one
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=30)
    assert process.returncode == 128 + signal.SIGTERM
    assert "second signal (SIGTERM): exiting now" in output


def test_ctrl_c_saves_and_stops_like_sigterm(tmp_path):
    with started(tmp_path) as process:
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=120)
    assert process.returncode == PREEMPTED, output
    (step,) = manager.committed_steps(tmp_path / "checkpoints")
    assert "SIGINT: saving after this step, then stopping; Ctrl-C again" in output
    assert f"meshloom: asked to stop: saved at step {step}. Run the same" in output


def test_the_second_ctrl_c_ends_at_once(tmp_path):
    with started(tmp_path, sys.executable, "-c", SLOW_SAVE) as process:
        process.send_signal(signal.SIGINT)
        assert any("saving" in line for line in process.stdout)
        time.sleep(1.2)
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=30)
    assert process.returncode == 128 + signal.SIGINT
