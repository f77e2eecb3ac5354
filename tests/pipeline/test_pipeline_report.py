"""A run folder and its report describe the current pipeline."""

import dataclasses
import io
import json
import re

import pytest
from rich.console import Console
from tiny_runs import TINY

from meshloom.sharding import MeshSpec
from meshloom.sharding.pipeline import make, picture, simulate
from meshloom.trainer.config import files as config_files
from meshloom.trainer.program.pipelining import Pipelining
from meshloom.trainer.record import metrics
from meshloom.trainer.report import write_report
from meshloom.trainer.run import train

pytestmark = pytest.mark.compiles_anew

TOKENS_PER_STEP = 16 * 16


def write_run(folder, name="1f1b", sizes=(4, 8, None), *, start=0, **changes):
    """Writes a run folder of 6 steps; the first three were twice as slow."""
    result = simulate(make(name, *sizes)).to_json()
    record = {"start": start, "derived": True, **result, **changes}
    (folder / "pipeline.json").write_text(json.dumps(record))
    (folder / "metrics.jsonl").unlink(missing_ok=True)
    rows = [
        {"step": step, "loss": 5.0 / step, "step_s": 0.4 if step < 4 else 0.2}
        | {"bubble": result["bubble"]}
        for step in range(1, 7)
    ]
    metrics.JsonLines(folder / "metrics.jsonl").write(rows)
    return folder


def section(folder) -> str:
    text = write_report(folder).read_text("utf-8")
    parts = re.findall(r"<section><h2>Pipeline</h2>(.*?)</section>", text, re.DOTALL)
    assert len(parts) == 1
    return parts[0]


def cells(html) -> dict[str, str]:
    """Returns the rows of the table as text."""
    rows = re.findall(r'<th scope="row">(.*?)</th><td[^>]*>(.*?)</td>', html)
    return {name: re.sub("<[^>]*>", "", value) for name, value in rows}


def test_the_section_shows_the_cost_of_the_pipeline(tmp_path):
    html = section(write_run(tmp_path))
    assert cells(html) == {
        "Schedule": "1f1b",
        "Stages × chunks": "4 × 1",
        "Microbatches": "8, derived from the batch",
        "Bubble, simulated": "27.3 %",
        "Executed / useful work": "1.375",
        "Saved inputs per stage": "at most 7",
        "Remat": "save-named",
        "Weights gathered": "once per step",
        "Step time, measured": "300 ms, the median",
        "Bubble": "81.8 ms of it, if every tick takes its simulated share",
    }
    assert "1 if any runs a forward and 3 if any runs a backward" in html


def test_only_steps_of_this_pipeline_are_measured(tmp_path):
    html = section(
        write_run(tmp_path, "interleaved", (4, 8, 2), start=3, derived=False)
    )
    result = cells(html)
    assert result["Schedule"] == "interleaved, since step 4"
    assert result["Microbatches"] == "8, as configured"
    assert result["Step time, measured"] == "200 ms, the median"
    assert cells(section(write_run(tmp_path, start=6)))["Step time, measured"] == (
        "not yet"
    )


def test_the_picture_has_every_operation_in_the_colors_of_the_page(tmp_path):
    html = section(write_run(tmp_path, "interleaved", (4, 8, 2)))
    assert html.count("<title>tick") == 2 * 4 * 8 * 2
    # Dark text on light cells keeps its color; everything else follows the page.
    for color in (picture.PAPER, picture.RULE, picture.EMPTY, picture.SOFT):
        assert color not in html
    for name in ("card", "rule", "grid", "soft", "ink"):
        assert f'"var(--{name})"' in html
    assert "http" not in html


def test_a_large_schedule_is_shortened_and_names_the_command_to_draw_it(tmp_path):
    folder = write_run(tmp_path, "interleaved", (16, 128, 4))
    html = section(folder)
    assert "<svg" not in html and len(html) < 20_000
    assert "Ticks 9 to 580 of 590 are left out." in html
    assert (
        "meshloom plan schedule --schedule interleaved --stages 16 --microbatches 128 "
        "--chunks 4 --svg FILE" in html
    )


def test_step_time_is_drawn_with_its_bubble_only_for_pipelines(tmp_path):
    text = write_report(write_run(tmp_path)).read_text("utf-8")
    (data,) = re.findall(r"Step time, s</h3>.*?json\">(.*?)</script>", text, re.DOTALL)
    measured, lost = json.loads(data)["curves"]
    assert measured["values"] == [0.4, 0.4, 0.4, 0.2, 0.2, 0.2]
    assert lost["values"] == pytest.approx([x * 3 / 11 for x in measured["values"]])
    # The simulated bubble alone is not a curve.
    assert len(re.findall('<figure class="chart', text)) == 2

    rows = [{"step": step, "loss": 1.0, "step_s": 0.4} for step in (1, 2)]
    (tmp_path / "without").mkdir()
    metrics.JsonLines(tmp_path / "without" / "metrics.jsonl").write(rows)
    text = write_report(tmp_path / "without").read_text("utf-8")
    assert "Step time" not in text and "Pipeline" not in text


def test_a_damaged_record_is_refused(tmp_path):
    write_run(tmp_path)
    (tmp_path / "pipeline.json").write_text('{"name": "1f1b"}')
    with pytest.raises(ValueError, match="pipeline.json: missing bubble, .*remove"):
        write_report(tmp_path)


def run(folder, num_steps, mesh, **settings) -> str:
    """Continues training to `num_steps`; returns the console output."""
    tiny = config_files.load([TINY], root=train.Config).config
    config = dataclasses.replace(
        tiny,
        mesh=MeshSpec.parse(mesh),
        pipeline=Pipelining(**settings),
        num_steps=num_steps,
        eval_batches=0,
    )
    console = Console(file=io.StringIO(), width=200)
    # A continued run cannot change its number of steps freely.
    train.train(config, workdir=folder, console=console, insist=True)
    return console.file.getvalue()  # type: ignore


def test_a_run_folder_records_the_last_pipeline(tmp_path):
    folder, record = tmp_path / "run", tmp_path / "run" / "pipeline.json"
    with_pipe = "pipe=2,data=4"
    shown = run(folder, 4, with_pipe)
    assert "Pipeline: 1f1b, stages 2, microbatches 4 (derived)" in shown
    assert "bubble 20 % (simulated)" in shown
    result = json.loads(record.read_text())
    assert (result["name"], result["start"], result["bubble"]) == ("1f1b", 0, 0.2)

    run(folder, 8, with_pipe, schedule="gpipe")
    result = json.loads(record.read_text())
    assert (result["name"], result["start"]) == ("gpipe", 4)
    assert cells(section(folder))["Schedule"] == "gpipe, since step 5"

    # Nothing is trained here, so the record stays.
    assert "complete at step 8" in run(folder, 8, "data=8")
    assert json.loads(record.read_text()) == result

    shown = run(folder, 12, "data=8")
    assert not record.exists() and "bubble" not in shown
    report = write_report(folder).read_text("utf-8")
    assert "<h2>Pipeline</h2>" not in report and "bubble, simulated" in report

    rows = metrics.read(folder / "metrics.jsonl")
    timed = [row for row in rows if "tokens_per_s" in row]
    assert {(row["step"] - 1) // 4 for row in timed} == {0, 1, 2}
    for row in rows:
        assert ("step_s" in row) == ("tokens_per_s" in row)
        assert ("bubble" in row) == ("tokens_per_s" in row and row["step"] <= 8)
    for row in timed:
        assert row["step_s"] * row["tokens_per_s"] == pytest.approx(TOKENS_PER_STEP)
        assert row.get("bubble", 0.2) == 0.2
