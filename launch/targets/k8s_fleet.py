"""The JobSet of learners that exchange parameters through a service."""

from pathlib import PurePosixPath
from typing import Any

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

# Where the coordinator answers, next to the port of a learner's process 0.
PORT = 8477
TOKEN = "/var/run/meshloom/token"
# The run folder is the folder of a job of the service, which has its log inside.
LINK = 'mkdir -p "$0" && ln -sfn ../.. "$0/$1" && shift && exec meshloom "$@"'

NOTE = """\
# A learner that fails is restarted alone. On one host, its Job replaces the pod; on
# several, all of them restart together (RestartJob, which JobSet has since 0.12, and
# only with its feature gate RestartJob). If a pod of the service fails, everything
# restarts, and continues from its checkpoints. Exit code 2 means input that you must
# fix, and fails the job.
"""


def spec(job: Job) -> dict[str, Any]:
    """Returns the spec of a JobSet with a coordinator, servers and learners."""
    most = 5 if job.max_restarts is None else job.max_restarts
    is_single = job.hosts == 1
    bad_input = {
        "name": "badInput",
        "action": "FailJobSet",
        "onJobFailureReasons": ["PodFailurePolicy"],
    }
    learner = {
        "name": "learner",
        "action": "FailJobSet" if is_single else "RestartJob",
        "targetReplicatedJobs": ["learner"],
    }
    learners = _replicated(job, "learner", job.learners, job.hosts, _learner(job))
    if is_single:
        learners["template"]["spec"]["backoffLimit"] = most
    if job.tpu is not None:
        # A learner is a slice, which is one node pool; the service is elsewhere.
        key = "alpha.jobset.sigs.k8s.io/exclusive-topology"
        note = {key: "cloud.google.com/gke-nodepool"}
        learners["template"] = {"metadata": {"annotations": note}} | learners[
            "template"
        ]
    return {
        "network": {
            "enableDNSHostnames": True,
            "publishNotReadyAddresses": True,
            "subdomain": job.name,
        },
        "successPolicy": {"operator": "All", "targetReplicatedJobs": ["learner"]},
        "failurePolicy": {
            "maxRestarts": most,
            "restartStrategy": "BlockingRecreate",
            "rules": [bad_input, learner],
        },
        "replicatedJobs": [
            _replicated(job, "coordinator", 1, 1, _coordinator(job)),
            _after(
                "coordinator", _replicated(job, "server", 1, job.servers, _server(job))
            ),
            _after("server", learners),
        ],
    }


def _replicated(
    job: Job, name: str, replicas: int, pods: int, pod: dict[str, Any]
) -> dict[str, Any]:
    on_exit_codes = {"containerName": job.container, "operator": "In", "values": [2]}
    rule = {"action": "FailJob", "onExitCodes": on_exit_codes}
    template = {
        "completionMode": "Indexed",
        "completions": pods,
        "parallelism": pods,
        "backoffLimit": 0,
        "podFailurePolicy": {"rules": [rule]},
        "template": {"spec": pod},
    }
    return {"name": name, "replicas": replicas, "template": {"spec": template}}


def _after(name: str, replicated: dict[str, Any]) -> dict[str, Any]:
    """Starts a replicated job once the pods of another one run."""
    return {**replicated, "dependsOn": [{"name": name, "status": "Ready"}]}


def _coordinator(job: Job) -> dict[str, Any]:
    home = PurePosixPath(job.run_folder, "service", "log")
    name = PurePosixPath(job.run_folder).name
    args = ["serve", "--role", "coordinator", "--bind", f"$(POD_IP):{PORT}"]
    args += ["--folder", literal(str(home)), "--servers", str(job.servers)]
    if job.save_commits is not None:
        args += ["--save-every", str(job.save_commits)]
    shell = ["sh", "-c", literal(LINK), literal(str(home)), literal(name)]
    return _pod(job, shell, [*args, "--token-file", TOKEN], _service_variables(job))


def _server(job: Job) -> dict[str, Any]:
    args = ["serve", "--role", "server", "--bind", "$(POD_IP):0"]
    args += ["--coordinator", _address(job), "--folder", "/tmp/meshloom"]
    args += ["--token-file", TOKEN]
    return _pod(job, ["meshloom"], args, _service_variables(job))


def _learner(job: Job) -> dict[str, Any]:
    run = PurePosixPath(job.run_folder)
    args = [literal(word) for word in job.command]
    args += ["--exchange", f"{_address(job)}/{literal(run.name)}"]
    args += ["--learner", f"$(MESHLOOM_LEARNER)/{job.learners}"]
    args += ["--workdir", f"{literal(str(run))}/learners/$(MESHLOOM_LEARNER)"]
    args += ["--set", f"exchange.token_file={TOKEN!r}"]
    pod = _pod(job, ["meshloom"], args, _learner_variables(job))
    (container,) = pod["containers"]
    container["resources"] = resources(job)
    pod["containers"] = [without_empty(container)]
    pod["nodeSelector"], pod["tolerations"] = node_selector(job), tolerations(job)
    return without_empty(pod)


def _pod(
    job: Job, command: list[str], args: list[str], env: list[dict[str, Any]]
) -> dict[str, Any]:
    claims, mounts = volumes(job)
    secret, key = job.token or ("", "")
    token = {"secretName": secret, "items": [{"key": key, "path": "token"}]}
    folder = TOKEN.rpartition("/")[0]
    container = {
        "name": job.container,
        "image": job.image,
        "command": command,
        "args": args,
        "env": env + users_variables(job, env),
        "volumeMounts": [*mounts, {"name": "token", "mountPath": folder}],
    }
    return {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": job.grace_seconds,
        "containers": [container],
        "volumes": [*claims, {"name": "token", "secret": token}],
    }


def _service_variables(job: Job) -> list[dict[str, Any]]:
    """Returns the variables of the service, which computes on the CPU."""
    address = {"fieldRef": {"fieldPath": "status.podIP"}}
    return [
        variable("PYTHONUNBUFFERED", "1"),
        variable("JAX_PLATFORMS", "cpu"),
        {"name": "POD_IP", "valueFrom": address},
    ]


def _learner_variables(job: Job) -> list[dict[str, Any]]:
    """Returns the variables of a learner's process; Kubernetes fills in its number."""
    hosts = [
        f"{job.name}-learner-$(MESHLOOM_LEARNER)-{host}.{job.name}"
        for host in range(job.hosts)
    ]
    return [
        variable("PYTHONUNBUFFERED", "1"),
        annotation("MESHLOOM_LEARNER", SLICE),
        variable("MESHLOOM_COORDINATOR", f"{hosts[0]}:{job.port}"),
        variable("MESHLOOM_NUM_PROCESSES", str(job.hosts)),
        variable("MESHLOOM_HOSTS", ",".join(hosts)),
        annotation("MESHLOOM_PROCESS_ID", INDEX),
    ]


def _address(job: Job) -> str:
    return f"{job.name}-coordinator-0-0.{job.name}:{PORT}"
