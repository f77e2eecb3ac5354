"""Starting, following and stopping a job through a kubectl that is made up."""

import os
import signal
import subprocess
import time

import pytest
import yaml
from fake_kubectl import calls, ended, make, path_with, pod
from launched import default_signals, ending
from tiny_runs import COMMAND, refused

from meshloom.launch.targets import k8s_cluster
from meshloom.trainer.cli import main

ARGV = ["launch", "k8s", "--name", "gpt2", "--image", "i", "--hosts", "2"]
TRAIN = ["--", "train"]
FIRST, SECOND = "gpt2-worker-0-0-aaaaa", "gpt2-worker-0-0-bbbbb"


@pytest.fixture
def cluster(tmp_path, monkeypatch):
    """Makes a kubectl of moments; returns its folder."""
    monkeypatch.setattr(k8s_cluster, "POLL_SECONDS", 0.01)

    def build(*moments):
        folder = make(tmp_path / "made", list(moments))
        monkeypatch.setenv("PATH", path_with(folder))
        return folder

    return build


def verbs(folder) -> list[str]:
    return [call["words"][2] for call in calls(folder)]


def test_a_job_is_followed_through_a_restart(cluster, capfd):
    folder = cluster(
        {"pods": []},
        {"pods": [pod(FIRST, "Pending", why="0/4 nodes are available")]},
        {"pods": [pod(FIRST, "Running")]},
        {"pods": [pod(FIRST, "Failed")]},
        {
            "pods": [
                pod(FIRST, "Failed"),
                pod(SECOND, "Running", made="2026-01-01T00:05:00Z"),
            ]
        },
        {
            "pods": [pod(SECOND, "Succeeded", made="2026-01-01T00:05:00Z")],
            "conditions": ended("Completed", "AllJobsCompleted"),
        },
    )
    assert main([*ARGV, "--apply", *TRAIN]) == 0
    out, err = capfd.readouterr()
    assert out == f"log of pod/{FIRST}\nlog of pod/{SECOND}\n"
    assert "waiting for the pod of process 0: 0/4 nodes are available" in err
    assert err.endswith("meshloom launch: done\n")
    first = calls(folder)[0]
    assert first["words"] == ["--namespace", "default", "apply", "--filename", "-"]
    kinds = [document["kind"] for document in yaml.safe_load_all(first["given"])]
    assert kinds == ["NetworkPolicy", "JobSet"]


@pytest.mark.parametrize(
    "reason, status",
    [("FailJobSetFailurePolicyAction", 2), ("ReachedMaxRestarts", 1)],
)
def test_the_status_says_how_a_job_failed(reason, status, cluster, capfd):
    conditions = ended("Failed", reason, "by job gpt2-worker-0")
    cluster({"pods": [pod(FIRST, "Failed")], "conditions": conditions})
    assert main([*ARGV, "--apply", *TRAIN]) == status
    out, err = capfd.readouterr()
    assert out == f"log of pod/{FIRST}\n"  # its last words are shown first
    assert f"failed, {reason}: by job gpt2-worker-0" in err


def test_a_log_that_breaks_off_goes_on(cluster, capfd):
    done = {"pods": [pod(FIRST, "Succeeded")], "conditions": ended("Completed")}
    cluster(*[{"pods": [pod(FIRST, "Running")]}] * 2, done)
    assert main([*ARGV, "--apply", *TRAIN]) == 0
    out, err = capfd.readouterr()
    assert out == f"log of pod/{FIRST}\nlog of pod/{FIRST} --tail=0\n"
    assert f"the log of {FIRST} broke off" in err


def test_detached_and_stopped(cluster, capfd):
    folder = cluster({"pods": []})
    assert main([*ARGV, "--apply", "--detach", "--namespace", "lab", *TRAIN]) == 0
    said = capfd.readouterr().out
    assert verbs(folder) == ["apply"]
    objects = "jobsets.jobset.x-k8s.io/gpt2 networkpolicies.networking.k8s.io/gpt2"
    assert said == f"The job is running. To stop it: kubectl delete -n lab {objects}\n"
    assert main(["launch", "k8s", "--name", "gpt2", "--delete"]) == 0
    words = calls(folder)[-1]["words"]
    assert words == [
        *("--namespace", "default", "delete", "--ignore-not-found", *objects.split())
    ]


def test_a_trainjob_is_looked_for_by_its_own_name(cluster):
    done = {"pods": [pod(FIRST, "Succeeded")], "conditions": ended("Complete")}
    folder = cluster(done)
    assert main([*ARGV, "--form", "trainjob", "--apply", *TRAIN]) == 0
    asked = calls(folder)
    assert "trainjobs.trainer.kubeflow.org/gpt2" in asked[1]["words"]
    assert "jobset.sigs.k8s.io/replicatedjob-name=node" in asked[2]["words"][-3]


def test_ctrl_c_leaves_the_job_and_says_how_to_stop_it(tmp_path):
    folder = make(tmp_path / "made", [{"pods": []}])
    with default_signals():
        process = subprocess.Popen(
            [COMMAND, *ARGV, "--apply", *TRAIN],
            env={**os.environ, "PATH": path_with(folder)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
    with ending(process):
        assert process.stderr is not None
        for line in process.stderr:
            if "waiting for the pod" in line:
                break
        time.sleep(0.2)
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate(timeout=30)
    assert process.returncode == 130
    assert out.startswith("The job keeps running. To stop it: kubectl delete")
    assert "delete" not in verbs(folder)


def test_what_kubectl_says_is_passed_on(cluster, capfd):
    cluster({"error": "jobsets.jobset.x-k8s.io is forbidden"})
    assert main([*ARGV, "--apply", *TRAIN]) == 2
    said = capfd.readouterr().err
    assert (
        "exited with code 1: Error from server: jobsets.jobset.x-k8s.io is forbidden"
        in said
    )


def test_without_kubectl(monkeypatch, capfd, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "kubectl is not on the PATH" in refused(capfd, [*ARGV, "--apply", *TRAIN])
    assert main([*ARGV, *TRAIN]) == 0  # printing needs none
