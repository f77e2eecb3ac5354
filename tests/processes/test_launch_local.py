"""`meshloom launch local`: its arguments, and real jobs that lose a process."""

import json
import re
from pathlib import Path

import pytest
from paths import SUPPORT
from test_jobs import ends
from tiny_runs import TINY, command, refused

from meshloom.launch import flags, supervisor
from meshloom.trainer import cli
from meshloom.trainer.cli import main
from meshloom.trainer.record import metrics

NUM_STEPS = 24

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


def train(folder: Path, mortal: int | None = None):
    """A job of two processes, of which one may be killed; (what it said, losses)."""
    config = folder / "mortal.gin"
    config.write_text(
        "from __gin__ import dynamic_registration\n"
        "import mortal\n"
        "from meshloom.trainer.run import train\n"
        "train.Config.data = @mortal.Synthetic()\n"
        "mortal.Synthetic:\n  vocab_size = 64\n  length = 16\n  num_examples = 512\n"
        "  num_eval_examples = 64\n"
    )
    run = folder / "run"
    env = {"PYTHONPATH": str(SUPPORT), "MORTAL_CHECKPOINTS": str(run / "checkpoints")}
    if mortal is not None:
        env["MORTAL"] = str(mortal)
    found = command(
        *("launch", "local", "--processes", "2", "--cpu-devices", "1", "--"),
        *("train", "--config", TINY, "--config", str(config), "--workdir", str(run)),
        *("--steps", str(NUM_STEPS), "--set", "eval_batches=0"),
        # Without a loop, so that the next start may load the compiled step.
        *("--mesh", "fsdp=-1", "--set", "model.unroll=2"),
        env=env,
        timeout=270,
    )
    assert found.returncode == 0, found.stdout + found.stderr
    rows = metrics.read(run / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(1, NUM_STEPS + 1))
    lines = (run / "logs" / "supervisor.jsonl").read_text().splitlines()
    events = [json.loads(line) for line in lines]
    starts = [event for event in events if event["event"] == "start"]
    assert all(ends(pid) for event in starts for pid in event["pids"])
    return found, [row["loss"] for row in rows]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory) -> list[float]:
    found, losses = train(tmp_path_factory.mktemp("uninterrupted"))
    assert "done at attempt 1" in found.stderr
    return losses


@pytest.mark.processes
@pytest.mark.parametrize("worker", [0, 1])
def test_a_job_that_loses_a_process_ends_as_if_it_had_not(
    worker, tmp_path, uninterrupted
):
    found, losses = train(tmp_path, mortal=worker)
    killed = f"attempt 1: worker {worker} was killed by signal 9 (SIGKILL)"
    assert killed in found.stderr and "done at attempt 2" in found.stderr
    assert re.search(r"^0 \| Resuming from step \d+$", found.stdout, re.M)
    for program in ("digests", "train step"):
        assert f"0 | Loaded from an earlier attempt: {program}\n" in found.stdout
    assert losses == uninterrupted
