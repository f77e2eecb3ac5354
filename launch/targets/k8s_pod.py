"""The parts of a pod that every kind of job has."""

from typing import Any

from .k8s_job import Job

# The annotations from which a pod reads its own index and that of its slice.
INDEX = "batch.kubernetes.io/job-completion-index"
SLICE = "jobset.sigs.k8s.io/job-index"


def users_variables(job: Job, ours: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the variables that the user gives; none may be one of ours."""
    names = {variable["name"] for variable in ours}
    if both := sorted(names & {*job.env, *job.secrets}):
        raise ValueError(
            f"{both[0]} is set by the launcher; remove it from --env and --secret-env"
        )
    env = [variable(name, literal(value)) for name, value in job.env.items()]
    for name, (secret, key) in job.secrets.items():
        source = {"secretKeyRef": {"name": secret, "key": key}}
        env.append({"name": name, "valueFrom": source})
    return env


def resources(job: Job) -> dict[str, Any]:
    amounts: dict[str, Any] = dict(job.requests)
    if job.resource is not None:
        amounts[job.resource] = job.devices
    return {"requests": amounts, "limits": amounts} if amounts else {}


def node_selector(job: Job) -> dict[str, str]:
    if job.tpu is None:
        return {}
    accelerator, topology = job.tpu
    return {
        "cloud.google.com/gke-tpu-accelerator": accelerator,
        "cloud.google.com/gke-tpu-topology": topology,
    }


def tolerations(job: Job) -> list[dict[str, str]]:
    if job.resource is None:
        return []
    return [{"key": job.resource, "operator": "Exists", "effect": "NoSchedule"}]


def volumes(job: Job) -> tuple[list[dict], list[dict]]:
    """Returns the volumes of the pod, and the mounts of its container."""
    claims: list[dict] = []
    mounts: list[dict] = []
    if job.devices and job.tpu is None:
        # NCCL passes data between the GPUs of a host through it; the default is 64 MiB.
        claims.append({"name": "shm", "emptyDir": {"medium": "Memory"}})
        mounts.append({"name": "shm", "mountPath": "/dev/shm"})
    for number, (folder, claim) in enumerate(job.volumes.items()):
        source = {"persistentVolumeClaim": {"claimName": claim}}
        claims.append({"name": f"claim-{number}", **source})
        mounts.append({"name": f"claim-{number}", "mountPath": folder})
    return claims, mounts


def variable(name: str, value: str) -> dict[str, Any]:
    return {"name": name, "value": value}


def annotation(name: str, key: str) -> dict[str, Any]:
    path = f"metadata.annotations['{key}']"
    return {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}


def literal(text: str) -> str:
    """Escapes `$`, or Kubernetes would expand $(NAME)."""
    return text.replace("$", "$$")


def without_empty(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value not in ({}, [])}
