"""Jobs over two hosts with addresses of their own, one of which is cut off."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tiny_runs import TINY, command
from two_hosts import ssh_daemon, two_hosts

from meshloom.trainer import metrics
from meshloom.trainer.cli import main

MESHLOOM = str(Path(sys.executable).with_name("meshloom"))
NUM_STEPS = 600
TRAIN = (
    *("train", "--config", TINY, "--steps", str(NUM_STEPS)),
    *("--set", "eval_batches=0", "--set", "save_every=100", "--set", "log_every=10"),
)


def wait_until(done, process: subprocess.Popen, output: Path, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not done():
        text = output.read_text(errors="replace")
        assert process.poll() is None and time.monotonic() < deadline, text
        time.sleep(0.2)


@pytest.mark.processes
@pytest.mark.timeout(600)
def test_a_host_that_is_cut_off_and_comes_back(tmp_path):
    run, output = tmp_path / "run", tmp_path / "output"

    def step() -> int:
        found = run / "logs" / "progress-0.json"
        return json.loads(found.read_text())["step"] or 0 if found.exists() else 0

    def said(words: str):
        return lambda: words in output.read_text(errors="replace")

    with two_hosts(tmp_path) as (a, b):
        ssh = ssh_daemon(b, tmp_path / "ssh")
        job = a.start(
            [
                *(MESHLOOM, "launch", "ssh", "--hosts", f"{a.name},{b.name}"),
                *("--ssh", " ".join(ssh), "--cpu-devices", "1"),
                *("--silence-seconds", "10", "--max-restarts", "20", "--"),
                *(*TRAIN, "--workdir", str(run)),
            ],
            output,
        )
        try:
            wait_until(lambda: step() > 120, job, output, 120)
            before = {pid for pid in b.pids() if _is_training(pid)}
            assert before
            b.cut_off()
            began = time.monotonic()
            gone = f"worker 1 on {b.name} ended with status 69 (a host or process"
            wait_until(said(gone), job, output, 60)
            # ssh asks every 5 s and gives up after three answers that did not come.
            assert time.monotonic() - began < 30
            # The host that was cut off does not go on by itself, and is tried again.
            wait_until(lambda: not before & set(b.pids()), job, output, 30)
            wait_until(lambda: output.read_text().count(gone) > 1, job, output, 60)
            b.join()
            assert job.wait(240) == 0, output.read_text()
        finally:
            if job.poll() is None:
                os.killpg(job.pid, signal.SIGKILL)
                job.wait()
    # Bit-equal with a job that nothing happened to, on the same mesh.
    whole = tmp_path / "whole"
    found = command(
        *("launch", "local", "--processes", "2", "--cpu-devices", "1", "--"),
        *(*TRAIN, "--workdir", str(whole)),
        timeout=270,
    )
    assert found.returncode == 0, found.stdout + found.stderr
    assert losses(run) == losses(whole) and len(losses(run)) == NUM_STEPS
    assert main(["ledger", "audit", str(run)]) == 0
    last = str(run / "checkpoints" / str(NUM_STEPS))
    assert main(["ckpt", "diff", last, last.replace("/run/", "/whole/")]) == 0


def losses(run: Path) -> list[float]:
    rows = metrics.read(run / "metrics.jsonl")
    return [row["loss"] for row in rows if "loss" in row]


def _is_training(pid: int) -> bool:
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes()
    except FileNotFoundError:
        return False
    return b"meshloom.trainer.cli" in words
