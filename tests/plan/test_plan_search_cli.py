"""`meshloom plan --search` and `--smallest` through the command line."""

import importlib.util
import json
import re
import shlex

import pytest
from tiny_plans import config

from meshloom.sharding import MeshSpec
from meshloom.trainer import cli
from meshloom.trainer.config import files as config_files
from meshloom.trainer.plan import forecast
from meshloom.trainer.plan.compile import compiled as compiled_lib
from meshloom.trainer.plan.compile.compiled import (
    Compiled,
    Finalist,
    Refused,
    compile_finalist,
    table,
)
from meshloom.trainer.run.train import Config

DRILL = ["plan", "--config", "drill", "--target", "v5e-4"]
# Few bytes a device, so that the model of the drill needs several.
POOR = "own:1x4,flops=1e13,hbm=2e5,hbm_bandwidth=1e11,link=1e9,network=2e8"


def run(capsys, *argv) -> tuple[int, str, str]:
    status = cli.main([str(word) for word in argv])
    out, err = capsys.readouterr()
    return status, out, err


def test_the_search_says_how_much_it_looked_at_and_why_others_lost(capsys):
    status, out, _ = run(capsys, *DRILL, "--search", "--top", 3)
    assert status == 0
    found = re.search(
        r"([\d,]+) candidates on (\d+) meshes .* ([\d,]+) fit; batch 16", out
    )
    assert found and int(found[1].replace(",", "")) > 200
    rows = out.split("best  mesh")[1].split("Why others lost")[0].splitlines()[1:]
    assert len([row for row in rows if row.strip()]) == 3
    assert all("<= " in row and "network" not in row for row in rows if row.strip())
    reasons = out.split("Why others lost\n")[1].splitlines()
    assert any(line.startswith("  remat ") for line in reasons)
    assert any(line.startswith("  tensor=") for line in reasons)


def test_json_has_the_best_plans_as_plan_has_them(capsys):
    _, out, _ = run(capsys, *DRILL, "--search", "--top", 2, "--json")
    found = json.loads(out)
    assert found["plans"] > found["fit"] > 0 or found["plans"] == found["fit"]
    assert len(found["best"]) == 2 and found["reasons"]
    for best in found["best"]:
        flags = ["--mesh", best["mesh_flag"], "--json"]
        settings = [
            f'model.remat="{best["remat"]}"',
            f"num_microbatches={best['num_microbatches']}",
        ]
        if best["schedule"]:
            settings.append(f'pipeline.schedule="{best["schedule"]}"')
        words = [word for setting in settings for word in ("--set", setting)]
        _, out, _ = run(capsys, *DRILL, *words, *flags)
        alone = json.loads(out)
        assert alone["seconds"] == best["seconds"]
        assert alone["memory"]["peak"] == best["memory"]["peak"]


@pytest.mark.parametrize("pick", [1, 2])
def test_the_written_config_gives_the_plan_that_was_shown(capsys, tmp_path, pick):
    path = tmp_path / "folder" / "best.gin"
    words = ["--search", "--batch", 32, "--set", "model.num_layers=8", "--json"]
    argv = [*DRILL, *words, "--write", path, "--pick", pick]
    status, out, err = run(capsys, *argv)
    assert status == 0 and f"Wrote {path}" in err
    shown = json.loads(out)["best"][pick - 1]
    loaded = config_files.load([str(path)], root=Config).config
    assert loaded.batch_size == 32 and loaded.model.num_layers == 8
    assert loaded.mesh == MeshSpec.parse(shown["mesh_flag"])
    again = json.loads(json.dumps(forecast(loaded, "v5e-4").to_json()))
    assert again == {k: v for k, v in shown.items() if k in again}
    text = path.read_text()
    for name in ("MeshSpec.fsdp = ", "Config.batch_size = 32", "Config.remat = "):
        assert name in text
    status, _, err = run(capsys, *argv)
    assert status == cli.BAD_INPUT and "the file exists" in err
    assert path.read_text() == text


def test_the_written_config_of_a_pipeline_over_slices(capsys, tmp_path):
    """Its parts that nothing bound before: schedule and chunks, and the slices."""
    path, base = tmp_path / "out" / "best.gin", tmp_path / "own.gin"
    base.write_text('include "drill"\n')
    target = ["--target", "own:8x1,flops=1e13,hbm=1e6,hbm_bandwidth=1e9,link=1e9"]
    target[1] += ",network=1e5"
    argv = ["plan", "--config", base, *target, "--search", "--json", "--write", path]
    _, out, _ = run(capsys, *argv)
    shown = json.loads(out)["best"][0]
    assert shown["schedule"] and 'include "../own.gin"' in path.read_text()
    loaded = config_files.load([str(path)], root=Config).config
    assert loaded.pipeline.schedule == shown["schedule"]
    assert (loaded.pipeline.num_chunks or 1) == shown["num_chunks"]
    assert forecast(loaded, target[1]).roofline.step == shown["seconds"]["step"]


def test_the_written_config_trains(capsys, tmp_path):
    path, folder = tmp_path / "best.gin", tmp_path / "run"
    run(capsys, *DRILL[:-1], "v5e-8", "--search", "--write", path)
    argv = ["train", "--config", path, "--workdir", folder, "--steps", 2]
    status, out, _ = run(capsys, *argv)
    assert status == 0
    mesh = config_files.load([str(path)], root=Config).config.mesh
    assert f"mesh {str(mesh).replace(',', ', ')}" in out


def test_where_nothing_fits_the_smallest_number_is_named(capsys):
    argv = ["plan", "--config", "drill", "--target", POOR.replace("1x4", "1x1")]
    status, out, _ = run(capsys, *argv, "--search")
    assert status == 1
    found = re.search(
        r"Nothing fits. The leanest candidate, one device, is [\d.]+ KiB too large on "
        r"each device: (\d+)% of memory at the least",
        out,
    )
    assert found and int(found[1]) > 100
    name = re.search(r"The smallest on which it trains is (\S+): 8 devices", out)
    assert name
    status, out, _ = run(capsys, *argv[:-1], name[1], "--search", "--json")
    assert status == 0 and json.loads(out)["fit"] > 0


def test_smallest(capsys):
    argv = ["plan", "--config", "drill", "--target", POOR, "--smallest"]
    status, out, _ = run(capsys, *argv)
    assert status == 0 and "own:2x4,flops=1e13" in out and "8 devices" in out
    _, out, _ = run(capsys, *argv, "--json")
    found = json.loads(out)
    assert found["devices"] == 8 and found["best"][0]["fits"]
    tiny = POOR.replace("hbm=2e5", "hbm=2e2")
    status, out, _ = run(capsys, *argv[:4], tiny, "--smallest")
    assert status == 1 and out == "It fits on no usual number of own.\n"


def made(plan, **changed) -> Compiled:
    collectives = tuple((t.kind, t.axes, 1, t.bytes) for t in plan.transfers)
    facts = {
        "arguments": plan.memory.arguments,
        "temporaries": plan.memory.temporaries,
        "peak": plan.memory.peak,
        "flops": plan.flops.executed,
        "seconds": 1.0,
        "collectives": collectives,
    }
    return Compiled(**(facts | changed))


def test_finalists_are_compiled_one_after_the_other(monkeypatch):
    plans = [
        forecast(config(), "v5e:2x4", mesh=m) for m in ("fsdp=8", "fsdp=4,tensor=2")
    ]
    usable = plans[0].target.device.usable

    def compile_step(one):
        if one is plans[1]:
            raise Refused("--compile for v5e:2x4: the compiler refused the step: X")
        return made(one, peak=int(usable + 1))

    monkeypatch.setattr(compiled_lib, "compile_step", compile_step)
    found = [compile_finalist(one) for one in plans]
    assert [f.compiled is None for f in found] == [False, True]
    text = table(found)
    assert "refused the step: X" in text and "order" not in text
    assert text.splitlines()[1].endswith("no")  # over its memory


@pytest.mark.timeout(600)
@pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None,
    reason="libtpu, the compiler for TPUs, is not installed",
)
def test_the_best_is_compiled_for_tpus(capsys):
    words = ["--search", "--top", 1, "--compile", "--json"]
    _, out, err = run(capsys, *DRILL[:-1], "v5e:2x2", *words)
    found = json.loads(out)
    (best,), (compiled,) = found["best"], found["compiled"]
    assert compiled["fits"] and not compiled["refused"]
    assert compiled["compiled"]["flops"] == pytest.approx(best["flops"]["executed"])
    assert "Compiling 1 of 1" in err


def test_the_order_is_compared_where_programs_have_a_time():
    plans = [
        forecast(config(), "v5e:2x4", mesh=m) for m in ("fsdp=8", "fsdp=4,tensor=2")
    ]

    def compared(*seconds: float) -> str:
        found = zip(plans, seconds, strict=True)
        return table([Finalist(p, made(p, modelled={"seconds": s})) for p, s in found])

    assert "The order holds." in compared(1.0, 2.0)
    assert "1.000" in compared(1.0, 2.0)  # predicted as compiled
    assert "It does not hold: by the compiled step it is 2, 1." in compared(3.0, 2.0)


def test_changes_say_all_that_has_to_be_set(capsys, tmp_path):
    """Of a pipeline with microbatches given; each is run again as it is printed."""
    base = tmp_path / "base.gin"
    lines = [
        "from __gin__ import dynamic_registration",
        "from meshloom import sharding",
        "from meshloom.models import transformer",
        "from meshloom.trainer.run import train",
        'include "drill"',
        "sharding.MeshSpec.data = 1",
        "sharding.MeshSpec.pipe = 2",
        "sharding.MeshSpec.fsdp = 4",
        "train.Config.num_microbatches = 2",
        'transformer.Config.remat = "none"',
    ]
    base.write_text("\n".join(lines))
    target = POOR.replace("1x4", "2x4").replace("hbm=2e5", "hbm=3e5")
    argv = ["plan", "--config", base, "--target", target, "--json"]
    status, out, _ = run(capsys, *argv)
    assert status == 1
    changes = json.loads(out)["changes"]
    sizes = [len(change["flags"]) for change in changes]
    assert len(changes) >= 2 and sizes == sorted(sizes) and sizes[-1] > 1
    for change in changes:
        status, out, _ = run(capsys, *argv, *shlex.split(" ".join(change["flags"])))
        assert status == 0, change
        assert json.loads(out)["memory"]["peak"] == change["peak"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--top", "3"], "--top needs --search"),
        (["--write", "a.gin"], "--write needs --search"),
        (["--search", "--pick", "2"], "--pick needs --write"),
        (["--svg", "a.svg"], "--svg needs --scale"),
        (["--search", "--scale"], "--search and --scale are different questions"),
        (["--search", "--mesh", "fsdp=4"], "--search chooses the mesh itself"),
        (["--smallest", "--compile"], "--smallest compiles nothing"),
        (["--search", "--top", "0"], "--top must be at least 1, got 0"),
        (["--search", "--compile", "--keep-hlo", "x"], "--keep-hlo keeps one program"),
        (["--search", "--batch", "1", "--target", "v5e-64"], "no mesh of 64 devices"),
        (["--search", "--write", "a.txt"], "a config's name must end in .gin"),
        (["--search", "--write", "a.gin", "--pick", "999"], "--pick 999: the config"),
    ],
)
def test_one_line_says_what_is_wrong(capsys, flags, message):
    status, _, err = run(capsys, *DRILL, *flags)
    assert status == cli.BAD_INPUT
    assert err.count("\n") == 1 and message in err
