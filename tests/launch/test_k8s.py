"""`meshloom launch k8s`: manifests, held against what others have published.

No cluster is here. Objects of Kubernetes itself are checked with kubernetes-validate,
JobSets and TrainJobs with the models that Kubeflow has published for Python: a field
that they do not know is lost on the way through them.
"""

import copy
import re

import kubernetes_validate
import pytest
import yaml
from kubeflow_trainer_api import models
from paths import GOLDEN, ROOT
from test_docs import blocks
from tiny_runs import refused

from meshloom.trainer.cli import main

KUBERNETES = "1.37.0"
MODELS = {
    "JobSet": models.JobsetV1alpha2JobSet,
    "TrainJob": models.TrainerV1alpha1TrainJob,
}
ARGV = ["launch", "k8s", "--name", "gpt2", "--image", "example.org/meshloom:1"]
TRAIN = ["--", "train", "--config", "gpt2_124m", "--workdir", "/runs/gpt2"]
TPU = ["--tpu-accelerator", "tpu-v5-lite-podslice", "--tpu-topology", "4x4"]
KEPT = ["--volume", "runs:/runs", "--secret-env", "WANDB_API_KEY=wandb:key"]
GPUS = ["--hosts", "2", "--gpus", "8", *KEPT, "--env", "NCCL_DEBUG=INFO"]
JOBS = {
    "tpu-v5e-4x4": [*TPU, *KEPT, "--queue", "research"],
    "gpu-2x8": [*GPUS, "--request", "cpu=96", "--request", "memory=1Ti"],
    "trainjob-2x8": [*GPUS, "--form", "trainjob"],
}
MORE = {
    "two-slices": [*TPU, "--slices", "2", "--max-restarts", "50"],
    "cpu": ["--hosts", "3", "--request", "cpu=2", "--no-network-policy"],
    "trainjob-tpu": [*TPU, "--form", "trainjob", "--queue", "research"],
}


@pytest.fixture
def manifest(capsys):
    def build(*flags: str) -> str:
        assert main([*ARGV, *flags, *TRAIN]) == 0
        return capsys.readouterr().out

    return build


def check(document: dict) -> None:
    """Raises if the published form of an object has another, or no such, field."""
    model = MODELS.get(document["kind"])
    if model is None:
        kubernetes_validate.validate(document, KUBERNETES, strict=True)
        return
    assert model.from_dict(document).to_dict() == document
    if document["kind"] == "JobSet":
        for replicated in document["spec"]["replicatedJobs"]:
            job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "x"}}
            check({**job, **replicated["template"]})


def only(text: str, kind: str) -> dict:
    (found,) = [d for d in yaml.safe_load_all(text) if d["kind"] == kind]
    return found


def pod_of(jobset: dict) -> dict:
    return jobset["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]


def variables(pod: dict) -> dict:
    (container,) = pod["containers"]
    return {v["name"]: v.get("value", v.get("valueFrom")) for v in container["env"]}


# What is written.


@pytest.mark.parametrize("name", JOBS)
def test_golden(name, manifest):
    path = GOLDEN / f"{name}.yaml"
    assert manifest(*JOBS[name]) == path.read_text(), (
        f"if the change is meant: meshloom {' '.join([*ARGV, *JOBS[name], *TRAIN])} > "
        f"{path.relative_to(ROOT)}"
    )


@pytest.mark.parametrize("name", [*JOBS, *MORE])
def test_manifests_have_the_published_form(name, manifest):
    for document in yaml.safe_load_all(manifest(*{**JOBS, **MORE}[name])):
        check(document)


@pytest.mark.parametrize("where", ["spec", "rule", "job", "pod", "container"])
def test_the_check_finds_an_unknown_field(where, manifest):
    document = only(manifest(*JOBS["gpu-2x8"]), "JobSet")
    check(copy.deepcopy(document))
    job = document["spec"]["replicatedJobs"][0]["template"]["spec"]
    place = {
        "spec": document["spec"],
        "rule": document["spec"]["failurePolicy"]["rules"][0],
        "job": job,
        "pod": job["template"]["spec"],
        "container": job["template"]["spec"]["containers"][0],
    }[where]
    place["misspelled"] = 1
    with pytest.raises((AssertionError, kubernetes_validate.ValidationError)):
        check(document)


@pytest.mark.parametrize(
    "name, kind, path, value",
    [
        ("gpu-2x8", "JobSet", "spec.failurePolicy.maxRestarts", "five"),
        ("gpu-2x8", "JobSet", "spec.network.subdomain", 3),
        ("trainjob-2x8", "TrainJob", "spec.trainer.numNodes", "two"),
        ("trainjob-2x8", "TrainJob", "spec.trainer.nodes", 2),
        ("trainjob-2x8", "NetworkPolicy", "spec.policyTypes", "Ingress"),
    ],
)
def test_the_check_finds_a_wrong_value(name, kind, path, value, manifest):
    document = only(manifest(*JOBS[name]), kind)
    *parents, last = path.split(".")
    place = document
    for parent in parents:
        place = place[parent]
    place[last] = value
    wrong = (AssertionError, ValueError, kubernetes_validate.ValidationError)
    with pytest.raises(wrong):
        check(document)


def test_actions_of_the_failure_policy_are_published_ones(manifest):
    policy = only(manifest(*TPU), "JobSet")["spec"]["failurePolicy"]
    (rule,) = policy["rules"]
    field = models.JobsetV1alpha2FailurePolicyRule.model_fields["action"]
    assert rule["action"] in re.findall(r"\w+", str(field.description))


def test_each_process_learns_its_place(manifest):
    pod = pod_of(only(manifest(*TPU), "JobSet"))
    found = variables(pod)
    assert found["MESHLOOM_COORDINATOR"] == "gpt2-worker-0-0.gpt2:8476"
    assert found["MESHLOOM_NUM_PROCESSES"] == "4"
    hosts = found["MESHLOOM_HOSTS"].split(",")
    assert hosts == [f"gpt2-worker-0-{n}.gpt2" for n in range(4)]
    index = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
    assert found["MESHLOOM_PROCESS_ID"] == {"fieldRef": {"fieldPath": index}}
    assert pod["containers"][0]["resources"]["limits"] == {"google.com/tpu": 4}


def test_of_several_slices_a_process_has_the_parts_of_its_number(manifest):
    jobset = only(manifest(*MORE["two-slices"]), "JobSet")
    found = variables(pod_of(jobset))
    assert jobset["spec"]["replicatedJobs"][0]["replicas"] == 2
    assert "MESHLOOM_PROCESS_ID" not in found
    assert found["MESHLOOM_NUM_PROCESSES"] == "8"
    assert found["MESHLOOM_PROCESSES_PER_JOB"] == "4"
    slice_of = "metadata.annotations['jobset.sigs.k8s.io/job-index']"
    assert found["MESHLOOM_JOB_INDEX"] == {"fieldRef": {"fieldPath": slice_of}}
    # Process 5 is the second host of the second slice.
    assert found["MESHLOOM_HOSTS"].split(",")[5] == "gpt2-worker-1-1.gpt2"


def test_what_a_person_gives_stays_one_value(manifest, capsys):
    odd = "a: b #c\n- \"d\" $(HOME) $x 'é' \U0001f600 \x85\u2028 ${name} {}"
    argv = [*ARGV, "--hosts", "1", "--env", f"ODD={odd}", "--", "train", odd]
    assert main(argv) == 0
    pod = pod_of(only(capsys.readouterr().out, "JobSet"))
    # Kubernetes reads $$ as $, and would replace $(HOME).
    assert variables(pod)["ODD"] == odd.replace("$", "$$")
    assert pod["containers"][0]["args"] == ["train", odd.replace("$", "$$")]


# What YAML 1.1 or 1.2 reads as a number, a boolean, a date or null, and PyYAML alone
# does not quote all of it.
@pytest.mark.parametrize("value", ["1e3", "0o17", "y", "On", "~", "2026-01-01", "1:30"])
def test_a_text_that_looks_like_something_else_is_quoted(value, manifest):
    text = manifest("--hosts", "1", "--env", f"VALUE={value}")
    assert f'value: "{value}"\n' in text


def test_nothing_is_written_as_a_reference_to_another_place(manifest):
    # Requests and limits are one object; most readers do not know YAML's anchors.
    assert not re.search(r"[&*]id\d", manifest(*JOBS["gpu-2x8"]))


def test_the_policy_of_the_page_is_the_one_that_is_written(manifest):
    (shown,) = blocks("docs/kubernetes.md", "yaml")
    document = yaml.safe_load(shown)
    check(document)
    written = only(manifest(*TPU), "NetworkPolicy")
    assert written["spec"] == document["spec"]


# What is refused.


@pytest.mark.parametrize(
    "flags, said",
    [
        (["--hosts", "2", "--env", "HF_TOKEN=s3cret"], "--secret-env HF_TOKEN=SECRET"),
        (["--hosts", "2", "--env", "X=https://me:s3cret@h"], "looks like a secret"),
        (["--hosts", "2", "--secret-env", "HF_TOKEN=s3cret"], "expected HF_TOKEN=SECR"),
        (["--hosts", "2", "--env", "MESHLOOM_HOSTS=a"], "is set by the launcher"),
        (["--hosts", "2", "--env", "s3cret"], "without =; expected NAME=VALUE"),
        (["--hosts", "2", "--env", "1A=b"], "'1A' is not a variable name"),
        (["--hosts", "2", "--env", "A=1", "--env", "A=2"], "gives A twice"),
        (["--hosts", "2", "--volume", "runs:there"], "mounts at 'there'"),
        (["--hosts", "2", "--slices", "2"], "only TPUs come in slices"),
        (["--hosts", "0"], "--hosts must be at least 1, got 0"),
        (["--hosts", "2", "--port", "70000"], "at most 65535, got 70000"),
        (["--hosts", "2", "--name", "GPT_2"], "--name is 'GPT_2'; expected lowercase"),
        (["--hosts", "2", "--name", "a" * 60], "Shorten it by"),
        (["--hosts", "2", "--detach"], "--detach needs --apply"),
        ([], "--hosts is required"),
        (["--tpu-topology", "4x4"], "go together"),
        ([*TPU, "--gpus", "8"], "cannot be combined"),
        ([*TPU, "--hosts", "3"], "has 16 chips, but 3 host(s) with 4 chips have 12"),
        ([*TPU, "--tpu-topology", "4"], "--tpu-topology is '4'; expected two or three"),
        ([*TPU, "--slices", "2", "--form", "trainjob"], "has one group of hosts"),
        (
            ["--hosts", "2", "--form", "trainjob", "--max-restarts", "3"],
            "failure policy of its runtime jax-distributed",
        ),
    ],
)
def test_refused(flags, said, capfd):
    found = refused(capfd, [*ARGV, *flags, *TRAIN])
    assert said in found and "s3cret" not in found


def test_a_secret_in_the_command_is_refused(capfd):
    argv = [*ARGV, "--hosts", "2", "--", "train", "--set", "service.api_key=s3cret"]
    found = refused(capfd, argv)
    assert "service.api_key=***" in found and "s3cret" not in found


def test_a_command_may_name_tokens_and_keys(capfd):
    text = ["train", "--set", "data.text_key='body'", "--set", "data.eos_token='</s>'"]
    assert main([*ARGV, "--hosts", "2", *KEPT, "--", *text]) == 0
    assert "data.text_key='body'" in capfd.readouterr().out


def test_a_job_needs_an_image_and_a_command(capfd):
    assert "--image and a COMMAND" in refused(capfd, [*ARGV, "--hosts", "2"])
