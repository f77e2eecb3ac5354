"""`meshloom launch ... --learners`: which commands it makes, and what it refuses."""

import argparse
import os
import shlex
import stat
from pathlib import Path

import pytest
from tiny_runs import refused

from meshloom.launch import fleet_flags, gpus
from meshloom.launch.target import local_host
from meshloom.launch.targets import mpi
from meshloom.trainer import cli
from meshloom.trainer.cli import main
from meshloom.trainer.commands import serve

TRAIN = ["--", "train", "--config", "drill", "--workdir", "runs/x", "--steps", "3"]


@pytest.fixture
def fleet(monkeypatch, tmp_path):
    """What the command would run, in an empty folder."""
    found = {}

    class Fleet:
        def __init__(self, make, run, folder, settings):
            found.update(run=run, folder=folder, settings=settings)
            self._make = make

        def run(self):
            found["commands"] = self._make()
            return 75

    monkeypatch.setattr(fleet_flags, "Fleet", Fleet)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    monkeypatch.delenv(gpus.VARIABLE, raising=False)
    return found


def launch(target: str, *flags: str) -> int:
    return main(["launch", target, *flags, *TRAIN])


def words(command) -> list[str]:
    """The arguments of `meshloom`."""
    argv = list(command.argv)
    return argv[argv.index("meshloom.trainer.cli") + 1 :]


def value(argv: list[str], flag: str) -> str:
    """The value that counts: the last."""
    return argv[len(argv) - argv[::-1].index(flag)]


def learners(fleet) -> list[tuple[list[str], list[str]]]:
    """The flags of launch and the command of train, for each learner."""
    found = []
    for command in fleet["commands"].learners:
        argv = words(command)
        cut = argv.index("--")
        found.append((argv[:cut], argv[cut + 1 :]))
    return found


def test_the_commands_of_a_local_fleet(fleet, tmp_path):
    flags = ["--learners", "3", "--servers", "2", "--processes", "4", "--cpu-devices"]
    flags += ["1", "--grace-seconds", "7", "--max-restarts", "2", "--save-commits", "9"]
    assert launch("local", *flags, "--each", "1 --cpu-devices 2 --mesh fsdp=2") == 75
    run = tmp_path / "runs" / "x"
    assert (fleet["run"], fleet["folder"]) == (run, Path("runs/x/logs"))
    assert fleet["settings"].grace_seconds == 7 and fleet["settings"].processes == 4
    commands = fleet["commands"]
    serve = words(commands.coordinator)
    address, token = value(serve, "--bind"), value(serve, "--token-file")
    assert serve[0] == "serve" and value(serve, "--role") == "coordinator"
    assert address.startswith("127.0.0.1:") and value(serve, "--servers") == "2"
    assert value(serve, "--save-every") == "9" and "--once" not in serve
    assert commands.coordinator.env["JAX_PLATFORMS"] == "cpu"
    assert [server.name for server in commands.servers] == ["server 0", "server 1"]
    for server in map(words, commands.servers):
        assert value(server, "--coordinator") == address
        assert value(server, "--token-file") == token
    for number, (own, train) in enumerate(learners(fleet)):
        assert own[:3] == ["launch", "local", "--processes=4"]
        assert {"--grace-seconds=7.0", "--max-restarts=2"} < set(own)
        assert value(train, "--exchange") == f"{address}/x"
        assert value(train, "--learner") == f"{number}/3"
        assert value(train, "--workdir") == str(run / "learners" / str(number))
        assert f"exchange.token_file={token!r}" in train
        assert value(train, "--cpu-devices") == ("2" if number == 1 else "1")
        assert ("--mesh" in train) == (number == 1)


def test_several_coordinators_have_one_store(fleet):
    store = "etcd://127.0.0.1:2379/x"
    flags = ["--learners", "2", "--coordinators", "2", "--store", store]
    assert launch("local", *flags, "--service-host", "127.0.0.2") == 75
    commands = fleet["commands"]
    both = [words(c) for c in (commands.coordinator, *commands.standbys)]
    addresses = [value(serve, "--bind") for serve in both]
    assert len(set(addresses)) == 2
    assert all(address.startswith("127.0.0.2:") for address in addresses)
    assert {value(s, "--folder") for s in both} == {value(both[0], "--folder")}
    assert [f"--store={store}" in serve for serve in both] == [True, True]
    for server in map(words, commands.servers):
        assert value(server, "--coordinator") == ",".join(addresses)
        assert value(server, "--bind") == "127.0.0.2:0"
    for _, train in learners(fleet):
        assert value(train, "--exchange") == f"{','.join(addresses)}/x"
    parser = argparse.ArgumentParser(allow_abbrev=False)
    serve.add(parser.add_subparsers())
    for command in both:
        serve._check(parser.parse_args(command))


def test_commands_are_understood(fleet):
    assert launch("local", "--learners", "2") == 75
    commands = fleet["commands"]
    assert len(commands.servers) == 1
    parser = cli._parser()
    for command in commands.learners:
        args = parser.parse_args(words(command))
        args = parser.parse_args(args.command)
        assert args.learner in ("0/2", "1/2") and args.steps == 3
    parser = argparse.ArgumentParser(allow_abbrev=False)
    serve.add(parser.add_subparsers())
    for command in (commands.coordinator, *commands.servers):
        serve._check(parser.parse_args(words(command)))


def test_copies_are_a_setting_of_the_learners(fleet):
    assert launch("local", "--learners", "2", "--servers", "2", "--copies", "2") == 75
    for _, command in learners(fleet):
        assert "exchange.copies=2" in command


def test_the_job_of_the_service_is_the_run_folder(fleet, tmp_path):
    launch("local", "--learners", "2")
    launch("local", "--learners", "2")  # also when it continues
    serve = words(fleet["commands"].coordinator)
    home = Path(value(serve, "--folder"))
    assert (home / "x").resolve() == (tmp_path / "runs" / "x").resolve()
    assert home.is_relative_to(tmp_path / "runs" / "x")


def test_only_the_user_can_read_the_token(fleet):
    launch("local", "--learners", "2")
    token = Path(value(words(fleet["commands"].coordinator), "--token-file"))
    before = token.read_text()
    assert stat.S_IMODE(token.stat().st_mode) == 0o600 and len(before.strip()) == 64
    launch("local", "--learners", "2")
    assert token.read_text() != before


def test_several_coordinators_keep_their_log_in_etcd(fleet, tmp_path):
    url = "etcd://10.0.0.9:2379/x"
    assert launch("local", "--learners", "1", "--coordinators", "3", "--store", url)
    commands = fleet["commands"]
    found = [commands.coordinator, *commands.standbys]
    assert [c.name for c in found] == [f"coordinator {n}" for n in range(3)]
    addresses = [value(words(command), "--bind") for command in found]
    assert len({*addresses}) == 3
    for command in found:
        argv = words(command)
        assert argv[0] == "serve" and value(argv, "--role") == "coordinator"
        assert f"--store={url}" in argv
        assert value(argv, "--folder") == str(tmp_path / "runs/x/service/log")
    both = ",".join(addresses)
    assert value(words(commands.servers[0]), "--coordinator") == both
    ((_, train),) = learners(fleet)
    assert value(train, "--exchange") == f"{both}/x"
    launch("local", "--learners", "1", "--store", url)  # for an elected one alone
    assert fleet["commands"].coordinator.name == "coordinator"
    assert not fleet["commands"].standbys


def test_gpus_are_divided_among_the_learners(fleet, monkeypatch):
    monkeypatch.setenv(gpus.VARIABLE, "0,1,2,3")
    launch("local", "--learners", "2")
    found = [command.env[gpus.VARIABLE] for command in fleet["commands"].learners]
    assert found == ["0,1", "2,3"]


def test_hosts_are_divided_among_the_learners(fleet):
    flags = ["--hosts", "a,b,c,d", "--ssh", "true -x", "--service-host", "192.0.2.1"]
    assert launch("ssh", *flags, "--learners", "2", "--processes-per-host", "2") == 75
    assert fleet["settings"].processes == 4
    found = [own for own, _ in learners(fleet)]
    assert [own[:3] for own in found] == [
        ["launch", "ssh", "--hosts=a,b"],
        ["launch", "ssh", "--hosts=c,d"],
    ]
    assert "--ssh=true -x" in found[0] and "--processes-per-host=2" in found[0]
    commands = fleet["commands"]
    for command in (commands.coordinator, *commands.servers):
        assert value(words(command), "--bind").startswith("192.0.2.1:")


def test_slots_are_divided_among_the_learners(fleet, tmp_path, monkeypatch):
    monkeypatch.setattr(mpi, "find_flavour", lambda mpirun: "openmpi")
    (tmp_path / "hosts").write_text("a slots=3\nb slots=1\n")
    flags = ["--hostfile", "hosts", "--service-host", "192.0.2.1", "--learners", "2"]
    assert launch("mpi", *flags) == 75
    files = [own[2].partition("=")[2] for own, _ in learners(fleet)]
    assert [Path(f).read_text() for f in files] == [
        "a slots=2\n",
        "a slots=1\nb slots=1\n",
    ]
    assert launch("mpi", "--processes", "3", "--learners", "2") == 75
    assert "--processes=3" in learners(fleet)[1][0]
    coordinator = words(fleet["commands"].coordinator)
    assert value(coordinator, "--bind").startswith("127.0.0.1:")


def test_nodes_are_divided_among_the_learners(fleet, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n[0-3]")
    flags = ["--learners", "2", "--service-host", "192.0.2.1", "--no-requeue"]
    assert launch("slurm", *flags, "--tasks-per-node", "2") == 75
    found = [own for own, _ in learners(fleet)]
    assert [own[2] for own in found] == ["--nodelist=n0,n1", "--nodelist=n2,n3"]
    assert all("--no-requeue" in own for own in found)  # the fleet requeues, once
    assert fleet["settings"].processes == 4


def test_a_slurm_job_runs_a_fleet_on_its_first_node(fleet, capfd):
    flags = ["--nodes", "4", "--learners", "2", "--servers", "3", "--dry-run"]
    assert launch("slurm", *flags, "--each", "1 --mesh fsdp=2") == 0
    (line,) = [x for x in capfd.readouterr().out.splitlines() if x.startswith("exec ")]
    argv = shlex.split(line)
    assert {"--learners=2", "--servers=3", "--each=1 --mesh fsdp=2"} < set(argv)
    args = cli._parser().parse_args(argv[argv.index("meshloom.trainer.cli") + 1 :])
    assert (args.learners, args.servers, args.each) == (2, 3, ["1 --mesh fsdp=2"])


@pytest.mark.parametrize(
    "argv, message",
    [
        ("local -- train", "--processes is required without --learners"),
        ("local --processes 1 --servers 2 -- train", "--servers needs --learners"),
        ("local --coordinators 2 -- train", "--coordinators needs --learners"),
        ("local --learners 1 --coordinators 0 -- train", "--coordinators must be >= 1"),
        (
            "local --learners 1 --coordinators 2 -- train",
            "--coordinators 2 without --store: several coordinators keep their log in",
        ),
        ("local --processes 1 --each 0 -- train", "--each needs --learners"),
        ("local --processes 1 --copies 2 -- train", "--copies needs --learners"),
        (
            "local --learners 2 --copies 2 -- train --set exchange.copies=1",
            "exchange.copies=1: --copies sets it too; remove one of them",
        ),
        ("local --learners 0 -- train", "--learners must be >= 1, got 0"),
        ("local --learners 2 --servers 0 -- train", "--servers must be >= 1, got 0"),
        ("local --processes 1 --store x -- train", "--store needs --learners"),
        (
            "local --learners 2 --coordinators 2 -- train",
            "keep their log in etcd; add --store etcd://HOST:PORT",
        ),
        ("local --learners 2 -- report x", "the command is 'report'; expected train"),
        (
            "local --learners 2 -- train --learner=0/2",
            "--learner is set for each learner by --learners; remove it",
        ),
        ("local --learners 2 --each 2 -- train", "number of a learner from 0 to 1"),
        ("local --learners 2 --each '' -- train", "number of a learner from 0 to 1"),
        ("local --learners 2 --each 1 -- train", "and flags of train, such as"),
        (
            "local --learners 2 -- train --workdir gs://b/x",
            "the run folder gs://b/x is not on this machine",
        ),
        (
            "local --learners 2 --logs here -- train --workdir gs://b/x",
            "but the service writes there. Name a folder of this machine",
        ),
        (
            "local --learners 2 --grace-seconds 0 -- train",
            "--grace-seconds must be more than 0",
        ),
        (
            "ssh --ssh true --hosts a,b,c --learners 2 -- train",
            "3 hosts cannot be divided evenly among 2 learners. Change --learners",
        ),
        (
            "ssh --ssh true --hosts a,b --service-host 127.0.0.1 --learners 2 -- train",
            "host 127.0.0.1 is 127.0.0.1 here: other hosts cannot reach the service",
        ),
        ("slurm --nodes 2 --nodelist n0 -- train", "--nodelist is for inside an"),
    ],
)
def test_bad_input_is_refused_before_anything_is_written(
    argv, message, fleet, capfd, tmp_path
):
    assert message in refused(capfd, ["launch", *shlex.split(argv)])
    assert list(tmp_path.iterdir()) == []


def test_nodes_outside_the_job_are_refused(fleet, capfd, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n[0-1]")
    found = refused(capfd, ["launch", "slurm", "--nodelist", "n2", "--", "train"])
    assert found == (
        "--nodelist has n2, which is not a node of job 7; expected some of n0,n1"
    )


def test_a_fleet_on_this_host_alone_stays_on_loopback(fleet):
    flags = ["--hosts", local_host(), "--ssh", "true", "--learners", "1"]
    assert launch("ssh", *flags) == 75
    coordinator = words(fleet["commands"].coordinator)
    assert value(coordinator, "--bind").startswith("127.0.0.1:")
    assert os.environ.get(gpus.VARIABLE) is None
