"""The pods of a manifest, played by processes of this machine: do they find each other?

Each gets the container's arguments and variables, with its own annotation filled in,
and sees a hosts file in which the names of all pods are this machine.
"""

import json
import os
import signal
import subprocess
from pathlib import Path

import pytest
import yaml
from tiny_runs import COMMAND, TINY

from meshloom.launch.group import free_port
from meshloom.trainer import metrics
from meshloom.trainer.cli import main

INDEX = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
# Root needs no user namespace, and some machines have none.
UNSHARE = ["unshare", "-m"] if os.geteuid() == 0 else ["unshare", "-rm"]
AS_A_POD = 'mount --bind "$0" /etc/hosts && exec "$@"'


def variables(container: dict, index: int) -> dict[str, str]:
    found = {}
    for variable in container["env"]:
        value = variable.get("value")
        if value is None:
            assert variable["valueFrom"] == {"fieldRef": {"fieldPath": INDEX}}
            value = str(index)
        found[variable["name"]] = value
    return found


def start(container: dict, index: int, hosts: Path, log: Path) -> subprocess.Popen:
    assert container["command"] == ["meshloom"]
    script = [*UNSHARE, "sh", "-c", AS_A_POD, str(hosts), COMMAND, *container["args"]]
    with open(log, "wb") as output:
        return subprocess.Popen(
            script,
            env={**os.environ, **variables(container, index)},
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


@pytest.mark.processes
def test_pods_join_and_train(tmp_path, capsys):
    run = tmp_path / "run"
    train = ["train", "--config", TINY, "--cpu-devices", "1", "--workdir", str(run)]
    flags = ["--name", "pods", "--image", "i", "--hosts", "2"]
    flags += ["--port", str(free_port(set())), "--no-network-policy", "--"]
    assert main(["launch", "k8s", *flags, *train, "--steps", "2"]) == 0
    jobset = yaml.safe_load(capsys.readouterr().out)
    job = jobset["spec"]["replicatedJobs"][0]["template"]["spec"]
    (container,) = job["template"]["spec"]["containers"]
    names = variables(container, 0)["MESHLOOM_HOSTS"].split(",")
    hosts = tmp_path / "hosts"
    text = Path("/etc/hosts").read_text()
    hosts.write_text(text + "".join(f"\n127.0.0.1 {name}" for name in names) + "\n")
    logs = [tmp_path / f"{index}.log" for index in range(job["completions"])]
    pods = [start(container, i, hosts, log) for i, log in enumerate(logs)]
    try:
        statuses = [pod.wait(200) for pod in pods]
    finally:
        for pod in pods:
            if pod.poll() is None:
                os.killpg(pod.pid, signal.SIGKILL)
                pod.wait()
    assert statuses == [0, 0], "\n".join(log.read_text() for log in logs)
    assert json.loads((run / "environment.json").read_text())["num_processes"] == 2
    assert [row["step"] for row in metrics.read(run / "metrics.jsonl")] == [1, 2]
