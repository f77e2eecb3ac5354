"""`meshloom launch k8s --learners`: a JobSet of coordinator, servers and learners."""

import argparse
import copy
import re
import subprocess
from pathlib import Path

import kubernetes_validate
import pytest
import yaml
from kubeflow_trainer_api import models
from test_k8s import ARGV, KEPT, TPU, TRAIN, check, only, variables
from tiny_runs import refused

from meshloom.launch import process_env
from meshloom.trainer import cli
from meshloom.trainer.cli import main
from meshloom.trainer.commands import serve

TOKEN = ["--token-secret", "gpt2-token:token"]
FLEET = ["--learners", "4", "--servers", "2", *TOKEN, *KEPT]
FLEETS = {
    "cpu": ["--hosts", "1", *FLEET],
    "gpu": ["--hosts", "2", "--gpus", "8", "--request", "cpu=96", *FLEET],
    "tpu": [*TPU, "--queue", "research", "--save-commits", "9", *FLEET],
}


@pytest.fixture
def jobset(capsys):
    def build(*flags: str) -> dict:
        assert main([*ARGV, *flags, *TRAIN]) == 0
        return only(capsys.readouterr().out, "JobSet")

    return build


def roles(jobset: dict) -> dict[str, dict]:
    return {job["name"]: job for job in jobset["spec"]["replicatedJobs"]}


def pod(role: dict) -> dict:
    return role["template"]["spec"]["template"]["spec"]


def filled(role: dict, **fields: str) -> tuple[list[str], dict[str, str]]:
    """The command line and variables of a pod, as Kubernetes fills them in."""
    env: dict[str, str] = {}

    def expand(text: str) -> str:
        found = re.sub(r"(?<!\$)\$\((\w+)\)", lambda m: env[m[1]], text)
        return found.replace("$$", "$")

    for name, value in variables(pod(role)).items():
        if isinstance(value, dict) and "fieldRef" not in value:
            continue  # of a Secret
        is_field = isinstance(value, dict)
        env[name] = fields[name] if is_field else expand(value)
    (container,) = pod(role)["containers"]
    return [expand(word) for word in container["command"] + container["args"]], env


@pytest.mark.parametrize("name", FLEETS)
def test_manifests_have_the_published_form(name, capsys):
    assert main([*ARGV, *FLEETS[name], *TRAIN]) == 0
    documents = list(yaml.safe_load_all(capsys.readouterr().out))
    assert [d["kind"] for d in documents] == ["NetworkPolicy", "JobSet"]
    for document in documents:
        check(document)


@pytest.mark.parametrize("where", ["after", "rule", "secret"])
def test_the_check_finds_an_unknown_field(where, jobset):
    document = jobset(*FLEETS["gpu"])
    check(copy.deepcopy(document))
    learner = roles(document)["learner"]
    place = {
        "after": learner["dependsOn"][0],
        "rule": document["spec"]["failurePolicy"]["rules"][1],
        "secret": pod(learner)["volumes"][-1]["secret"],
    }[where]
    place["misspelled"] = 1
    with pytest.raises((AssertionError, kubernetes_validate.ValidationError)):
        check(document)


def test_roles_and_what_ends_and_restarts_them(jobset):
    document = jobset(*FLEETS["gpu"])
    found = roles(document)
    assert list(found) == ["coordinator", "server", "learner"]
    sizes = [
        (r["replicas"], r["template"]["spec"]["completions"]) for r in found.values()
    ]
    assert sizes == [(1, 1), (1, 2), (4, 2)]
    assert found["server"]["dependsOn"] == [{"name": "coordinator", "status": "Ready"}]
    assert found["learner"]["dependsOn"] == [{"name": "server", "status": "Ready"}]
    spec = document["spec"]
    assert spec["successPolicy"]["targetReplicatedJobs"] == ["learner"]
    bad_input, learner = spec["failurePolicy"]["rules"]
    assert (
        bad_input["action"] == "FailJobSet" and "targetReplicatedJobs" not in bad_input
    )
    assert learner["action"] == "RestartJob"
    assert learner["targetReplicatedJobs"] == ["learner"]
    field = models.JobsetV1alpha2FailurePolicyRule.model_fields["action"]
    published = re.findall(r"\w+", str(field.description))
    assert {bad_input["action"], learner["action"]} < set(published)


def test_a_learner_on_one_host_needs_no_feature_gate(jobset):
    document = jobset(*FLEETS["cpu"], "--max-restarts", "7")
    limits = {
        name: role["template"]["spec"]["backoffLimit"]
        for name, role in roles(document).items()
    }
    assert limits == {"coordinator": 0, "server": 0, "learner": 7}
    actions = [rule["action"] for rule in document["spec"]["failurePolicy"]["rules"]]
    assert actions == ["FailJobSet", "FailJobSet"]  # once it has used up its restarts


@pytest.mark.parametrize("name", ["gpu", "tpu"])
def test_only_learners_get_devices(name, jobset):
    found = roles(jobset(*FLEETS[name]))
    device = {"gpu": "nvidia.com/gpu", "tpu": "google.com/tpu"}[name]
    for role in ("coordinator", "server"):
        assert "resources" not in pod(found[role])["containers"][0]
        assert not {"nodeSelector", "tolerations"} & pod(found[role]).keys()
        assert variables(pod(found[role]))["JAX_PLATFORMS"] == "cpu"
    (container,) = pod(found["learner"])["containers"]
    assert device in container["resources"]["limits"]
    exclusive = found["learner"]["template"].get("metadata", {}).get("annotations", {})
    assert bool(exclusive) == (name == "tpu")


def test_each_learner_learns_its_place(jobset):
    role = roles(jobset(*FLEETS["gpu"]))["learner"]
    fields = {"MESHLOOM_LEARNER": "3", "MESHLOOM_PROCESS_ID": "1"}
    argv, env = filled(role, **fields)
    found = process_env.find(env)
    assert found is not None
    assert (found.process_id, found.num_processes) == (1, 2)
    assert found.coordinator == "gpt2-learner-3-0.gpt2:8476"
    assert found.hosts == ("gpt2-learner-3-0.gpt2", "gpt2-learner-3-1.gpt2")
    args = cli._parser().parse_args(argv[1:])
    assert (argv[0], args.learner) == ("meshloom", "3/4")
    assert args.workdir == Path("/runs/gpt2/learners/3")
    assert args.exchange == "gpt2-coordinator-0-0.gpt2:8477/gpt2"
    (token,) = [text for text in args.set if "token_file" in text]
    assert token == "exchange.token_file='/var/run/meshloom/token'"


def test_the_service_is_at_the_address_of_its_pod(jobset):
    found = roles(jobset(*FLEETS["tpu"]))
    parser = argparse.ArgumentParser(allow_abbrev=False)
    serve.add(parser.add_subparsers())
    argv, _ = filled(found["server"], POD_IP="10.0.0.7")
    server = parser.parse_args(argv[1:])
    serve._check(server)
    assert server.bind == "10.0.0.7:0"
    assert server.coordinator == "gpt2-coordinator-0-0.gpt2:8477"
    argv, _ = filled(found["coordinator"], POD_IP="10.0.0.8")
    coordinator = parser.parse_args(argv[argv.index("serve") :])
    serve._check(coordinator)
    assert (coordinator.bind, coordinator.servers) == ("10.0.0.8:8477", 2)
    assert coordinator.save_every == 9
    for role in found.values():
        mounts = pod(role)["containers"][0]["volumeMounts"]
        assert {m["mountPath"] for m in mounts} >= {"/runs", "/var/run/meshloom"}


def test_the_job_of_the_service_is_the_run_folder(tmp_path, capsys):
    """The shell of the coordinator's pod, run here with another `meshloom`."""
    run = tmp_path / "it's $HOME x"
    argv = [*ARGV, *FLEETS["cpu"], "--", "train", "--workdir", str(run)]
    assert main(argv) == 0
    role = roles(only(capsys.readouterr().out, "JobSet"))["coordinator"]
    words, _ = filled(role, POD_IP="10.0.0.8")
    fake = tmp_path / "bin" / "meshloom"
    fake.parent.mkdir()
    fake.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    fake.chmod(0o755)
    for _ in range(2):  # also after a restart
        path = f"{fake.parent}:/usr/bin:/bin"
        done = subprocess.run(
            words, env={"PATH": path}, capture_output=True, text=True, check=True
        )
    given = done.stdout.splitlines()
    assert given == words[words.index("serve") :]
    home = Path(given[given.index("--folder") + 1])
    assert home.is_relative_to(run) and (home / run.name).resolve() == run.resolve()
    assert list(home.iterdir()) == [home / run.name]


@pytest.mark.parametrize(
    "flags, message",
    [
        (["--hosts", "1", "--learners", "2"], "--learners needs --token-secret"),
        (["--hosts", "1", *TOKEN], "--token-secret needs --learners"),
        (["--hosts", "1", "--servers", "2"], "--servers needs --learners"),
        (["--hosts", "1", *FLEET, "--token-secret", "x"], "expected SECRET:KEY"),
        (["--hosts", "1", *FLEET, "--servers", "0"], "--servers must be >= 1, got 0"),
        ([*TPU, *FLEET, "--slices", "2"], "--slices cannot be combined with"),
        (["--hosts", "1", *FLEET, "--form", "trainjob"], "--form trainjob cannot be"),
        (["--hosts", "1", *FLEET, "--name", "a" * 45], "Shorten it by 4"),
        (["--hosts", "1", *FLEET, "--env", "POD_IP=1"], "is set by the launcher"),
    ],
)
def test_refused(flags, message, capfd):
    assert message in refused(capfd, [*ARGV, *flags, *TRAIN])


def test_the_run_folder_must_be_one_that_all_pods_see(capfd):
    argv = [*ARGV, *FLEETS["cpu"], "--", "train", "--workdir", "runs/x"]
    assert "the run folder is 'runs/x', but learners and" in refused(capfd, argv)
    argv = [*ARGV, *FLEETS["cpu"], "--", "report", "x"]
    assert "the command is 'report'; expected train" in refused(capfd, argv)
