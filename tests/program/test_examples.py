"""The smallest examples: each learns, and has the same losses on every mesh."""

import functools
import re
import runpy
import sys

import jax
import numpy as np
import pytest
from paths import ROOT
from sklearn.datasets import load_diabetes

MESHES = {
    "linear_regression": {"data=8": 1, "fsdp=2": 2, "data=2,fsdp=2": 2},
    "softmax_regression": {"data=8": 1, "fsdp=4": 4, "data=2,fsdp=2": 2},
    "mlp": {"data=8": 1, "fsdp=2": 2, "data=2,fsdp=2,tensor=2": 4},
}


@functools.cache
def run(name: str, mesh: str):
    """Returns (the example's variables, losses of 20 steps, what it printed last)."""
    printed: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [name, mesh])
        patch.setattr("builtins.print", lambda *line: printed.append(str(line)))
        # The devices of the tests are there already.
        patch.setattr(jax.config, "update", lambda *setting: None)
        found = runpy.run_path(str(ROOT / "examples" / f"{name}.py"))
    losses = [float(re.findall(r"\d+\.\d+", line)[0]) for line in printed[:20]]
    return found, np.array(losses), printed


@pytest.mark.parametrize(
    ("name", "mesh"), [(name, mesh) for name in MESHES for mesh in MESHES[name]]
)
def test_an_example_is_the_same_on_every_mesh(name, mesh):
    found, losses, _ = run(name, mesh)
    first = next(iter(found["AXES"]))
    array = found["state"].params[first]
    ways = array.size // array.addressable_shards[0].data.size
    assert ways == MESHES[name][mesh]
    rows = found["batch"]["x"]
    size = rows.size // rows.addressable_shards[0].data.size
    spec = found["spec"]
    assert size == spec.data * spec.fsdp
    # Printed with six digits.
    np.testing.assert_allclose(losses, run(name, "data=1")[1], rtol=1e-5, atol=1e-6)


def test_linear_regression_finds_the_least_squares():
    found, _, _ = run("linear_regression", "data=8")
    x, y = (each.astype(np.float32)[:440] for each in load_diabetes(return_X_y=True))
    columns = np.concatenate([x / x.std(0), np.ones((440, 1))], axis=1)
    _, (residual,), *_ = np.linalg.lstsq(columns, (y - y.mean()) / y.std(), rcond=None)
    assert float(found["metrics"]["loss"]) == pytest.approx(residual / 440, rel=0.01)


@pytest.mark.parametrize("name", ["softmax_regression", "mlp"])
def test_a_classifier_learns(name):
    found, _, _ = run(name, "data=8")
    assert float(found["metrics"]["accuracy"]) > 0.97
