"""`meshloom launch local`: its arguments, and real jobs that lose a process."""

import json
import re
from pathlib import Path

import pytest
from launch_job import ENV, NUM_STEPS, check_same, train
from launched import losses
from test_jobs import ends
from tiny_runs import command, refused

from meshloom.launch import flags, supervisor
from meshloom.trainer import cli
from meshloom.trainer.cli import main
from meshloom.trainer.record import metrics

# The command line.


@pytest.fixture
def launched(monkeypatch):
    """What the command would supervise."""
    found = {}

    class Supervisor:
        def __init__(self, target, folder, settings):
            found.update(target=target, folder=folder, settings=settings)

        def run(self):
            return 75

    monkeypatch.setattr(supervisor, "Supervisor", Supervisor)
    return found


def launch(*argv: str) -> int:
    return main(["launch", "local", "--processes", "2", *argv])


def test_arguments_reach_the_supervisor(launched):
    flags = ["--min-processes", "1", "--cpu-devices", "4", "--max-restarts", "7"]
    flags += ["--stall-seconds", "3", "--start-seconds", "4", "--grace-seconds", "5"]
    train = ["train", "--config", "x", "--steps", "3"]
    assert launch(*flags, "--logs", "there", "--", *train) == 75
    settings = launched["settings"]
    assert (settings.processes, settings.min_processes) == (2, 1)
    assert (launched["target"].cpu_devices, settings.max_restarts) == (4, 7)
    assert settings.stall_seconds == 3 and settings.start_seconds == 4
    assert settings.grace_seconds == 5 and launched["folder"] == Path("there")
    assert list(launched["target"].command[-len(train) :]) == train


def test_training_is_forked_from_a_warm_process_unless_it_shall_not(launched):
    argv = ["--", "train", "--steps", "3"]
    launch(*argv)
    assert launched["target"].warm[-4:] == ["meshloom.trainer.warm", *argv[1:]]
    launch("--cold", *argv)
    assert launched["target"].warm is None
    launch("--", "report", "run")
    assert launched["target"].warm is None


def test_what_is_not_given_is_the_default_of_the_settings(launched):
    assert launch("--", "train") == 75
    assert launched["settings"] == supervisor.Settings(processes=2)


@pytest.mark.parametrize(
    "argv, folder",
    [
        ("train", "runs/default/logs"),
        ("train --config gpt2_124m", "runs/gpt2_124m/logs"),
        ("train --config a --config=there/b.gin --steps 3", "runs/b/logs"),
        ("train --config a --workdir here", "here/logs"),
        ("train --workdir=here --config a", "here/logs"),
        ("generate run", "runs/logs"),
    ],
)
def test_logs_are_in_the_run_folder(argv, folder, launched):
    launch("--", *argv.split())
    assert launched["folder"] == Path(folder)


def test_devices_may_be_given_to_the_command(launched):
    launch("--", "train", "--cpu-devices", "3")
    assert launched["target"].cpu_devices == 3
    launch("--cpu-devices", "2", "--", "train")
    assert launched["target"].cpu_devices == 2


def test_bad_arguments(capfd, launched):
    argv = ["launch", "local", "--processes", "2"]
    assert refused(capfd, [*argv, "--", "train", "--workdir", "gs://b/run"]) == (
        "the run folder gs://b/run is not on this machine, but the supervisor's logs "
        "must be. Name a folder for them with --logs."
    )
    assert refused(capfd, [*argv, "--min-processes", "3", "--", "train"]) == (
        "--min-processes is 3, more than --processes 2; it is the size that the "
        "group may shrink to"
    )
    assert refused(capfd, [*argv, "--cpu-devices", "0", "--", "train"]) == (
        "--cpu-devices must be >= 1, got 0"
    )
    with pytest.raises(SystemExit, match="2"):
        main(argv)
    assert "the following arguments are required: COMMAND" in capfd.readouterr().err


def test_bad_input_of_the_command_ends_it(tmp_path):
    found = command(
        *("launch", "local", "--processes", "1", "--logs", str(tmp_path), "--"),
        *("train", "--steps", "many"),
    )
    assert found.returncode == 2
    assert 'saying "meshloom train: argument --steps: invalid int' in found.stderr


def test_the_flags_it_looks_for_are_those_of_train():
    argv = ["train", "--workdir", "a", "--config", "b", "--cpu-devices", "3"]
    found, parsed = flags._flags_of(argv), cli._parser().parse_args(argv)
    assert (Path(found.workdir), found.config) == (parsed.workdir, parsed.config)
    assert found.cpu_devices == parsed.cpu_devices == 3


# Real jobs.


@pytest.mark.processes
def test_the_same_curve_as_one_process(uninterrupted, tmp_path):
    """In this process, and sharded in another way."""
    assert main(train(tmp_path / "run", "--mesh", "data=2,fsdp=4")) == 0
    assert losses(uninterrupted) == pytest.approx(
        losses(tmp_path / "run"), rel=1e-5, abs=0
    )


@pytest.mark.processes
def test_a_job_that_loses_processes_ends_as_if_it_had_not(tmp_path, uninterrupted):
    """Process 1 in the first attempt; process 0, which leads, in the second."""
    run = tmp_path / "run"
    env = {"MORTAL": "1,0", "MORTAL_CHECKPOINTS": str(run / "checkpoints")}
    found = command(
        *("launch", "local", "--processes", "2", "--cpu-devices", "1", "--"),
        *train(run),
        env=ENV | env,
        timeout=270,
    )
    assert found.returncode == 0, found.stdout + found.stderr
    for attempt, worker in ((1, 1), (2, 0)):
        killed = f"attempt {attempt}: worker {worker} was killed by signal 9 (SIGKILL)"
        assert killed in found.stderr
    assert "done at attempt 3" in found.stderr
    assert len(re.findall(r"^0 \| Resuming from step \d+$", found.stdout, re.M)) == 2
    for program in ("digests", "train step"):
        line = f"0 | Loaded from an earlier attempt: {program}\n"
        assert found.stdout.count(line) == 2
    rows = metrics.read(run / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(1, NUM_STEPS + 1))
    lines = (run / "logs" / "supervisor.jsonl").read_text().splitlines()
    events = [json.loads(line) for line in lines]
    starts = [event for event in events if event["event"] == "start"]
    assert all(ends(pid) for event in starts for pid in event["pids"])
    check_same(run, uninterrupted)
