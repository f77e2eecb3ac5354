"""Tests that errors in flags and config files are found before heavy imports."""

import subprocess
import sys

import pytest
from tiny_runs import TINY

RUN = """
import sys
from meshloom.trainer.cli import main
try:
    status = main(sys.argv[1:])
except SystemExit as end:
    status = end.code
heavy = [name for name in ("jax", "flax", "orbax", "grain") if name in sys.modules]
print(status, *heavy)
"""


def run(*argv) -> tuple[str, str]:
    """Returns (status and imported heavy packages, stderr) of a command."""
    result = subprocess.run(
        [sys.executable, "-c", RUN, *argv], capture_output=True, text=True, timeout=100
    )
    return result.stdout.strip(), result.stderr


@pytest.mark.parametrize("command", ["train", "explain"])
@pytest.mark.parametrize(
    "flags, message",
    [
        (
            ["--confg", "x"],
            "--confg x (did you mean --config?); see meshloom {command} --help",
        ),
        (["--config", "defalt"], "did you mean 'default'?"),
        (["--set", "num_steps"], "expected NAME=VALUE"),
        (["--set", "plan=data"], "a string needs quotes"),
        (["--set", "service.api_key='x'"], "looks like a secret"),
    ],
)
def test_found_without_jax(command, flags, message):
    out, err = run(command, *flags)
    assert message.format(command=command) in err and out == "2"


def test_a_file_that_cannot_be_parsed_is_found_without_jax(tmp_path):
    config = tmp_path / "torn.gin"
    config.write_text("train.Config.num_steps = \n")
    out, err = run("train", "--config", str(config))
    assert "torn.gin:1: syntax error" in err and out == "2"


def test_a_misspelled_mesh_is_found_with_jax_alone():
    out, err = run("train", "--config", TINY, "--mesh", "foo=3")
    assert "'foo' is not a mesh axis" in err and out == "2 jax"
