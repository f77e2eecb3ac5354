"""A job on a Kubernetes cluster: its manifest, and kubectl, which speaks to it."""

import json
import shutil
import subprocess
import time
from typing import Any

from ..exit_codes import BAD_INPUT, DONE, GAVE_UP
from ..logs import say
from ..target import Submitted
from ..yaml_templates import fill
from .k8s_job import Job

# Where a pod reads its numbers: its own annotations.
INDEX = "batch.kubernetes.io/job-completion-index"
SLICE = "jobset.sigs.k8s.io/job-index"
KINDS = {
    "jobset": "jobsets.jobset.x-k8s.io",
    "trainjob": "trainjobs.trainer.kubeflow.org",
}
POLL_SECONDS = 5.0


class Kubernetes(Submitted):
    """One job, started, followed and stopped through kubectl."""

    def __init__(self, job: Job):
        self.job = job
        self._said = ""

    def hosts(self) -> list[str]:
        """The name in DNS of each process's pod; it stays when a pod is made anew."""
        job = self.job
        return [
            f"{job.name}-{job.group}-{part}-{host}.{job.name}"
            for part in range(job.slices)
            for host in range(job.hosts)
        ]

    def environment(self) -> list[dict[str, Any]]:
        """The variables of each container: its place in the job, and the user's.

        The number of a process is that of its pod. Of several slices it is the slice *
        MESHLOOM_PROCESSES_PER_JOB + that, which no manifest can compute; the process
        does, when it looks for its place.
        """
        job, hosts = self.job, self.hosts()
        env: list[dict[str, Any]] = [
            _variable("PYTHONUNBUFFERED", "1"),  # a killed pod's last words are logged
            _variable("MESHLOOM_COORDINATOR", f"{hosts[0]}:{job.port}"),
            _variable("MESHLOOM_NUM_PROCESSES", str(len(hosts))),
            _variable("MESHLOOM_HOSTS", ",".join(hosts)),
        ]
        if job.slices == 1:
            env.append(_annotation("MESHLOOM_PROCESS_ID", INDEX))
        else:
            env += [
                _annotation("MESHLOOM_JOB_INDEX", SLICE),
                _variable("MESHLOOM_PROCESSES_PER_JOB", str(job.hosts)),
            ]
        ours = {variable["name"] for variable in env}
        if both := sorted(ours & {*job.env, *job.secrets}):
            raise ValueError(
                f"{both[0]} is set by the launcher; expected other names in --env and "
                "--secret-env. Leave it out."
            )
        env += [_variable(name, _literal(value)) for name, value in job.env.items()]
        for name, (secret, key) in job.secrets.items():
            source = {"secretKeyRef": {"name": secret, "key": key}}
            env.append({"name": name, "valueFrom": source})
        return env

    def manifest(self) -> str:
        """YAML for `kubectl apply`."""
        job = self.job
        volumes, mounts = _volumes(job)
        amounts: dict[str, Any] = dict(job.requests)
        selector: dict[str, str] = {}
        if job.tpu is not None:
            accelerator, topology = job.tpu
            selector["cloud.google.com/gke-tpu-accelerator"] = accelerator
            selector["cloud.google.com/gke-tpu-topology"] = topology
        annotations, tolerations = {}, []
        if job.tpu is not None and job.form == "jobset":
            # A slice is one pool of nodes, and all of its hosts must be in the same.
            key = "alpha.jobset.sigs.k8s.io/exclusive-topology"
            annotations[key] = "cloud.google.com/gke-nodepool"
        if job.resource is not None:
            amounts[job.resource] = job.devices
            taint = {"key": job.resource, "operator": "Exists", "effect": "NoSchedule"}
            tolerations.append(taint)
        texts = fill(
            f"{job.form}.yaml",
            {
                "name": job.name,
                "namespace": job.namespace,
                "labels": {"kueue.x-k8s.io/queue-name": job.queue} if job.queue else {},
                "annotations": annotations,
                "max_restarts": 5 if job.max_restarts is None else job.max_restarts,
                "group": job.group,
                "container": job.container,
                "runtime": job.runtime,
                "slices": job.slices,
                "hosts": job.hosts,
                "grace_seconds": job.grace_seconds,
                "image": job.image,
                "args": [_literal(word) for word in job.command],
                "env": self.environment(),
                "port": job.port,
                "resources": {"requests": amounts, "limits": amounts}
                if amounts
                else {},
                "node_selector": selector,
                "tolerations": tolerations,
                "mounts": mounts,
                "volumes": volumes,
            },
        )
        if not job.is_fenced:
            return texts
        names = {"name": job.name, "namespace": job.namespace}
        return f"{fill('network-policy.yaml', names)}---\n{texts}"

    def start(self) -> None:
        self._kubectl("apply", "--filename", "-", given=self.manifest())
        say(f"{self.job.form} {self.job.name} is in namespace {self.job.namespace}")

    def follow(self) -> int:
        """Shows what process 0 prints, through restarts; the status of the job."""
        shown = None  # the pod whose log was shown
        while True:
            status = self._ended()
            pod = self._first_pod()
            if pod is not None and pod["phase"] != "Pending" and pod["name"] != shown:
                self._show_log(pod["name"])
                shown = pod["name"]
                continue
            if status is not None:
                return status
            if pod is not None and pod["phase"] == "Running":
                self._say_once(f"the log of {shown} broke off; it goes on from here")
                self._show_log(pod["name"], "--tail=0")
            elif pod is None or pod["phase"] == "Pending":
                self._say_once(f"waiting for the pod of process 0{_why(pod)}")
            time.sleep(POLL_SECONDS)

    def stop(self) -> None:
        """Deletes the job; its processes save and leave first."""
        self._kubectl("delete", "--ignore-not-found", *self.objects)
        say(f"{self.job.form} {self.job.name} is deleted")

    @property
    def objects(self) -> list[str]:
        job = self.job
        policy = [f"networkpolicies.networking.k8s.io/{job.name}"] * job.is_fenced
        return [f"{KINDS[job.form]}/{job.name}", *policy]

    @property
    def words_to_stop(self) -> str:
        return " ".join(["kubectl", "delete", "-n", self.job.namespace, *self.objects])

    def _ended(self) -> int | None:
        found = self._get(f"{KINDS[self.job.form]}/{self.job.name}")
        for condition in found.get("status", {}).get("conditions", []):
            if condition["status"] != "True":
                continue
            words = f"{condition.get('reason', '')}: {condition.get('message', '')}"
            if condition["type"] in ("Completed", "Complete"):
                self._say_once("done")
                return DONE
            if condition["type"] == "Failed":
                self._say_once(f"failed, {words}")
                by_policy = "FailJobSet" in words or "PodFailurePolicy" in words
                return BAD_INPUT if by_policy else GAVE_UP
        return None

    def _first_pod(self) -> dict[str, str] | None:
        """The newest pod of process 0, if there is one."""
        labels = {
            "jobset.sigs.k8s.io/jobset-name": self.job.name,
            SLICE: "0",
            INDEX: "0",
        }
        labels["jobset.sigs.k8s.io/replicatedjob-name"] = self.job.group
        selector = ",".join(f"{name}={value}" for name, value in labels.items())
        pods = self._get("pods", "--selector", selector)["items"]
        if not pods:
            return None
        newest = max(pods, key=lambda pod: pod["metadata"]["creationTimestamp"])
        status = newest.get("status", {})
        messages = [c.get("message", "") for c in status.get("conditions", [])]
        return {
            "name": newest["metadata"]["name"],
            "phase": status.get("phase", "Pending"),
            "why": next((text for text in messages if text), ""),
        }

    def _show_log(self, pod: str, *flags: str) -> None:
        """Until the pod ends, or the stream breaks off."""
        subprocess.run(self._command("logs", "--follow", *flags, f"pod/{pod}"))

    def _get(self, *what: str) -> dict[str, Any]:
        return json.loads(self._kubectl("get", *what, "--output", "json"))

    def _kubectl(self, *words: str, given: str | None = None) -> str:
        command = self._command(*words)
        done = subprocess.run(command, input=given, capture_output=True, text=True)
        if done.returncode:
            said = done.stderr.strip().splitlines() or ["nothing"]
            raise ValueError(
                f"kubectl {words[0]} ended with status {done.returncode}, saying: "
                f"{said[-1]}. Mend that and try again; a job that was started goes on."
            )
        return done.stdout

    def _command(self, *words: str) -> list[str]:
        program = shutil.which("kubectl")
        if program is None:
            raise ValueError(
                "kubectl is not on the PATH, but is needed to reach a cluster. Install "
                "it, or print the manifest (without --apply) and apply it elsewhere."
            )
        return [program, "--namespace", self.job.namespace, *words]

    def _say_once(self, text: str) -> None:
        if text != self._said:
            self._said = text
            say(text)


def _volumes(job: Job) -> tuple[list[dict], list[dict]]:
    """Volumes of the pod, and where its container mounts them."""
    volumes: list[dict] = []
    mounts: list[dict] = []
    if job.devices and job.tpu is None:
        # NCCL passes data between the GPUs of a host through it; the default is 64 MiB.
        volumes.append({"name": "shm", "emptyDir": {"medium": "Memory"}})
        mounts.append({"name": "shm", "mountPath": "/dev/shm"})
    for number, (folder, claim) in enumerate(job.volumes.items()):
        source = {"persistentVolumeClaim": {"claimName": claim}}
        volumes.append({"name": f"claim-{number}", **source})
        mounts.append({"name": f"claim-{number}", "mountPath": folder})
    return volumes, mounts


def _variable(name: str, value: str) -> dict[str, Any]:
    return {"name": name, "value": value}


def _annotation(name: str, key: str) -> dict[str, Any]:
    path = f"metadata.annotations['{key}']"
    return {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}


def _literal(text: str) -> str:
    """Kubernetes would put the value of a variable in the place of $(NAME)."""
    return text.replace("$", "$$")


def _why(pod: dict[str, str] | None) -> str:
    return f": {pod['why']}" if pod and pod["why"] else ""
