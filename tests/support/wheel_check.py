"""Run by `make wheel-test` with the wheel's own Python, away from the checkout."""

import contextlib
import io
import pathlib
import subprocess
import sys

import meshloom.models.transformer
import meshloom.sharding
import meshloom.trainer.run.train
from meshloom.trainer.cli import main

for module in (
    meshloom.sharding,
    meshloom.models.transformer,
    meshloom.trainer.run.train,
):
    assert "site-packages" in str(module.__file__), module.__file__
stray = {"sharding", "models", "service", "trainer", "configs", "launch"} & {
    path.name for path in pathlib.Path(meshloom.sharding.__file__).parents[2].iterdir()
}
assert not stray, f"the wheel installs bare packages: {stray}"

output = io.StringIO()
with contextlib.redirect_stdout(output):
    assert main(["config", "show", "--config", "llama3_8b"]) == 0
assert "llama3_8b.gin" in output.getvalue()
with contextlib.redirect_stdout(output):
    argv = [
        "launch",
        "k8s",
        "--name",
        "a",
        "--image",
        "b",
        "--hosts",
        "2",
        "--",
        "train",
    ]
    assert main(argv) == 0
assert "kind: JobSet" in output.getvalue()

command = pathlib.Path(sys.executable).parent / "meshloom"
subprocess.run([command, "train", "--dry-run"], check=True, timeout=120)
print("wheel: 1 passed, 0 failed")
