"""Runs every command in README and docs, in the order of the page."""

import os
import pathlib
import re
import signal
import subprocess
import sys
from collections.abc import Iterator

import npz_rows
import pytest
import short_runs
import warm_commands
from paths import ROOT
from test_docs_sharding import JAX_ONLY

from meshloom.sharding.pipeline import schedule
from meshloom.sharding.pipeline.picture import svg

PAGES = ["README.md", *sorted(f"docs/{p.name}" for p in (ROOT / "docs").glob("*.md"))]
TIME_LIMIT = 240


def blocks(page: str, language: str) -> list[str]:
    text = (ROOT / page).read_text()
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.M | re.S)


@pytest.fixture
def checkout(tmp_path) -> pathlib.Path:
    """A folder that looks like the checkout, so that runs/ is created outside of it."""
    folder = tmp_path / "checkout"
    folder.mkdir()
    names = ["docs", "benchmarks", "examples", "README.md", "Makefile"]
    for name in (*names, "pyproject.toml", "constraints.txt"):
        (folder / name).symlink_to(ROOT / name)
    return folder


@pytest.fixture(scope="session")
def env(tmp_path_factory) -> Iterator[dict[str, str]]:
    """The environment of the pages' commands, which start from a warm process."""
    # Without the variables that make passes on, in case make runs these tests.
    inherited = ("MAKE", "ARGS", "WORKERS")
    env = {k: v for k, v in os.environ.items() if not k.startswith(inherited)}
    env |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    path = f"{pathlib.Path(sys.executable).parent}:{env['PATH']}"
    with warm_commands.started(tmp_path_factory.mktemp("warm"), env) as commands:
        yield env | {"PATH": f"{commands}:{path}"}


def run(script: str, folder: pathlib.Path, env: dict[str, str]) -> str:
    process = subprocess.Popen(
        ["bash", "-euo", "pipefail", "-c", script],
        cwd=folder,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=TIME_LIMIT)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
    assert process.returncode == 0, f"{script}\n{output}"
    return output


# A smaller default model, which trains and compiles in less time.
SMALL = {
    "model.num_layers": 2,
    "model.d_model": 64,
    "model.d_ff": 128,
    "sample_tokens": 8,
    "check_replicas_every": 0,
}


def shorten(script: str, page: str) -> str:
    """Replaces `make TARGET` by a dry run: it takes minutes, and would run the tests.

    The next test checks what `make train` runs. All pages but the README train a
    smaller default model, and evaluate it on one batch.
    """
    script = re.sub(r"^make (\w+)$", r"make -n \1 > /dev/null", script, flags=re.M)
    if page == "README.md":
        return script
    commands = script.replace("\\\n", " ").splitlines()
    return "\n".join(map(with_small_model, commands))


def with_small_model(command: str) -> str:
    trains = re.search(r"(meshloom|--) train ", command)
    if not trains or re.search(r"--config (?!default\b)", command):
        return command
    settings = {"eval_batches": 1, **SMALL}
    if "eval_batches" in command:
        del settings["eval_batches"]
    return " ".join([command, *(f"--set {k}={v}" for k, v in settings.items())])


# Each page for itself: together they take most of the time of all tests.
WITH_COMMANDS = [
    pytest.param(page, marks=pytest.mark.xdist_group(page))
    for page in PAGES
    if blocks(page, "bash")
]


@pytest.mark.parametrize("page", WITH_COMMANDS)
def test_commands_of_the_page_run(page, checkout, env):
    scripts = blocks(page, "bash")
    if page == "docs/report.md":
        run(with_small_model("meshloom train --steps 21"), checkout, env)
    outputs = [run(shorten(script, page), checkout, env) for script in scripts]
    if page == "docs/training.md":  # as the page says
        assert "Resuming from step 3" in outputs[1]


def test_make_train_is_the_default_training(env):
    output = run("make -n train", ROOT, env)
    assert output.strip().splitlines()[-1].endswith("meshloom train")


def test_every_page_is_linked_from_the_readme():
    readme = (ROOT / "README.md").read_text()
    for page in PAGES[1:]:
        assert f"]({page})" in readme, page


def test_links_between_pages_lead_somewhere():
    for page in PAGES:
        text = (ROOT / page).read_text()
        for target in re.findall(r"\]\(([^)#:]+)\)", text):
            assert (ROOT / page).parent.joinpath(target).exists(), f"{page}: {target}"


def test_python_of_the_models_page_trains(tmp_path):
    """The example model trains on a mesh that shards it."""
    source, more = blocks("docs/models.md", "python")
    check = """
import numpy as np
from meshloom.sharding import MeshSpec, Sharder, parse_plan, resolve

model = Linear(num_features=8, num_classes=4)
params = model.init(jax.random.key(0))
mesh = MeshSpec(fsdp=2, tensor=2).make(jax.devices()[:4])
rules = parse_plan("data+fsdp+tensor")
resolved = resolve(params, rules, mesh, axes=model.axes())
params = jax.device_put(params, resolved.shardings(mesh))
assert resolved.arrays[0].ways == 4
batch = {"x": np.eye(8, dtype=np.float32), "label": np.arange(8) % 4}
model.check_batch(batch, {})

def mean(params, shard):
    total, weight, _ = model.loss(params, batch, shard)
    return total / weight

sharded = jax.jit(lambda p: mean(p, Sharder(mesh, rules)))(params)
np.testing.assert_allclose(sharded, mean(params, Sharder()), rtol=1e-6)
assert model.model_flops(batch) > 0
"""
    namespace: dict = {}
    exec(source + check, namespace)
    assert namespace["resolved"].bytes == 8 * 4 * 4
    exec(more, namespace)
    model = namespace["Normalized"](num_features=8, num_classes=4)
    config = npz_rows.config(npz_rows.write(tmp_path / "rows.npz"), model=model)
    prepared = short_runs.prepare(config, "fsdp=2,tensor=2")
    _, losses, state = short_runs.run(prepared, prepared.program.step)
    assert losses[-1] < losses[0]
    mean = state.variables["mean"]
    assert mean.addressable_shards[0].data.shape == (4,) and abs(mean).max() > 0


def test_python_of_the_data_page_runs(capsys):
    namespace: dict = {}
    exec("\n".join(blocks("docs/data.md", "python")), namespace)
    assert capsys.readouterr().out.startswith("(4, 1) [")
    jittered = namespace["Jittered"]()
    batches = [
        namespace["Batches"](
            jittered, namespace["Order"](1000, seed=0), 4, None, training
        )
        for training in (True, False)
    ]
    assert (batches[0][10]["x"] != batches[1][10]["x"]).all()
    assert (batches[0][10]["y"] == batches[1][10]["y"]).all()


@pytest.mark.parametrize(
    ("page", "expected"),
    [
        ("docs/plan.md", r"True \d+"),
        ("docs/search.md", r"fsdp=\d+ .* True\n"),
        ("docs/growing.md", ""),
        ("docs/tables.md", ""),
    ],
)
def test_python_of_other_pages_runs(page, expected, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    exec("\n".join(blocks(page, "python")), {})
    assert re.match(expected, capsys.readouterr().out)


def test_all_python_of_pages_is_run_by_a_test():
    tests = (ROOT / "tests").glob("*/*.py")
    text = "".join(path.read_text() for path in tests)
    pages = {page for page in PAGES if blocks(page, "python")}
    assert {page for page in pages if pathlib.Path(page).name not in text} == set()


def test_python_of_the_pipeline_page_runs_with_jax_alone(tmp_path):
    (source,) = blocks("docs/pipeline.md", "python")
    found = subprocess.run(
        [sys.executable, "-c", JAX_ONLY + source],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=TIME_LIMIT,
        env={**os.environ, "JAX_ENABLE_COMPILATION_CACHE": "false"},
    )
    assert found.returncode == 0, found.stderr
    assert "up is P('pipe', None, 'tensor')" in found.stdout


@pytest.mark.parametrize("name", schedule.NAMES)
def test_pictures_of_schedules_are_those_the_command_draws(name):
    picture = (ROOT / "docs" / f"pipeline-{name}.svg").read_text()
    assert picture.strip() == svg(schedule.make(name, 4, 8)).strip()
