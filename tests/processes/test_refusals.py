"""What a user can get wrong about learners and a service: one line, and status 2."""

import contextlib
import json
import re
import subprocess
from importlib import metadata
from pathlib import Path

import pytest
from launched import ending, wait_until
from services import LIMIT, Service
from test_jobs import ends
from tiny_runs import COMMAND, command, refused

from meshloom.service.wire.calls import Channel

pytestmark = [pytest.mark.fleets, pytest.mark.timeout(400)]
SECONDS = 240
DRILL = ["train", "--config", "drill", "--steps", "4"]


def as_learner(address: str, who: str, folder: Path, token: Path) -> list[str]:
    where = ["--exchange", f"{address}/run", "--workdir", str(folder)]
    secret = ["--set", f"exchange.token_file={str(token)!r}"]
    return [*DRILL, "--learner", who, *where, *secret]


@pytest.fixture(scope="module")
def training(tmp_path_factory):
    """A service with a token, whose job has its first of two learners."""
    folder = tmp_path_factory.mktemp("training")
    (token := folder / "token").write_text("a secret\n")
    with contextlib.ExitStack() as stack:
        service = stack.enter_context(contextlib.closing(Service(folder)))
        service.start("--token-file", str(token))
        argv = as_learner(service.address(), "0/2", folder / "0", token)
        with open(folder / "learner", "wb") as output:
            first = subprocess.Popen(
                [COMMAND, *argv, "--cpu-devices", "1"],
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        stack.enter_context(ending(first))

        def has_joined() -> bool:
            return status(service, token).get("learners") == 1

        wait_until(has_joined, first, folder / "learner", SECONDS)
        yield service, token
        assert first.poll() is None  # nothing that follows has disturbed it


def status(service: Service, token: Path) -> dict:
    channel = Channel(service.address(), token=token.read_text().strip())
    with contextlib.closing(channel):
        jobs = channel.call("Status", {}, 10)["jobs"]
    return jobs.get("run", {"state": "no initial parameters"})


BAD_LEARNERS = {
    "another model": (
        "1/2",
        ["--set", "transformer.Config.d_ff=32"],
        r"another model: blocks/mlp/.* is float32\[4, 32, 32\] at this learner, flo",
    ),
    "another policy": (
        "1/2",
        ["--set", 'exchange.mode="backup-workers"'],
        "another policy: policy.quorum is 0.75 at this learner, 1.0 in the job. Use",
    ),
    "other samples": (
        "1/2",
        ["--set", "seed=5"],
        "another data: data.seed is 5 at this learner, 0 in the job. Use the same",
    ),
    "another config": (
        "1/2",
        ["--set", "optimizers.AdamW.b1=0.8"],
        "another update: update.optimizer.* is 0.8 at this learner, 0.9 in the job",
    ),
    "another number": (
        "1/4",
        ["--mesh", "data=2,tensor=4"],
        "another num_learners: num_learners is 4 at this",
    ),
    "data of another": (
        "0/2",
        [],
        r"learner 0 is already running \(incarnation 1\). Use another index; or, if",
    ),
    "quorum": (
        "1/2",
        ["--set", 'exchange.mode="backup-workers"', "--set", "exchange.quorum=3"],
        "quorum=3 is larger than the number of learners, 2; lower it, or give",
    ),
    "not an index": ("2/2", [], "learner 2 is not one of 2"),
    "not a share": ("1", [], "--learner '1': expected I/N, such as 0/4"),
}


@pytest.mark.parametrize("bad", BAD_LEARNERS)
def test_a_learner_that_does_not_fit_is_told_why(training, tmp_path, capfd, bad):
    service, token = training
    who, more, message = BAD_LEARNERS[bad]
    argv = as_learner(service.address(), who, tmp_path / "run", token)
    found = refused(capfd, [*argv, *more])
    assert re.search(message, found), found
    assert status(service, token)["learners"] == 1


def test_a_learner_of_another_version_is_told_both(
    training, tmp_path, capfd, monkeypatch
):
    service, token = training
    ours = metadata.version
    monkeypatch.setattr(
        metadata, "version", lambda x: "9" if x == "meshloom" else ours(x)
    )
    argv = as_learner(service.address(), "1/2", tmp_path / "run", token)
    found = refused(capfd, argv)
    assert f"the learner runs meshloom 9, the service {ours('meshloom')}" in found


@pytest.mark.parametrize("secret", ["wrong", "", None])
def test_a_learner_without_the_token_is_refused(training, tmp_path, capfd, secret):
    service, _ = training
    wrong = tmp_path / "wrong"
    if secret is not None:
        wrong.write_text(secret)
    found = refused(
        capfd, as_learner(service.address(), "1/2", tmp_path / "run", wrong)
    )
    expected = {
        "wrong": "wrong or missing token; give the token that its processes",
        "": "the token must be printable ASCII, and must not be empty",
        None: f"{wrong}: No such file or directory",
    }
    assert expected[secret] in found


def test_servers_that_do_not_fit_are_told_why(training, tmp_path):
    service, token = training
    server = ["serve", "--role", "server", "--coordinator", service.address()]
    server += ["--folder", str(tmp_path / "server")]
    # Another version of meshloom, as far as others can tell.
    (tmp_path / "sitecustomize.py").write_text(
        "from importlib import metadata\n"
        "ours = metadata.version\n"
        "metadata.version = lambda name: '9' if name == 'meshloom' else ours(name)\n"
    )
    path = {"PYTHONPATH": str(tmp_path)}
    for flags, env, message in (
        ([], {}, "wrong or missing token; give the token that its processes were"),
        (["--token-file", str(token)], path, "runs meshloom 9, the coordinator"),
    ):
        done = command(*server, *flags, timeout=LIMIT, env=env)
        assert done.returncode == 2, done.stdout + done.stderr
        assert message in done.stderr and len(done.stderr.splitlines()) == 1


def test_a_real_process_ends_at_once_and_leaves_nothing(training, tmp_path):
    service, token = training
    argv = as_learner(service.address(), "0/2", tmp_path / "run", token)
    done = command(*argv, "--cpu-devices", "1", timeout=LIMIT)
    assert done.returncode == 2, done.stdout + done.stderr
    assert "learner 0 is already running" in done.stderr
    assert len(done.stderr.splitlines()) == 1, done.stderr


def test_a_fleet_with_a_setting_that_cannot_work_ends_as_a_whole(tmp_path):
    flags = ["--learners", "2", "--servers", "1", "--cpu-devices", "1"]
    train = [*DRILL, "--set", 'exchange.mode="backup-workers"']
    train += ["--set", "exchange.quorum=3", "--workdir", str(tmp_path / "run")]
    done = command("launch", "local", *flags, "--", *train, timeout=SECONDS)
    assert done.returncode == 2, done.stdout + done.stderr
    said = [x for x in done.stderr.splitlines() if "quorum=3 is larger" in x]
    assert said and "Traceback" not in done.stderr
    pids = [
        int(pid)
        for file in tmp_path.glob("run/**/supervisor.jsonl")
        for line in file.read_text().splitlines()
        for pid in json.loads(line).get("pids", [])
    ]
    assert pids and all(ends(pid) for pid in pids)
