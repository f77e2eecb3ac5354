"""The pods of a manifest, played on two hosts of this machine: do they join and train?

Each gets the container's arguments and variables, with its own annotation filled in,
and knows the names of all pods.
"""

import json

import pytest
import yaml
from launch_job import ENV, check_same, train
from tiny_runs import COMMAND
from two_hosts import two_hosts

from meshloom.trainer.cli import main

INDEX = "metadata.annotations['batch.kubernetes.io/job-completion-index']"


def variables(container: dict, index: int) -> dict[str, str]:
    found = {}
    for variable in container["env"]:
        value = variable.get("value")
        if value is None:
            assert variable["valueFrom"] == {"fieldRef": {"fieldPath": INDEX}}
            value = str(index)
        found[variable["name"]] = value
    return found


@pytest.mark.processes
def test_pods_join_and_train(tmp_path, capsys, uninterrupted):
    run = tmp_path / "run"
    argv = train(run, "--cpu-devices", "1")
    flags = ["--name", "pods", "--image", "i", "--hosts", "2", "--no-network-policy"]
    assert main(["launch", "k8s", *flags, "--", *argv]) == 0
    jobset = yaml.safe_load(capsys.readouterr().out)
    job = jobset["spec"]["replicatedJobs"][0]["template"]["spec"]
    (container,) = job["template"]["spec"]["containers"]
    assert (container["command"], job["completions"]) == (["meshloom"], 2)
    names = variables(container, 0)["MESHLOOM_HOSTS"].split(",")
    logs = [tmp_path / f"{index}.log" for index in range(2)]
    with two_hosts(tmp_path) as hosts:
        with open(tmp_path / "hosts", "a") as known:
            for host, name in zip(hosts, names, strict=True):
                known.write(f"{host.address} {name}\n")
        argv = [COMMAND, *container["args"]]
        pods = [
            host.start(argv, logs[index], variables(container, index) | ENV)
            for index, host in enumerate(hosts)
        ]
        statuses = [pod.wait(200) for pod in pods]
    assert statuses == [0, 0], "\n".join(log.read_text() for log in logs)
    assert json.loads((run / "environment.json").read_text())["num_processes"] == 2
    check_same(run, uninterrupted)
