"""`meshloom serve --upstream`: what the command refuses, and that it needs no jax."""

import subprocess
import sys

import pytest
from tiny_runs import main, refused


@pytest.mark.parametrize(
    "flags",
    [
        ["--role", "server"],
        ["--coordinator", "127.0.0.1:1"],
        ["--servers", "2"],
        ["--save-every", "5"],
        ["--metrics", "9100"],
        ["--store", "etcd://127.0.0.1:1/x"],
    ],
    ids=lambda flags: flags[0],
)
def test_flags_of_a_service_are_refused(tmp_path, capfd, flags):
    argv = ["serve", "--upstream", "127.0.0.1:1", "--folder", str(tmp_path), *flags]
    error = refused(capfd, argv)
    assert error.startswith(f"{flags[0]} with --upstream 127.0.0.1:1: ")
    assert error.endswith("or give it to the service above")


def test_an_address_that_others_reach_needs_a_token(tmp_path, capfd):
    argv = ["serve", "--upstream", "127.0.0.1:1", "--folder", str(tmp_path)]
    error = refused(capfd, [*argv, "--bind", "192.0.2.1:0"])
    assert "set a token or TLS files; or bind to 127.0.0.1" in error
    assert main([*argv, "--bind", "0.0.0.0:0"]) == 2
    assert "learners are told this address" in capfd.readouterr().err


def test_a_merger_does_not_import_jax():
    code = "import sys, meshloom.service.merger.merger; print('jax' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "False\n", done.stderr
