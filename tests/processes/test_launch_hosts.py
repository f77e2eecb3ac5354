"""Jobs over two hosts with addresses of their own, one of which is cut off."""

import time
from pathlib import Path

import pytest
from launch_job import SAVE_EVERY, SLOWLY, check_same, train
from launched import ending, step_of, wait_until
from tiny_runs import COMMAND, refused
from two_hosts import ssh_daemon, two_hosts

from meshloom.launch.logs import Logs
from meshloom.launch.target import Attempt
from meshloom.launch.targets.ssh import Ssh


@pytest.mark.parametrize(
    "flags, words",
    [
        (["--hosts", "a,a"], "--hosts is 'a,a'; expected distinct names, such as"),
        (["--hosts", "a,"], "--hosts is 'a,'; expected distinct names"),
        (["--hosts", "me@a"], "--hosts is 'me@a'; the processes use these names"),
        (["--hosts", "a", "--processes-per-host", "0"], "--processes-per-host must be"),
        (["--hosts", "a", "--ssh", "no-such-ssh"], "--ssh 'no-such-ssh': command not"),
    ],
)
def test_bad_input(flags, words, capfd):
    argv = ["launch", "ssh", *flags, "--", "train"]
    assert refused(capfd, argv).startswith(words)


def test_values_of_variables_are_on_no_command_line(tmp_path, monkeypatch):
    monkeypatch.setenv("MINE", "sentinel")
    logs = Logs(tmp_path)
    (found,) = Ssh(["python", "train"], ["far"], env=["MINE"]).start(
        Attempt(1, 1), logs
    )
    assert "sentinel" not in " ".join(found.argv) and found.env["MINE"] == "sentinel"
    assert "MINE" in found.argv[found.argv.index("near") + 3].split(",")
    assert found.env["MESHLOOM_COORDINATOR"].startswith("far:")
    assert (found.host, found.env["MESHLOOM_PROCESS_ID"]) == ("far", "0")


@pytest.mark.processes
@pytest.mark.timeout(600)
def test_a_host_that_is_cut_off_and_comes_back(tmp_path, uninterrupted):
    run, output = tmp_path / "run", tmp_path / "output"

    def said(words: str):
        return lambda: words in output.read_text(errors="replace")

    with two_hosts(tmp_path) as (a, b):
        ssh = ssh_daemon(b, tmp_path / "ssh")
        job = a.start(
            [
                *(COMMAND, "launch", "ssh", "--hosts", f"{a.name},{b.name}"),
                *("--ssh", " ".join(ssh), "--cpu-devices", "1"),
                *("--silence-seconds", "10", "--max-restarts", "20"),
                *("--env", "MORTAL_SECONDS", "--"),
                *train(run),
            ],
            output,
            SLOWLY,
        )
        with ending(job):
            wait_until(lambda: step_of(run) > 2 * SAVE_EVERY, job, output, 120)
            before = {pid for pid in b.pids() if _is_training(pid)}
            assert before
            b.cut_off()
            began = time.monotonic()
            gone = f"worker 1 on {b.name} exited with code 69 (a host, process"
            wait_until(said(gone), job, output, 60)
            # ssh asks every 5 s and gives up after three answers that did not come.
            assert time.monotonic() - began < 30
            # The host that was cut off does not go on by itself, and is tried again.
            wait_until(lambda: not before & set(b.pids()), job, output, 30)
            wait_until(lambda: output.read_text().count(gone) > 1, job, output, 60)
            b.join()
            assert job.wait(240) == 0, output.read_text()
    check_same(run, uninterrupted)


def _is_training(pid: int) -> bool:
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes()
    except FileNotFoundError:
        return False
    return b"meshloom.trainer.cli" in words
