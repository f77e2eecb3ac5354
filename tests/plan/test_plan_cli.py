"""`meshloom plan` through the command line."""

import importlib.util
import json
import os
import subprocess
import sys

import pytest

from meshloom.trainer import cli
from meshloom.trainer.plan import forecast
from meshloom.trainer.plan.advice import cheapest_changes

BIG = ["plan", "--config", "llama3_8b", "--target", "v5p-128"]
TOO_BIG = ["plan", "--config", "llama3_8b", "--target", "v5e-64"]
TOO_BIG += ["--set", "num_microbatches=1"]  # left open, it would be in more parts


def run(capsys, *argv) -> tuple[int, str, str]:
    status = cli.main([str(word) for word in argv])
    out, err = capsys.readouterr()
    return status, out, err


def test_a_plan_that_fits_says_what_runs_out_next(capsys):
    status, out, _ = run(capsys, *BIG, "--mesh", "fsdp=64", "--batch", 64)
    assert status == 0
    for words in ("64 devices of 95.7 GiB", "parameters", "optimizer state", "█"):
        assert words in out
    for words in ("executed", "over fsdp", "compute", "It fits. Next to run out: mem"):
        assert words in out


def test_a_plan_that_does_not_fit_says_what_would(capsys):
    status, out, _ = run(capsys, *TOO_BIG)
    assert status == 1
    assert "It does not fit" in out
    changes = out.split("It would with\n")[1].strip().splitlines()
    assert len(changes) == 2
    assert all("% of memory" in line for line in changes)
    assert len({line.split()[0:2][-1].split("=")[0] for line in changes}) == 2


def test_the_changes_do_fit_and_are_written_as_flags(capsys):
    """Each is run again as it is printed."""
    status, out, _ = run(capsys, *TOO_BIG, "--json")
    found = json.loads(out)
    assert status == 1 and not found["fits"]
    assert found["memory"]["peak"] > found["target"]["hbm"]
    for change in found["changes"]:
        flags = [w.strip("'") for flag in change["flags"] for w in flag.split(" ", 1)]
        status, out, _ = run(capsys, *TOO_BIG, *flags, "--json")
        assert status == 0, change
        assert json.loads(out)["memory"]["peak"] == change["peak"]


def test_json_has_all_of_it(capsys):
    argv = [*BIG, "--mesh", "pipe=4,fsdp=16", "--batch", 256, "--json"]
    status, out, _ = run(capsys, *argv)
    found = json.loads(out)
    assert status == 0 and found["fits"]
    memory = found["memory"]
    assert sum(part["bytes"] for part in memory["parts"]) == memory["peak"]
    assert memory["peak"] == max(memory["moments"].values())
    assert {"in flight", "gradient sums"} <= {part["name"] for part in memory["parts"]}
    assert set(found["traffic_by_axes"]) >= {"fsdp", "pipe"}
    seconds = found["seconds"]
    assert seconds["compute"] <= seconds["overlapped"] <= seconds["serial"]
    assert found["mfu_overlapped"] < 1


def test_settings_are_those_of_a_run(capsys):
    argv = ["plan", "--config", "gpt2_124m", "--target", "v5e-16", "--json"]
    status, out, _ = run(capsys, *argv, "--set", 'model.remat="full"')
    assert status == 0
    found = json.loads(out)
    assert found["remat"] == "full" and found["mesh"]["fsdp"] == 16


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["plan"], "plan: --target is missing. Name the devices"),
        (["plan", "--target", "v9-8"], "target 'v9-8' is unknown. Devices: v4"),
        ([*BIG, "--mesh", "fsdp=8"], "mesh fsdp=8 needs 8 devices, but there are 64"),
        ([*BIG, "--keep-hlo", "x"], "--keep-hlo needs --compile"),
        ([*BIG, "--batch", "0"], "batch_size"),
    ],
)
def test_one_line_says_what_is_wrong(capsys, argv, message):
    status, _, err = run(capsys, *argv)
    assert status == cli.BAD_INPUT
    assert err.count("\n") == 1 and message in err


@pytest.mark.parametrize(
    ("target", "mesh", "message"),
    [
        ("4xv5e:4x4", "data=2/2,fsdp=32/2", "the axes data, fsdp cross slices"),
        ("h100:2x8", "data=2/2,fsdp=8", "Leave out the part after /"),
    ],
)
def test_what_cannot_be_compiled_over_slices(capsys, target, mesh, message):
    argv = ["plan", "--config", "gpt2_124m", "--target", target, "--mesh", mesh]
    status, _, err = run(capsys, *argv, "--compile")
    assert status == cli.BAD_INPUT and err.count("\n") == 1 and message in err


@pytest.mark.parametrize(
    ("target", "module", "message"),
    [
        ("v5e-16", "libtpu", "libtpu, the compiler for TPUs, is not installed"),
        ("h100:1x8", "jax_cuda12_plugin", "meshloom[cuda-compile]"),
    ],
)
def test_without_its_compiler_one_line_says_so(capsys, target, module, message):
    if importlib.util.find_spec(module) is not None:
        pytest.skip(f"{module} is installed")
    argv = ["plan", "--config", "gpt2_124m", "--target", target, "--compile"]
    status, _, err = run(capsys, *argv)
    assert status == cli.BAD_INPUT and err.count("\n") == 1
    assert f"--compile for {target}: " in err and message in err


def test_the_command_line_starts_without_jax():
    code = "import sys; import meshloom.trainer.cli; assert 'jax' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_cheapest_changes_come_in_order():
    from tiny_plans import config

    small = "own:1x8,flops=4e14,hbm=2e7,hbm_bandwidth=2e12,link=2e11,network=2.5e10"
    found = forecast(config(remat="none"), small, mesh="fsdp=8")
    assert not found.fits
    changes = cheapest_changes(found)
    assert changes and all(change.forecast.fits for change in changes)
    kinds = [change.flags for change in changes]
    assert len(set(kinds)) == len(kinds)


def test_a_plan_asks_for_no_device():
    """Compilers' environments have plugins that fail loudly where there is no GPU."""
    words = ["plan", "--config", "gpt2_124m", "--target", "h100:1x8"]
    done = subprocess.run(
        [sys.executable, "-m", "meshloom.trainer.cli", *words, "--mesh", "fsdp=8"],
        env={**os.environ, "JAX_PLATFORMS": "no_such_platform"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert "It fits" in done.stdout


def test_a_model_that_does_not_know_sharded_positions_has_no_forecast(capsys):
    """It would leave out what devices exchange for attention."""
    argv = ["plan", "--config", "digits_vit", "--target", "v5e-8"]
    assert cli.main([*argv, "--mesh", "data=2,context=4"]) == 2
    assert "has no parameter `shard`, so a forecast" in capsys.readouterr().err
