"""Runs the programs and snippets of docs/sharding.md as they are."""

import os
import pathlib
import re
import subprocess
import sys

import jax
import pytest
from paths import ROOT

from meshloom.sharding import MeshSpec, data, parse_plan, resolve, tensor

PAGE = (ROOT / "docs" / "sharding.md").read_text()
TIMEOUT = 100  # seconds; a program takes about 5 on a quiet machine

# Simulates an environment with jax but without the libraries of the trainer.
JAX_ONLY = """
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {
            "flax", "optax", "orbax", "grain", "gin", "rich", "etils", "chex"
        }:
            raise ImportError(f"{name} is hidden")

sys.meta_path.insert(0, Absent())
"""


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


PLAIN, NNX, NNX_TRAINING = blocks("python")


def run(program: str, folder: pathlib.Path) -> subprocess.CompletedProcess[str]:
    # From another folder, to test the installed package instead of the checkout. On a
    # timeout subprocess.run kills the child.
    return subprocess.run(
        [sys.executable, "-c", program],
        cwd=folder,
        # Enough threads for all devices: on two busy cores they would deadlock.
        env={**os.environ, "NPROC": "32"},
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
    )


def check(result: subprocess.CompletedProcess[str]) -> str:
    assert result.returncode == 0, result.stderr
    last = result.stdout.splitlines()[-1]
    found = re.fullmatch(r"loss (\S+), up is \S+\('fsdp', 'tensor'\)", last)
    assert found, last
    # The targets are noise, so the loss starts at 1; 0.5 is no accident.
    assert float(found[1]) < 0.5
    return result.stdout


def test_plain_pytree_with_jax_alone(tmp_path):
    output = check(run(JAX_ONLY + PLAIN, tmp_path))
    (table,) = [t for t in blocks("text") if t.startswith("parameter")]
    assert output.startswith(table)


def test_the_hook_really_hides_flax(tmp_path):
    result = run(JAX_ONLY + NNX, tmp_path)
    assert result.returncode != 0
    assert "is hidden" in result.stderr


def test_nnx(tmp_path):
    result = run(NNX, tmp_path)
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines()[-1] == "up is P('fsdp', 'tensor')"


def test_nnx_with_an_optimizer(tmp_path):
    output = check(run(NNX_TRAINING, tmp_path))
    assert "0/mu/up" in output
    assert re.search("replicated +4 B in 1 arrays", output)


def test_the_programs_are_short():
    for program in (PLAIN, NNX):
        lines = [
            line
            for line in program.splitlines()
            if line and not line.startswith(("import", "from", "jax.config"))
        ]
        assert len(lines) <= 20, lines


def test_fragments(capsys):
    namespace: dict = {}
    fragments = blocks("py")
    assert len(fragments) == 3
    for fragment in fragments:
        exec(fragment, namespace)
    output = capsys.readouterr().out
    lines = [t for t in blocks("text") if t.startswith("~")]
    assert lines[0] in output
    assert "embed (param) -> fsdp  [fsdp]" in output


def table(first_cell: str) -> list[dict[str, str]]:
    """Returns the table whose header starts with this cell, as {header: cell} rows."""
    (text,) = re.findall(rf"^\| {first_cell} \|.*?\n\n", PAGE, re.MULTILINE | re.DOTALL)
    header, _, *rows = (
        [c.strip() for c in r.split("|")] for r in text.split("\n")[:-2]
    )
    return [dict(zip(header, row, strict=True)) for row in rows]


def test_the_table_of_plans_is_the_plans():
    for plan in ("data", "fsdp", "tensor", "tensor2d", "sequence"):
        shown = {}
        for row in table("name"):
            roles, _, axes = row[f"`{plan}`"].rpartition(":")
            for name in re.findall(r"`(\w+)`", row["name"]) if axes else ():
                for role in roles.split(", "):
                    shown[name, role or None] = axes.strip()
        rows = parse_plan(plan).rows
        assert shown == {
            (row.name, row.role): "+".join(row.candidates[0]) or "replicated"
            for row in rows
        }, plan


def test_the_table_of_roles_is_what_the_resolver_does():
    tree = {"W": jax.ShapeDtypeStruct((8, 8), "float32")}
    mesh = MeshSpec(data=2, fsdp=2, tensor=2).abstract()
    for row in table("role"):
        role = row["role"].strip("`")
        for plan in (header for header in row if header.startswith("`")):
            rules = parse_plan(plan.strip("`"))
            axes = {"W": ("embed", "mlp")}
            resolved = resolve(tree, rules, mesh, axes=axes, role=role)  # pyright: ignore
            d, f = (f"_{axis}" if axis else "" for axis in resolved.arrays[0].spec)
            assert row[plan] == f"`W[D{d}, F{f}]`", (role, plan)


def test_the_error_shown_is_the_error_raised():
    tree = {"blocks": {"up": jax.ShapeDtypeStruct((8, 100), "float32")}}
    axes = {"blocks": {"up": ("embed", "mlp")}}
    with pytest.raises(ValueError) as error:
        resolve(tree, data() + tensor(), MeshSpec(tensor=8).abstract(), axes=axes)
    assert str(error.value) in PAGE.replace("\n", " ")


def test_the_installation_shown_is_the_one_that_ci_makes():
    """`make wheel-test` installs like this and runs the programs of the pages."""
    shown = [block for block in blocks("sh") if block.startswith("pip")]
    assert shown == ["pip install jax\npip install --no-deps .\n"]
    makefile = (ROOT / "Makefile").read_text()
    alone = [line for line in makefile.splitlines() if "$(ALONE_VENV)/bin" in line]
    assert "constraints.txt jax " in alone[1], alone
    assert "--no-deps build/wheel/" in alone[2], alone
    assert "tests/support/alone_check.py" in alone[3], alone
