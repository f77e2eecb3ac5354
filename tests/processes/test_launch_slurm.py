"""`meshloom launch slurm`: its script, and a job on a real Slurm of two nodes."""

import json
import os
import subprocess
import sys
import time

import pytest
from launch_job import SLOWLY, check_same, train
from launched import ending, step_of, wait_until
from slurm_cluster import slurm_cluster
from tiny_runs import COMMAND, refused
from two_hosts import two_hosts

from meshloom.trainer.cli import main


@pytest.fixture(autouse=True)
def outside(monkeypatch):
    for name in list(os.environ):
        if name.startswith("SLURM_"):
            monkeypatch.delenv(name)


def script(capfd, *argv: str) -> list[str]:
    assert main(["launch", "slurm", "--dry-run", *argv]) == 0
    return capfd.readouterr().out.splitlines()


def test_the_script(capfd, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "sentinel")
    lines = script(
        capfd,
        *("--nodes", "4", "--gpus-per-node", "8", "--tasks-per-node", "2"),
        *("--time", "2-00:00:00", "--partition", "gpu", "--account", "me"),
        *("--cpus-per-task", "12", "--grace-seconds", "120"),
        *("--env", "NCCL_DEBUG=INFO", "--env", "HF_TOKEN", "--env", "TITLE=a b"),
        *("--sbatch-option=--reservation=r", "--srun-option=--network=ib"),
        *("--container-image", "img:1", "--container-mounts", "/a:/b"),
        *("--", "train", "--config", "gpt2_124m", "--workdir", "/shared/run"),
    )
    assert lines[0] == "#!/bin/bash"
    given = {line.removeprefix("#SBATCH ") for line in lines if "#SBATCH" in line}
    assert given == {
        *("--nodes=4", "--gpus-per-node=8", "--ntasks-per-node=2"),
        *("--time=2-00:00:00", "--partition=gpu", "--account=me"),
        *("--cpus-per-task=12", "--job-name=meshloom", "--requeue"),
        *("--signal=B:TERM@150", "--open-mode=append", "--export=ALL,HF_TOKEN"),
        *("--output=/shared/run/logs/slurm-%j.out", "--reservation=r"),
    }
    assert "export NCCL_DEBUG=INFO" in lines and "export TITLE='a b'" in lines
    assert "sentinel" not in "".join(lines)
    run = lines[-1]
    assert run.startswith(f"exec {sys.executable} -P -m meshloom.trainer.cli launch")
    for flag in ("--tasks-per-node=2", "--gpus-per-node=8", "--cpus-per-task=12"):
        assert flag in run
    assert "--container-image=img:1 --container-mounts=/a:/b" in run
    assert "--srun-option=--network=ib --logs=/shared/run/logs -- train" in run
    assert "--partition" not in run and "--no-requeue" not in run


def test_no_requeue(capfd):
    lines = script(capfd, "--nodes", "1", "--no-requeue", "--", "train")
    assert "#SBATCH --no-requeue" in lines and "--no-requeue" in lines[-1]


def test_bash_takes_the_script(capfd, tmp_path):
    path = tmp_path / "script"
    path.write_text("\n".join(script(capfd, "--nodes", "1", "--", "train")))
    subprocess.run(["bash", "-n", str(path)], check=True, timeout=30)


@pytest.mark.parametrize(
    "flags, words",
    [
        (["--nodes", "two"], "--nodes must be a whole number, got two"),
        ([], "--nodes is required: the number of nodes"),
        (
            ["--nodes", "2", "--tasks-per-node", "0"],
            "--tasks-per-node must be at least",
        ),
        (
            ["--nodes", "2", "--tasks-per-node", "3", "--gpus-per-node", "8"],
            "--gpus-per-node 8 cannot be divided among --tasks-per-node 3 processes",
        ),
        (
            ["--nodes", "2", "--env", "WANDB_API_KEY=x"],
            "--env WANDB_API_KEY=...: this looks like a secret, and the script would "
            "show it. Set it in your environment and pass --env WANDB_API_KEY.",
        ),
        (["--nodes", "2", "--env", "NOT_THERE"], "--env NOT_THERE: this variable is"),
    ],
)
def test_bad_input(flags, words, capfd):
    argv = ["launch", "slurm", "--dry-run", *flags, "--", "train"]
    assert refused(capfd, argv).startswith(words)


def test_flags_of_a_job_are_refused_inside_of_one(capfd, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    argv = ["launch", "slurm", "--partition", "gpu", "--", "train"]
    assert refused(capfd, argv) == (
        "--partition is for a new job, but this is inside job 7 and uses its nodes. "
        "Leave the flag out, or exit the job."
    )


def test_without_slurm(capfd, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert refused(capfd, ["launch", "slurm", "--nodes", "1", "--", "train"]) == (
        "sbatch: command not found. `meshloom launch slurm` needs Slurm's commands; on "
        "one machine use `meshloom launch local`."
    )


@pytest.mark.processes
@pytest.mark.timeout(900)
def test_two_nodes_that_are_signalled_and_requeued(tmp_path, uninterrupted):
    run, output = tmp_path / "run", tmp_path / "output"

    def starts() -> list[dict]:
        rows = (run / "ledger.jsonl").read_text().splitlines()
        return [row for row in map(json.loads, rows) if row["event"] == "start"]

    def past(number: int, attempts: int):
        return lambda: step_of(run) >= number and len(starts()) == attempts

    with two_hosts(tmp_path) as (a, b), slurm_cluster(a, b) as env:
        everything = {**os.environ, **env}

        def slurm(*argv: str) -> str:
            found = a.run(argv, 60, env=everything)
            assert found.returncode == 0, found.stderr
            return found.stdout

        def come_back() -> None:
            pending = ("squeue", "-h", "-o", "%T")
            wait_until(lambda: "PENDING" in slurm(*pending), job, output, 60)
            # Slurm lets a job that comes back wait for two minutes. Less will do, but
            # nodes must have forgotten it, and they count that in whole seconds.
            nodes = ("sinfo", "-h", "-N", "-o", "%t")
            wait_until(lambda: slurm(*nodes).split() == ["idle"] * 2, job, output, 60)
            time.sleep(2)
            slurm("scontrol", "update", "JobId=1", "StartTime=now")

        job = a.start(
            [
                *(COMMAND, "launch", "slurm", "--nodes", "2", "--cpu-devices", "1"),
                *("--grace-seconds", "25", "--", *train(run)),
            ],
            output,
            {**env, **SLOWLY},
        )
        with ending(job):
            wait_until(past(5, 1), job, output, 180)
            # To the processes: they save, and start again in the same allocation.
            slurm("scancel", "--signal=TERM", "1")
            wait_until(past(11, 2), job, output, 180)
            # To the supervisor, as before the limit of time: it requeues the job.
            slurm("scancel", "--signal=TERM", "--batch", "1")
            come_back()
            wait_until(past(17, 3), job, output, 180)
            slurm("scontrol", "requeue", "1")
            come_back()
            assert job.wait(300) == 0, output.read_text()
        assert "Restarts=2" in slurm("scontrol", "show", "job", "1")
        text = output.read_text()
        assert f"job 1 is RUNNING on {a.name[:-1]}[0-1]" in text
        assert "requeueing job 1" in text
    assert len(starts()) == 4 and all(row["devices"] == 2 for row in starts())
    # Every stop was a save, and nothing was computed twice.
    rows = [json.loads(row) for row in (run / "ledger.jsonl").read_text().splitlines()]
    assert len([row for row in rows if row["event"] == "preempted"]) == 3
    check_same(run, uninterrupted)
