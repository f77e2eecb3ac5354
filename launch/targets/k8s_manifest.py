"""The Kubernetes manifest of a job: objects as plain data, dumped as YAML."""

import re
from typing import Any

from . import k8s_fleet
from .k8s_job import Job
from .k8s_pod import (
    INDEX,
    SLICE,
    annotation,
    literal,
    node_selector,
    resources,
    tolerations,
    users_variables,
    variable,
    volumes,
    without_empty,
)

POLICY_NOTE = """\
# jax's coordination service has no authentication: whoever reaches its port can join,
# read and end the job. Only the pods of this job may reach one another.
"""
JOBSET_NOTE = """\
# Pods keep their DNS names, <jobset>-worker-<slice>-<host>.<jobset>, across restarts,
# and have them before they are ready: the others look up process 0 while it starts.
# All processes restart together (backoffLimit: 0), and only after all processes of the
# last attempt are gone (BlockingRecreate).
# Exit code 2 means input that you must fix, and fails the job. Everything else is
# restarted, including 75 (preempted) and 76 (the watchdog).
"""


def manifest(job: Job) -> str:
    """Returns YAML for `kubectl apply`."""
    if job.learners:
        texts = [k8s_fleet.NOTE + _dump(_fleet(job))]
    elif job.form == "trainjob":
        texts = [_dump(_trainjob(job))]
    else:
        texts = [JOBSET_NOTE + _dump(_jobset(job))]
    if job.is_fenced:
        texts.insert(0, POLICY_NOTE + _dump(_network_policy(job)))
    return "---\n".join(texts)


def hosts(job: Job) -> list[str]:
    """Returns the DNS name of each process's pod; restarts do not change it."""
    return [
        f"{job.name}-{job.group}-{part}-{host}.{job.name}"
        for part in range(job.learners or job.slices)
        for host in range(job.hosts)
    ]


def environment(job: Job) -> list[dict[str, Any]]:
    """Returns the variables of each container: its process's own, and the user's.

    The index of a process is that of its pod. With several slices it is the slice's
    index * MESHLOOM_PROCESSES_PER_JOB + that of the pod, which a manifest cannot
    compute: the process does, when it reads its environment.
    """
    names = hosts(job)
    env: list[dict[str, Any]] = [
        variable("PYTHONUNBUFFERED", "1"),  # or a killed pod loses its last lines
        variable("MESHLOOM_COORDINATOR", f"{names[0]}:{job.port}"),
        variable("MESHLOOM_NUM_PROCESSES", str(len(names))),
        variable("MESHLOOM_HOSTS", ",".join(names)),
    ]
    if job.slices == 1:
        env.append(annotation("MESHLOOM_PROCESS_ID", INDEX))
    else:
        env += [
            annotation("MESHLOOM_JOB_INDEX", SLICE),
            variable("MESHLOOM_PROCESSES_PER_JOB", str(job.hosts)),
        ]
    return env + users_variables(job, env)


def _jobset(job: Job) -> dict[str, Any]:
    annotations = {}
    if job.tpu is not None:
        # A slice is one node pool, and all of its hosts must be in the same one.
        key = "alpha.jobset.sigs.k8s.io/exclusive-topology"
        annotations[key] = "cloud.google.com/gke-nodepool"
    on_exit_codes = {"containerName": job.container, "operator": "In", "values": [2]}
    pod_rule = {"action": "FailJob", "onExitCodes": on_exit_codes}
    template = {
        "completionMode": "Indexed",
        "completions": job.hosts,
        "parallelism": job.hosts,
        "backoffLimit": 0,
        "podFailurePolicy": {"rules": [pod_rule]},
        "template": {"spec": _pod(job)},
    }
    job_rule = {
        "name": "badInput",
        "action": "FailJobSet",
        "onJobFailureReasons": ["PodFailurePolicy"],
    }
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": _metadata(job, annotations),
        "spec": {
            "network": {
                "enableDNSHostnames": True,
                "publishNotReadyAddresses": True,
                "subdomain": job.name,
            },
            "failurePolicy": {
                "maxRestarts": 5 if job.max_restarts is None else job.max_restarts,
                "restartStrategy": "BlockingRecreate",
                "rules": [job_rule],
            },
            "replicatedJobs": [
                {
                    "name": job.group,
                    "replicas": job.slices,
                    "template": {"spec": template},
                }
            ],
        },
    }


def _fleet(job: Job) -> dict[str, Any]:
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": _metadata(job, {}),
        "spec": k8s_fleet.spec(job),
    }


def _pod(job: Job) -> dict[str, Any]:
    claims, mounts = volumes(job)
    port = {"name": "coordinator", "containerPort": job.port, "protocol": "TCP"}
    container = without_empty(
        {
            "name": job.container,
            "image": job.image,
            "command": ["meshloom"],
            "args": [literal(word) for word in job.command],
            "env": environment(job),
            "ports": [port],
            "resources": resources(job),
            "volumeMounts": mounts,
        }
    )
    return without_empty(
        {
            "restartPolicy": "Never",
            "terminationGracePeriodSeconds": job.grace_seconds,
            "nodeSelector": node_selector(job),
            "tolerations": tolerations(job),
            "containers": [container],
            "volumes": claims,
        }
    )


def _trainjob(job: Job) -> dict[str, Any]:
    claims, mounts = volumes(job)
    pod = without_empty(
        {
            "terminationGracePeriodSeconds": job.grace_seconds,
            "nodeSelector": node_selector(job),
            "tolerations": tolerations(job),
            "containers": [
                without_empty({"name": job.container, "volumeMounts": mounts})
            ],
            "volumes": claims,
        }
    )
    patch = {"name": job.group, "template": {"spec": {"template": {"spec": pod}}}}
    return {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainJob",
        "metadata": _metadata(job, {}),
        "spec": {
            "runtimeRef": {"name": job.runtime},
            "trainer": without_empty(
                {
                    "numNodes": job.hosts,
                    "image": job.image,
                    "command": ["meshloom"],
                    "args": [literal(word) for word in job.command],
                    "env": environment(job),
                    "resourcesPerNode": resources(job),
                }
            ),
            "runtimePatches": [
                {
                    "manager": "meshloom/launch",
                    "trainingRuntimeSpec": {
                        "template": {"spec": {"replicatedJobs": [patch]}}
                    },
                }
            ],
        },
    }


def _network_policy(job: Job) -> dict[str, Any]:
    pods = {"matchLabels": {"jobset.sigs.k8s.io/jobset-name": job.name}}
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": {"name": job.name, "namespace": job.namespace},
        "spec": {
            "podSelector": pods,
            "policyTypes": ["Ingress"],
            "ingress": [{"from": [{"podSelector": pods}]}],
        },
    }


def _metadata(job: Job, annotations: dict[str, str]) -> dict[str, Any]:
    labels = {"kueue.x-k8s.io/queue-name": job.queue} if job.queue else {}
    return without_empty(
        {
            "name": job.name,
            "namespace": job.namespace,
            "labels": labels,
            "annotations": annotations,
        }
    )


# Words that some version of YAML reads as a boolean or null.
_NOT_TEXT = {"y", "n", "yes", "no", "on", "off", "true", "false", "null"}


def _dump(document: dict[str, Any]) -> str:
    import yaml  # not at the top: the rest of the launcher needs Python alone

    class Dumper(yaml.SafeDumper):
        def ignore_aliases(self, data: Any) -> bool:
            return True

        def increase_indent(self, flow: bool = False, indentless: bool = False):
            return super().increase_indent(
                flow, False
            )  # lists indented below their key

    def text(dumper: yaml.SafeDumper, value: str):
        # PyYAML quotes what it would itself read as something else. kubectl's parser
        # reads more: 1e3 as a number, y as a boolean.
        is_plain = re.fullmatch(r"[A-Za-z][\w./-]*", value, re.ASCII)
        style = None if is_plain and value.lower() not in _NOT_TEXT else '"'
        return dumper.represent_scalar("tag:yaml.org,2002:str", value, style=style)

    Dumper.add_representer(str, text)
    return yaml.dump(
        document,
        Dumper=Dumper,
        sort_keys=False,
        allow_unicode=True,
        width=float("inf"),  # never folds a line
    )
