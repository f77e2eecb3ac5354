"""`meshloom launch mpi`: both ways to spell it, and real jobs by both."""

import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from launch_job import (
    ENV,
    NUM_STEPS,
    SAVE_EVERY,
    SLOWLY,
    check_same,
    train,
)
from launched import ending, losses, step_of, wait_until
from test_jobs import ends, is_running
from tiny_runs import COMMAND, command, refused

from meshloom.launch import target
from meshloom.launch.logs import Logs
from meshloom.launch.target import Attempt
from meshloom.launch.targets import mpi
from meshloom.trainer.cli import main

AS_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}


@pytest.mark.parametrize(
    "text, slots",
    [
        ("a slots=2\nb slots=1 max_slots=4  # new\n\n# none\n", ["a", "a", "b"]),
        ("a:2\nb\n", ["a", "a", "b"]),
        ("10.0.0.1 slots = 2\n", ["10.0.0.1"] * 2),
    ],
)
def test_hostfiles_of_both_kinds(text, slots, tmp_path):
    path = tmp_path / "hosts"
    path.write_text(text)
    assert mpi.read_hostfile(path) == slots


@pytest.mark.parametrize(
    "text, words",
    [
        ("a slots=0", "line 1: 'a slots=0' is not a host; expected 'HOST slots=N' or"),
        ("\na:x", "line 2: 'a:x' is not a host"),
        ("a\nb\na", "line 3: host a is listed twice"),
        ("# none", "does not name any host"),
    ],
)
def test_hostfiles_that_cannot_be(text, words, tmp_path):
    path = tmp_path / "hosts"
    path.write_text(text)
    with pytest.raises(ValueError, match=words):
        mpi.read_hostfile(path)


def start(tmp_path, flavour: str, slots=("a", "a", "b", "b"), processes=4):
    made = mpi.Mpi(["python", "train"], slots, flavour=flavour, env=["MINE"])
    logs = Logs(tmp_path / "logs")
    logs.folder.mkdir(exist_ok=True)
    (found,) = made.start(Attempt(1, processes), logs)
    return made, found


@pytest.fixture
def mine(monkeypatch):
    monkeypatch.setenv("MINE", "x")
    monkeypatch.setenv("NOT_MINE", "x")


def test_open_mpi_is_spelled_right(tmp_path, mine):
    made, found = start(tmp_path, "openmpi")
    argv, hostfile = list(found.argv), tmp_path / "logs" / "hostfile"
    assert argv[:5] == ["mpirun", "-n", "4", "--bind-to", "none"]
    assert argv[argv.index("--hostfile") + 1] == str(hostfile)
    assert hostfile.read_text() == "a slots=2\nb slots=2\n"
    passed = {argv[i + 1] for i, word in enumerate(argv) if word == "-x"}
    assert {"MINE", "MESHLOOM_COORDINATOR", "MESHLOOM_HOSTS", "PATH"} <= passed
    assert "NOT_MINE" not in passed and "--oversubscribe" not in argv
    assert argv[-4:] == ["rank", str(tmp_path / "logs"), "python", "train"]
    assert found.env["MESHLOOM_HOSTS"] == "a,a,b,b"
    assert found.env["MESHLOOM_COORDINATOR"].startswith("a:")
    assert int(found.env["MESHLOOM_COORDINATOR"][2:]) in target.PORTS
    assert made.most == 4


def test_mpich_is_spelled_right(tmp_path, mine):
    _, found = start(tmp_path, "mpich", processes=2)
    argv, hostfile = list(found.argv), tmp_path / "logs" / "hostfile"
    assert argv[:5] == ["mpirun", "-n", "2", "-bind-to", "none"]
    assert argv[argv.index("-f") + 1] == str(hostfile)
    assert hostfile.read_text() == "a:2\nb:2\n"
    passed = argv[argv.index("-genvlist") + 1].split(",")
    assert {"MINE", "MESHLOOM_COORDINATOR"} <= set(passed)
    assert "NOT_MINE" not in passed
    assert found.env["MESHLOOM_HOSTS"] == "a,a"


def test_without_hosts_it_is_this_machine(tmp_path, mine):
    _, found = start(tmp_path, "openmpi", slots=(), processes=3)
    assert "--oversubscribe" in found.argv and "--hostfile" not in found.argv
    assert found.env["MESHLOOM_COORDINATOR"].startswith("127.0.0.1:")
    assert found.env["MESHLOOM_HOSTS"] == ",".join([target.local_host()] * 3)


def test_bad_input(capfd, tmp_path):
    argv = ["launch", "mpi", "--mpirun", "no-such-command"]
    assert refused(capfd, [*argv, "--processes", "2", "--", "train"]) == (
        "no-such-command: command not found. Install Open MPI or MPICH, or name the "
        "command with --mpirun."
    )
    assert refused(capfd, ["launch", "mpi", "--", "train"]) == (
        "--processes is required without --hostfile"
    )
    assert "prints 'cat (" in refused(
        capfd, ["launch", "mpi", "--mpirun", "cat", "--processes", "2", "--", "train"]
    )
    hosts = tmp_path / "hosts"
    hosts.write_text("a\n")
    argv = [
        "launch",
        "mpi",
        "--hostfile",
        str(hosts),
        "--processes",
        "2",
        "--",
        "train",
    ]
    assert "has slots for only 1. Add hosts or slots" in refused(capfd, argv)
    with pytest.raises(ValueError, match="--env NOT_SET: this variable is not set"):
        target.carried({"A": "1"}, ["NOT_SET"])


# Real jobs.


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.parametrize(
    "launcher",
    [
        "local --processes 1 --cpu-devices 4",
        "local --processes 2 --cpu-devices 2",
        "local --processes 4 --cpu-devices 1",
        "mpi --mpirun mpirun.openmpi --processes 2 --cpu-devices 2",
        "mpi --mpirun mpirun.mpich --processes 2 --cpu-devices 2",
    ],
)
def test_the_same_curve_on_a_mesh_of_two_axes(launcher, tmp_path, uninterrupted):
    run = tmp_path / "run"
    argv = ("launch", *launcher.split(), "--", *train(run, "--mesh", "data=2,fsdp=2"))
    found = command(*argv, env=AS_ROOT | ENV, timeout=250)
    assert found.returncode == 0, found.stdout + found.stderr
    assert losses(run) == pytest.approx(losses(uninterrupted), rel=1e-5, abs=0)
    assert len(losses(run)) == NUM_STEPS
    assert "mesh data=2, fsdp=2" in found.stdout


SUPERVISED = """
import sys
from pathlib import Path
from meshloom.launch.settings import Settings
from meshloom.launch.supervisor import Supervisor
from meshloom.launch.targets import mpi

folder, mpirun = sys.argv[1:]
command = ["sh", "-c", "echo $$ > $0/pid-$PPID-$$; exec sleep 100", folder]
target = mpi.Mpi(command, flavour=mpi.find_flavour(mpirun), mpirun=mpirun)
Supervisor(target, Path(folder, "logs"), Settings(processes=2)).run()
"""


@pytest.mark.processes
@pytest.mark.parametrize("mpirun", ["mpirun.openmpi", "mpirun.mpich"])
def test_a_killed_supervisor_leaves_nobody_behind(mpirun, tmp_path):
    output = tmp_path / "output"
    with open(output, "wb") as file:
        job = subprocess.Popen(
            [sys.executable, "-c", SUPERVISED, str(tmp_path), mpirun],
            env={**os.environ, **AS_ROOT},
            stdout=file,
            stderr=file,
            start_new_session=True,
        )
    with ending(job):
        wait_until(lambda: len(list(tmp_path.glob("pid-*"))) == 2, job, output, 60)
        time.sleep(0.2)
        pids = [int(path.read_text()) for path in tmp_path.glob("pid-*")]
        assert all(is_running(pid) for pid in pids)
        job.kill()
        assert all(ends(pid) for pid in pids)


@pytest.mark.processes
@pytest.mark.parametrize("mpirun", ["mpirun.openmpi", "mpirun.mpich"])
def test_told_to_stop_all_save_and_leave(mpirun, tmp_path, uninterrupted):
    """Started again, it ends as the job that was launched on this machine."""
    assert shutil.which(mpirun)
    run, output = tmp_path / "run", tmp_path / "output"
    argv = ["launch", "mpi", "--mpirun", mpirun, "--processes", "2"]
    argv += ["--cpu-devices", "1", "--", *train(run)]
    with open(output, "wb") as file:
        job = subprocess.Popen(
            [COMMAND, *argv[:2], "--env", "MORTAL_SECONDS", *argv[2:]],
            env={**os.environ, **AS_ROOT, **SLOWLY},
            stdout=file,
            stderr=file,
            start_new_session=True,
        )
    with ending(job):
        wait_until(lambda: step_of(run) > SAVE_EVERY, job, output, 120)
        job.terminate()
        assert job.wait(60) == 75, output.read_text()
    steps = re.findall(r"(\d) \| .* saved at step (\d+)", output.read_text())
    assert sorted(process for process, _ in steps) == ["0", "1"]
    assert len({step for _, step in steps}) == 1
    assert main(["ledger", "audit", str(run)]) == 0
    assert _left(run) == []
    found = command(*argv, env=AS_ROOT | ENV, timeout=250)
    assert found.returncode == 0, found.stdout + found.stderr
    assert f"0 | Resuming from step {steps[0][1]}\n" in found.stdout
    check_same(run, uninterrupted)


def _left(run: Path) -> list[str]:
    """Processes whose command line names the run."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if str(run).encode() in words:
            found.append(words.decode(errors="replace"))
    return found
