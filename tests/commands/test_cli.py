"""Tests of the command line: flags, startup time, and `config` and `explain`."""

import argparse
import json
import re
import subprocess
import sys

import pytest
from tiny_runs import COMMAND, TINY, command

from meshloom.trainer import cli
from meshloom.trainer.cli import main
from meshloom.trainer.commands import report

# Adding a flag is a decision: most settings belong in the config (--set).
CONFIG_FLAGS = {"--config", "--set", "--mesh"}
SUPERVISED = {"--cpu-devices", "--max-restarts", "--stall-seconds", "--start-seconds"}
SUPERVISED |= {"--grace-seconds", "--logs", "COMMAND"}
FLEET = {"--learners", "--servers", "--copies", "--each", "--save-commits"}
CLUSTER = {"--learners", "--slow", "--step-seconds", "--params", "--link", "--jitter"}
CLUSTER |= {"--latency", "--mtbf", "--restart", "--seed", "--policy", "--svg", "--json"}
FLAGS = {
    "train": CONFIG_FLAGS
    | {"--workdir", "--steps", "--cpu-devices", "--dry-run", "--insist"}
    | {"--exchange", "--learner", "--follow"},
    "tune": CONFIG_FLAGS
    | {"--space", "--trials", "--parallel", "--workdir", "--steps", "--metric"}
    | {"--maximize", "--sampler", "--pruner", "--seed", "--cpu-devices", "--launch"}
    | {"--storage"},
    "explain": CONFIG_FLAGS | {"--json", "--against"},
    "config show": CONFIG_FLAGS,
    "config diff": {"A", "B"},
    "data build": {"--input", "--output", "--tokenizer", "--shard-size"},
    "plan schedule": {"--stages", "--microbatches", "--schedule", "--chunks"}
    | {"--remat", "--activation", "--residual", "--layers", "--weights", "--fsdp"}
    | {"--svg", "--json"},
    "generate": {"RUN", "--prompt", "--tokens", "--temperature", "--top-k"}
    | {"--seed", "--step", "--mesh"},
    "test": {"RUN", "--split", "--step", "--mesh", "--set", "--no-overlap-check"}
    | {"--output"},
    "predict": {"RUN", "--input", "--split", "--step", "--mesh", "--set"}
    | {"--output", "--batch-size"},
    "report": {"RUN", "--output"},
    "ckpt ls": {"RUN"},
    "ckpt inspect": {"RUN", "--step"},
    "ckpt verify": {"RUN", "--step"},
    "ckpt diff": {"RUN", "OTHER", "--step", "--other-step"},
    "ckpt export": {"RUN", "--step", "--output", "--all"},
    "import hf": {"PATH", "--output", "--dtype", "--mesh"},
    "export hf": {"RUN", "--output", "--step", "--family", "--dtype", "--tokenizer"}
    | {"--file-mib", "--base"},
    "ledger audit": {"RUN"},
    "drill": {"--learners", "--servers", "--copies", "--limit-seconds"}
    | {"--config", "--set", "--mesh", "--faults", "--list", "--processes"}
    | {"--cpu-devices", "--steps", "--save-every", "--soak", "--seed", "--every"}
    | {"--workdir"},
    "certify": {"--config", "--set", "--meshes", "--run", "--steps", "--save-at"}
    | {"--drift", "--run-seconds", "--workdir", "--json"},
    "scale": {"--config", "--set", "--meshes", "--processes", "--weak", "--rounds"}
    | {"--steps", "--straggler", "--drift", "--workdir"},
    "doctor": {"--config", "--set", "--workdir", "--address", "--interface", "--port"}
    | {"--seconds", "--json"},
    "rounds simulate": CLUSTER | {"--mode", "--rounds"},
    "rounds compare": CLUSTER | {"--modes", "--config", "--set", "--steps"},
    "rounds replay": {"RUN", "--cpu-devices"},
    "serve status": {"ADDRESS[/JOB]", "--watch", "--json", "--token-file", "--tls-ca"}
    | {"--tls-cert", "--tls-key"},
    "serve clean": {"ADDRESS[/JOB]", "--dry-run", "--token-file", "--tls-ca"}
    | {"--tls-cert", "--tls-key"},
    "serve": {"--bind", "--folder", "--role", "--coordinator", "--servers", "--once"}
    | {"--save-every", "--token-file", "--tls-ca", "--tls-cert", "--tls-key"}
    | {"--store", "--metrics", "--upstream", "ACTION"},
    "launch local": SUPERVISED
    | FLEET
    | {"--coordinators", "--store", "--service-host"}
    | {"--processes", "--min-processes", "--cold"},
    "launch mpi": SUPERVISED
    | FLEET
    | {"--service-host"}
    | {"--processes", "--hostfile", "--mpirun", "--mpi-option", "--env"},
    "launch ssh": SUPERVISED
    | FLEET
    | {"--service-host"}
    | {"--hosts", "--processes-per-host", "--ssh", "--silence-seconds", "--env"},
    "launch slurm": SUPERVISED
    | FLEET
    | {"--service-host", "--nodelist"}
    | {"--nodes", "--time", "--partition", "--account", "--qos", "--constraint"}
    | {"--job-name", "--sbatch-option", "--srun-option", "--env", "--dry-run"}
    | {"--detach", "--tasks-per-node", "--gpus-per-node", "--cpus-per-task"}
    | {"--container-image", "--container-mounts", "--no-requeue"},
    "launch k8s": {"--name", "--image", "--namespace", "--hosts", "--slices", "--port"}
    | {"--tpu-accelerator", "--tpu-topology", "--chips-per-host", "--gpus", "--queue"}
    | {"--request", "--volume", "--env", "--secret-env", "--grace-seconds", "--form"}
    | {"--max-restarts", "--runtime", "--no-network-policy", "--apply", "--delete"}
    | {"--detach", "COMMAND"}
    | {"--learners", "--servers", "--save-commits", "--token-secret"},
}
HEAVY = ("jax", "gin", "rich", "numpy", "flax", "optax", "orbax", "grain")


def output(capsys, *argv) -> str:
    """Returns the output of a command that succeeds in this process."""
    capsys.readouterr()
    assert main(list(argv)) == 0
    return capsys.readouterr().out


def subcommands(parser, path=()):
    """Yields (name, parser) of every command without subcommands, and of serve."""
    nested = [a for a in parser._actions if isinstance(a, argparse._SubParsersAction)]
    if not nested or path == ("serve",):
        yield " ".join(path), parser
    for action in nested:
        for name, child in action.choices.items():
            yield from subcommands(child, (*path, name))


# Flags, help and invalid arguments.


def test_flags_are_pinned():
    found = {
        name: {
            (action.option_strings or [action.metavar])[0]
            for action in parser._actions
            if not isinstance(action, argparse._HelpAction)
        }
        for name, parser in subcommands(cli._parser())
    }
    assert found == FLAGS


def test_flags_cannot_be_abbreviated(capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["train", "--dry"])
    assert "unrecognized arguments: --dry" in capsys.readouterr().err


@pytest.mark.parametrize(
    "argv, status",
    [
        ("--help", 0),
        ("train --help", 0),
        ("trian", 2),
        ("train --stepz 3", 2),
        ("train --steps many", 2),
        ("", 2),
    ],
)
def test_help_and_wrong_arguments(argv, status):
    result = command(*argv.split())
    assert result.returncode == status
    if status:
        assert re.fullmatch(r"meshloom.*: .*; see meshloom.* --help\n", result.stderr)
    else:
        assert "--" in result.stdout and not result.stderr


def test_wrong_arguments_are_named():
    assert "argument --steps: invalid int value: 'many'" in (
        command("train", "--steps", "many").stderr
    )
    stderr = command("trian").stderr
    assert "invalid choice: 'trian' (choose from 'train', 'tune'" in stderr
    assert "not allowed with argument --json" in (
        command("explain", "--json", "--against", "data=2").stderr
    )


@pytest.mark.parametrize("argv", ["--help", "train --help", "train --stepz 3", "-"])
def test_parsing_imports_nothing_heavy(argv):
    program = (
        "import sys\n"
        "from meshloom.trainer import cli\n"
        "try:\n"
        f"    cli._parser().parse_args({argv.split()!r})\n"
        "except SystemExit:\n"
        "    pass\n"
        "print(sorted({name.split('.')[0] for name in sys.modules}), file=sys.stderr)\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60
    )
    imported = result.stderr.splitlines()[-1]
    assert "'argparse'" in imported
    assert [name for name in HEAVY if f"'{name}'" in imported] == []


# train and config.


def test_without_arguments_the_default_is_trained(tmp_path):
    """Runs a real process in its own folder; --dry-run writes nothing."""
    result = subprocess.run(
        [COMMAND, "train", "--dry-run", "--cpu-devices", "4"],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=tmp_path,
    )
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    assert lines[0] == "Training on the CPU: no accelerator was found or requested"
    assert lines[1].startswith("4 cpu devices in 1 process, mesh data=4")
    assert "source Text, path stdlib" in result.stdout
    assert re.fullmatch(r"Forecast: .* MiB on a device, \d+% of its memory", lines[-2])
    assert lines[-1] == (
        "Dry run: config, data and run folder checked; nothing written or trained."
    )
    assert list(tmp_path.iterdir()) == []


def test_flags_reach_the_config(capsys):
    shown = output(
        capsys, "train", "--config", TINY, "--mesh", "fsdp=4,tensor=2", "--dry-run"
    )
    assert "mesh fsdp=4, tensor=2, plan data+fsdp+tensor" in shown
    assert "replicated on every device" in shown


def values(text: str) -> dict[str, tuple[str, str]]:
    """Returns {path: (value, origin)} of the output of `config show`."""
    rows = (re.fullmatch(r"(\S+) += (.*?) +# (.+)", line) for line in text.splitlines())
    return {row[1]: (row[2], row[3]) for row in rows if row}


def test_config_show_gives_every_origin(capsys, tmp_path):
    second = tmp_path / "second.gin"
    second.write_text(
        "from meshloom.models import transformer\ntransformer.Config.num_layers = 3\n"
    )
    sets = ["model.d_ff=128", "transformer.Config.max_length=64"]
    found = values(
        output(
            capsys,
            *("config", "show", "--config", TINY, "--config", str(second)),
            *("--set", sets[0], "--set", sets[1], "--mesh", "data=2,fsdp=4"),
        )
    )
    assert found["model"] == ("transformer.Config", f"{TINY}:11")
    assert found["model.num_heads"] == ("4", f"{TINY}:29")
    assert found["model.num_layers"] == ("3", f"{second}:2")
    assert found["model.d_ff"] == ("128", f"--set {sets[0]}")
    assert found["model.max_length"] == ("64", f"--set {sets[1]}")
    assert found["model.norm"] == ("'rms'", "default")
    assert found["mesh.fsdp"] == ("4", "--mesh")
    assert found["mesh.data"] == ("2", "--mesh")


# explain.


def test_explain(capsys):
    shown = output(capsys, "explain", "--config", TINY, "--mesh", "fsdp=4,tensor=2")
    row = next(line for line in shown.splitlines() if "mlp/down" in line)
    assert "2x64x32" in row and "(-, tensor, fsdp)" in row
    assert "mlp over tensor by tensor" in row
    for title in ("parameters ", "bytes per device ", "replicated "):
        assert any(line.startswith(title) for line in shown.splitlines())
    assert re.search(r"optimizer state: \S+ KiB, \S+ KiB per device", shown)


def test_explain_as_json(capsys):
    argv = ("explain", "--config", TINY, "--mesh", "fsdp=4,tensor=2", "--json")
    document = json.loads(output(capsys, *argv))
    down = next(a for a in document["arrays"] if a["path"] == "blocks/mlp/down")
    assert down["shape"] == [2, 64, 32] and down["spec"] == [None, "tensor", "fsdp"]
    assert down["bytes"] == 8 * down["bytes_per_device"] and down["ways"] == 8


def test_explain_against_another_mesh(capsys):
    argv = ("explain", "--config", TINY, "--mesh", "data=8", "--against")
    shown = output(capsys, *argv, "fsdp=8")
    assert re.search(r"~ blocks/mlp/down: \(-, -, fsdp\) .* -> \(-, -, -\)", shown)
    assert output(capsys, *argv, "data=4") == "No difference.\n"


def test_explain_of_70_billion_without_the_devices():
    result = command("explain", "--config", "llama3_70b", "--mesh", "fsdp=64,tensor=4")
    assert result.returncode == 0, result.stderr
    assert "70,553,706,496 in 10 arrays" in result.stdout
    assert re.search(r"bytes +262.8 GiB", result.stdout)
    assert re.search(r"bytes per device +1.0 GiB", result.stdout)


def test_a_closed_pipe_is_not_an_error():
    program = f"{COMMAND} explain --json --config {TINY} --mesh data=8 | head -n 1"
    result = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {program}"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (result.stdout, result.stderr) == ("{\n", "")
    assert result.returncode in (0, cli.PIPE_CLOSED)  # it may have finished first


def test_ctrl_c_ends_quietly(monkeypatch, capsys):
    def interrupt(args):
        raise KeyboardInterrupt

    monkeypatch.setattr(report, "_report", interrupt)
    assert main(["report", "run"]) == cli.INTERRUPTED
    assert capsys.readouterr().err == "meshloom: interrupted\n"
