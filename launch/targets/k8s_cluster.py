"""Starts, follows and stops a job on a Kubernetes cluster through kubectl."""

import json
import shutil
import subprocess
import time
from typing import Any

from ..exit_codes import BAD_INPUT, DONE, GAVE_UP
from ..logs import say
from ..target import Submitted
from . import k8s_manifest
from .k8s_job import Job
from .k8s_pod import INDEX, SLICE

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
        return k8s_manifest.hosts(self.job)

    def environment(self) -> list[dict[str, Any]]:
        return k8s_manifest.environment(self.job)

    def manifest(self) -> str:
        return k8s_manifest.manifest(self.job)

    def start(self) -> None:
        self._kubectl("apply", "--filename", "-", given=self.manifest())
        say(f"{self.job.form} {self.job.name} is in namespace {self.job.namespace}")

    def follow(self) -> int:
        """Shows what process 0 prints, across restarts; returns the job's exit code."""
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
                self._say_once(f"the log of {shown} broke off; it continues here")
                self._show_log(pod["name"], "--tail=0")
            elif pod is None or pod["phase"] == "Pending":
                self._say_once(f"waiting for the pod of process 0{_why(pod)}")
            time.sleep(POLL_SECONDS)

    def stop(self) -> None:
        """Deletes the job; its processes save and exit first."""
        self._kubectl("delete", "--ignore-not-found", *self.objects)
        say(f"{self.job.form} {self.job.name} is deleted")

    @property
    def objects(self) -> list[str]:
        job = self.job
        policy = [f"networkpolicies.networking.k8s.io/{job.name}"] * job.is_fenced
        return [f"{KINDS[job.form]}/{job.name}", *policy]

    @property
    def stop_command(self) -> str:
        return " ".join(["kubectl", "delete", "-n", self.job.namespace, *self.objects])

    def _ended(self) -> int | None:
        found = self._get(f"{KINDS[self.job.form]}/{self.job.name}")
        for condition in found.get("status", {}).get("conditions", []):
            if condition["status"] != "True":
                continue
            message = f"{condition.get('reason', '')}: {condition.get('message', '')}"
            if condition["type"] in ("Completed", "Complete"):
                self._say_once("done")
                return DONE
            if condition["type"] == "Failed":
                self._say_once(f"failed, {message}")
                by_policy = "FailJobSet" in message or "PodFailurePolicy" in message
                return BAD_INPUT if by_policy else GAVE_UP
        return None

    def _first_pod(self) -> dict[str, str] | None:
        """Returns the newest pod of process 0, if there is one."""
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
        """Shows a pod's log until the pod ends or the stream breaks off."""
        subprocess.run(self._command("logs", "--follow", *flags, f"pod/{pod}"))

    def _get(self, *what: str) -> dict[str, Any]:
        return json.loads(self._kubectl("get", *what, "--output", "json"))

    def _kubectl(self, *args: str, given: str | None = None) -> str:
        command = self._command(*args)
        done = subprocess.run(command, input=given, capture_output=True, text=True)
        if done.returncode:
            said = done.stderr.strip().splitlines() or ["nothing"]
            raise ValueError(
                f"kubectl {args[0]} exited with code {done.returncode}: {said[-1]}. "
                "Fix that and try again; a job that was started keeps running."
            )
        return done.stdout

    def _command(self, *args: str) -> list[str]:
        program = shutil.which("kubectl")
        if program is None:
            raise ValueError(
                "kubectl is not on the PATH, but is required to reach a cluster. "
                "Install it, or print the manifest (without --apply) and apply it "
                "elsewhere."
            )
        return [program, "--namespace", self.job.namespace, *args]

    def _say_once(self, text: str) -> None:
        if text != self._said:
            self._said = text
            say(text)


def _why(pod: dict[str, str] | None) -> str:
    return f": {pod['why']}" if pod and pod["why"] else ""
