"""Before the first step, a table names whatever differs between processes."""

import re
import shutil
import socket
import sys
import tomllib
from pathlib import Path

import jobs
import pytest
import short_runs
from compiling import FLAGS
from job_runs import CONFIG
from paths import ROOT, SUPPORT

from meshloom.trainer.config import files as config_files
from meshloom.trainer.job import preflight, preflight_table
from meshloom.trainer.run import train as train_lib

HERE = socket.gethostname()

# What one host has differently; a run imports both.
CHANGED = ("service/rounds/plateau.py", "trainer/program/step.py")

# Runs first in one process, which then has another host name and clock.
ELSEWHERE = """
import socket, time
socket.gethostname = lambda: "odd-host"
time.time = lambda true=time.time: true() + 90
"""


@pytest.fixture(scope="module")
def config_file(tmp_path_factory) -> Path:
    """Reads the folder "text" wherever a process is started."""
    settings = {"BATCH": 4, "NUM_STEPS": 4, "LENGTH": 16, "text": "text"}
    text = CONFIG.format(**settings).replace("import recording", "import uneven")
    text = text.replace("recording.Text", "data.Text")
    text = text.replace(
        "import schedules", "import schedules\nfrom meshloom.trainer import data"
    )
    text = text.replace("transformer.Config", "uneven.Config")
    text = text.replace("from meshloom.models import transformer\n", "")
    file = tmp_path_factory.mktemp("config") / "uneven.gin"
    file.write_text(text)
    return file


def packages() -> set[str]:
    """The top-level packages of Meshloom, as it is installed."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]
    names = settings["setuptools"]["package-dir"]
    return {name.split(".")[1] for name in names if "." in name}


def test_every_file_of_the_packages_is_compared():
    config = config_files.load(["default"], root=train_lib.Config).config
    found = {name.split("/")[0] for name in preflight.code(config)}
    assert found == packages()


def write_text(folder: Path, size: int = 5000) -> Path:
    (folder / "text").mkdir(parents=True)
    for name in "abcdefgh":
        (folder / "text" / f"{name}.txt").write_text("x" * size)
    return folder


def train(config_file: Path, envs: list[dict], *flags: str) -> list[jobs.Completed]:
    """Trains as one process for each of `envs`, which have the folder to start in
    (START) and may have flags of their own (EXTRA).
    """
    job = jobs.job_env(len(envs)) | {"JAX_PLATFORMS": "cpu", "EXTRA": ""}
    each = [
        job | {"PYTHONPATH": str(SUPPORT), "MESHLOOM_PROCESS_ID": str(n)} | env
        for n, env in enumerate(envs)
    ]
    command = [sys.executable, "-m", "meshloom.trainer.cli", "train"]
    command += ["--config", str(config_file), "--set", "eval_batches=0"]
    command += ["--set", "sample_prompt=None", *flags]
    script = 'cd "$START" && exec "$@" $EXTRA'
    return jobs.run_processes(each, 2, ["bash", "-c", script, "bash", *command], 120)


def cells(stderr: str) -> dict[str, dict[str, str]]:
    """The table by label: value -> who has it."""
    found: dict[str, dict[str, str]] = {}
    label = ""
    for line in stderr.splitlines():
        if not line.startswith("|") or line.startswith(("| differs", "|--")):
            continue
        first, value, who = (cell.strip() for cell in line.strip("|").split("|"))
        label = first or label
        found.setdefault(label, {})[value] = who
    return found


@pytest.mark.processes
def test_what_processes_are(config_file, tmp_path):
    """All at once: config, code, version, devices, flags, jax, clock, own address."""
    odd = tmp_path / "odd"
    for package in packages():
        shutil.copytree(ROOT / package, odd / "meshloom" / package)
    for name in CHANGED:
        with open(odd / "meshloom" / name, "a") as file:
            file.write("# changed on this host\n")
    about = odd / "meshloom-9.9.9.dist-info" / "METADATA"
    about.parent.mkdir()
    about.write_text("Metadata-Version: 2.1\nName: meshloom\nVersion: 9.9.9\n")
    (odd / "sitecustomize.py").write_text(ELSEWHERE)
    start = {"START": str(write_text(tmp_path / "start"))}
    differs = start | {
        "PYTHONPATH": f"{odd}:{SUPPORT}",
        "EXTRA": "--set seed=7",
        "XLA_FLAGS": f"{FLAGS} --xla_backend_optimization_level=1 --xla_dump_to=/tmp/x",
        "JAX_NUM_CPU_DEVICES": "2",
        "JAX_DEFAULT_MATMUL_PRECISION": "highest",
    }
    found = train(
        config_file, [start, start, differs], "--workdir", str(tmp_path / "w")
    )
    assert [process.status for process in found] == [2, 2, 2], found
    assert len({process.stderr for process in found}) == 1, found
    words = found[0].stderr
    assert words.startswith(
        "meshloom: the 3 processes of this job differ; no step was trained. Odd: "
    )
    table = cells(words)
    most, one = f"process 0 on {HERE}, process 1 on {HERE}", "process 2 on odd-host"
    assert table["devices: count"] == {"1": most, "2": one}
    assert table["config: seed"] == {"0": most, "7": one}
    assert table["versions: meshloom"]["9.9.9"] == one
    for name in CHANGED:
        assert set(table[f"code: {name}"].values()) == {most, one}
    assert table["XLA_FLAGS: --xla_backend_optimization_level"] == {"0": most, "1": one}
    assert table["jax: jax_default_matmul_precision"] == {"null": most, "highest": one}
    (late,) = (value for value, who in table["clock"].items() if who == one)
    assert re.fullmatch(r"\+(89|90|91) s", late)
    assert "address: of the host's name" in table
    assert len(table) == 9, table
    for group in ("devices", "config", "versions", "code", "clock", "address"):
        assert f"\n{group}: {preflight_table.REMEDIES[group]}" in words
    assert not (tmp_path / "w").exists()


@pytest.mark.processes
def test_what_processes_do(config_file, tmp_path):
    """All at once: data, program, run folder and checkpoint folder."""
    envs = [
        {"START": str(write_text(tmp_path / "a")), "UNEVEN": "1"},
        {"START": str(write_text(tmp_path / "b", size=4000)), "UNEVEN": "2"},
    ]
    saved = tmp_path / "saved"
    saved.mkdir()
    found = train(
        config_file, envs, "--workdir", "w", "--set", f"checkpoint_folder='{saved}'"
    )
    assert [process.status for process in found] == [2, 2], found
    assert found[0].stderr == found[1].stderr
    table = cells(found[0].stderr)
    first, second = f"process 0 on {HERE}", f"process 1 on {HERE}"
    assert set(table["data: train digest"].values()) == {first, second}
    assert set(table["step: program"].values()) == {first, second}
    assert table["folder: run folder"]["process 0's folder"] == first
    (other,) = (v for v, who in table["folder: run folder"].items() if who == second)
    path = tmp_path / "b" / "w"
    assert other == f"{path}: it cannot be written: No such file or directory"
    assert "Odd" not in found[0].stderr  # one against one
    assert "folder: checkpoint_folder" not in table  # is shared
    assert {row.split(":")[0] for row in table} == {"data", "step", "folder"}
    assert sorted(path.name for path in (tmp_path / "a" / "w").iterdir()) == [".lock"]
    assert list(saved.iterdir()) == [] and not (tmp_path / "b" / "w").exists()


@pytest.mark.processes
def test_a_run_folder_that_only_looks_alike(config_file, tmp_path):
    """Two folders, both there; and what a killed job has left is cleared away."""
    envs = []
    for name in "ab":
        start = write_text(tmp_path / name)
        (start / "w").mkdir()
        (start / "w" / ".preflight-0123456789ab-1").touch()
        envs.append({"START": str(start)})
    first, second = train(config_file, envs, "--workdir", "w")
    assert (first.status, second.status) == (2, 2)
    table = cells(first.stderr)
    assert list(table) == ["folder: run folder"]
    assert "process 0's file is not in it" in " ".join(table["folder: run folder"])
    assert [path.name for path in (tmp_path / "a" / "w").iterdir()] == [".lock"]


@pytest.mark.processes
def test_a_config_that_one_process_cannot_read_ends_all(config_file, tmp_path):
    start = {"START": str(write_text(tmp_path))}
    wrong = start | {"EXTRA": "--set sed=1"}
    first, second = train(config_file, [start, wrong], "--workdir", str(tmp_path / "w"))
    assert (first.status, second.status) == (2, 2), (first, second)
    assert "did you mean 'seed'" in second.stderr
    assert f"process 1 on {HERE} failed, and every other process" in first.stderr
    assert "did you mean 'seed'" in first.stderr


def test_the_step_is_lowered_once_and_its_program_tells_steps_apart(monkeypatch):
    config = config_files.load(
        [str(SUPPORT / "tiny.gin")], root=train_lib.Config
    ).config
    first, second = (short_runs.prepare(config, "data=2") for _ in range(2))
    other = short_runs.prepare(config, "data=2", max_grad_norm=2.0)
    assert first.fingerprint() == second.fingerprint() != other.fingerprint()
    again = type("Again", (), {"lower": lambda *args: pytest.fail("lowered twice")})
    object.__setattr__(first.program, "step", again())
    assert first.compile().as_text()
    assert first.fingerprint() == second.fingerprint()


def report(host: str = "a", **facts) -> dict:
    return {"host": host, "address": None, "facts": {"versions": facts}}


def test_nothing_differs():
    assert preflight_table.render([report(jax="1"), report("b", jax="1")]) == ""


def test_versions_and_who_is_odd():
    reports = [report(f"h{i}", jax="0.10.2") for i in range(9)]
    reports[4] = report("h4", jax="0.9", libtpu="0.1")
    words = preflight_table.render(reports)
    assert words.startswith(
        "the 9 processes of this job differ; no step was trained. Odd: process 4 on h4."
    )
    assert cells(words) == {
        "versions: jax": {"0.10.2": "the other 8", "0.9": "process 4 on h4"},
        "versions: libtpu": {"(none)": "the other 8", "0.1": "process 4 on h4"},
    }
    assert words.endswith(f"\nversions: {preflight_table.REMEDIES['versions']}")
    assert words.isascii()


def test_a_tie_names_all():
    words = preflight_table.render([report(jax="1"), report("b", jax="2")])
    assert "Odd" not in words
    assert cells(words)["versions: jax"] == {
        "1": "process 0 on a",
        "2": "process 1 on b",
    }


def test_long_lists_are_shortened():
    many = {f"p{i}": "1" for i in range(30)}
    words = preflight_table.render([report(**many), report(**dict.fromkeys(many, "2"))])
    assert "versions: 22 more" in words
    half = [report(jax=str(i // 10)) for i in range(20)]
    assert "process 5 on a and 4 more" in preflight_table.render(half)


@pytest.mark.parametrize(
    "clocks, expected",
    [
        ([0, 59.9], None),
        ([0, 61], {"+0 s": [0], "+61 s": [1]}),
        ([1000, 1001, 900], {"+0 s": [0, 1], "-100 s": [2]}),
        ([0, 40, 80], {"-40 s": [0], "+0 s": [1], "+40 s": [2]}),
    ],
)
def test_clocks(clocks, expected):
    reports = [report() | {"clock": clock} for clock in clocks]
    differing = preflight_table.discrepancies(reports)
    assert [each.values for each in differing] == ([expected] if expected else [])


def test_addresses_matter_between_hosts_only():
    here = report() | {"address": "127.0.1.1"}
    assert preflight_table.discrepancies([here, here]) == []
    (row,) = preflight_table.discrepancies(
        [here, report("b") | {"address": "10.0.0.2"}]
    )
    assert row.values == {
        "127.0.1.1, reachable from its own host only": [0],
        "reachable": [1],
    }
    assert preflight_table.discrepancies([report(), report("b")]) == []  # not by gloo


def test_flags_are_compared_by_what_they_do():
    a = preflight.flags("--xla_a=1 --xla_b --xla_dump_to=/tmp/x --xla_a=2")
    assert (
        a
        == preflight.flags("--xla_b   --xla_a=2")
        == {"--xla_a": "2", "--xla_b": "set"}
    )


def test_every_group_has_a_remedy():
    groups = {"devices", "versions", "config", "code", "jax", "data", "step"}
    groups |= {"folder", "clock", "address", *preflight.FLAGS}
    assert groups == preflight_table.REMEDIES.keys()
