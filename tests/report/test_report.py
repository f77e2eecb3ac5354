"""The report of a run: its HTML, and the page as a browser renders it."""

import contextlib
import html
import json
import math
import os
import re
import shutil
import signal
import subprocess

import numpy as np
import pytest
import tiny_plans

from meshloom.sharding.pipeline import make, simulate
from meshloom.sharding.text import short_number
from meshloom.trainer.plan import forecast
from meshloom.trainer.record import metrics
from meshloom.trainer.report import write_report

NUM_STEPS, SPIKE, NAN = 3000, 1200, 2000
PIPELINE = {"start": 0, "derived": True, **simulate(make("1f1b", 4, 8)).to_json()}
SAMPLE = 'def <b>main</b>():\n    print("</pre><script>window.hacked = 1</script>")\n'


def train_rows():
    random = np.random.default_rng(0)
    for step in range(1, NUM_STEPS + 1):
        done = step / NUM_STEPS
        noise = random.normal(0, 0.05)
        loss = 1.3 + 4.2 * math.exp(-9 * done) + noise + 6.0 * (step == SPIKE)
        row = {
            "step": step,
            "loss": math.nan if step == NAN else loss,
            "grad_norm": math.exp(random.normal(-0.5 - done, 0.3)),
            "learning_rate": 3e-4
            * min(step / 200, 0.55 + 0.45 * math.cos(math.pi * done)),
            "time": 1.7e9 + (step // 10) * 0.5,
        }
        if step % 10 == 0:
            row["tokens_per_s"] = 41000 + 900 * random.normal()
            row["step_s"] = 2048 / row["tokens_per_s"]
            row["bubble"] = PIPELINE["bubble"]
        yield row


def config(num_steps=NUM_STEPS):
    changed = {
        "model.d_model": (384, "default.gin:12"),
        "model.num_layers": (6, "default.gin:13"),
        "num_steps": (num_steps, "--steps"),
        "mesh.sizes": ({"data": 2, "fsdp": 2, "tensor": 2}, "--mesh"),
        "data.name": ('<img src=x onerror="window.hacked = 1">', "--set"),
    }
    values = {k: {"value": v, "origin": o} for k, (v, o) in changed.items()}
    for i in range(40):
        values[f"optimizer.option_{i:02}"] = {"value": i / 8, "origin": "default"}
    return {"digest": "0" * 64, "values": values}


def array(path, shape, spec, ways):
    size = 4 * math.prod(shape)
    return {
        "path": path,
        "shape": shape,
        "dtype": "float32",
        "axes": [None, "embed", "mlp"][-len(shape) :],
        "spec": spec,
        "bytes": size,
        "bytes_per_device": size // ways,
        "ways": ways,
    }


def sharding():
    arrays = [
        array("blocks/mlp/up/kernel", [6, 384, 1536], [None, "fsdp", "tensor"], 4),
        array("blocks/mlp/down/kernel", [6, 1536, 384], [None, "tensor", "fsdp"], 4),
        array("embed/table", [256, 384], ["tensor", ["fsdp", "data"]], 8),
        array("head/bias", [256], [None], 1),
        array("norm/scale", [384], [None], 1),
    ]
    return {
        "arrays": arrays,
        "mesh": {"pipe": 4, "data": 2, "fsdp": 2, "tensor": 2},
        "totals": {"bytes": 29_000_000, "bytes_per_device": 7_300_000, "arrays": 5},
    }


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "bytes <&> 3000"
    folder.mkdir()
    metrics.JsonLines(folder / "metrics.jsonl").write(list(train_rows()))
    evals = [
        {"step": step, "loss": loss, "bits_per_byte": loss / math.log(2)}
        for step in range(250, NUM_STEPS + 1, 250)
        for loss in [1.36 + 4.2 * math.exp(-9 * step / NUM_STEPS)]
    ]
    metrics.JsonLines(folder / "eval.jsonl").write(evals)
    (folder / "config.json").write_text(json.dumps(config()))
    (folder / "config.gin").write_text("Model.d_model = 384  # <wide>\n")
    (folder / "sharding.json").write_text(json.dumps(sharding()))
    (folder / "pipeline.json").write_text(json.dumps(PIPELINE))
    (folder / "environment.json").write_text(
        json.dumps({"jax": "0.10.2", "devices": 8, "command": "meshloom train <x>"})
    )
    (folder / "sample.txt").write_text(SAMPLE)
    found = forecast(tiny_plans.config(), "h100:1x8", mesh="fsdp=4,tensor=2").to_json()
    document = {"start": 0, "seconds": 0.05, "plan": found}
    (folder / "forecast.json").write_text(json.dumps(document))
    return folder


@pytest.fixture(scope="module")
def report(run):
    return write_report(run)


def test_report_is_one_file_that_loads_nothing(run, report):
    assert report == run / "report.html"
    text = report.read_text("utf-8")
    assert not re.search(r"\b(src|href|action)\s*=", _markup(text))
    assert "url(" not in text and "@import" not in text and "http:" not in text
    assert "default-src 'none'" in text
    # The temporary file was renamed into place.
    assert not [p for p in run.iterdir() if p.name.endswith(".tmp")]


def _markup(text):
    """The page without its style sheet, scripts and text."""
    text = re.sub(r"<(script|style)\b.*?</\1>", "", text, flags=re.DOTALL)
    return "".join(re.findall(r"<[^>]*>", text))


def test_text_from_files_is_escaped(report):
    text = report.read_text("utf-8")
    assert html.escape(SAMPLE) in text
    assert "<b>main</b>" not in text and "<img" not in text and "<wide>" not in text
    assert "<h1>bytes &lt;&amp;&gt; 3000</h1>" in text
    assert "meshloom train &lt;x&gt;" in text
    # Once in the sample and once in the configuration, never as markup.
    assert text.count("window.hacked") == 2 and "window.hacked" not in _markup(text)


def test_report_shows_state_figures_and_tables(report):
    text = report.read_text("utf-8")
    assert "<b>Complete</b>: 3000 steps" in text
    assert "The loss is not finite at step 2000" in text
    for figure in ("1.361", "1.963", "lowest of 12, at step 3000", "2 min 30 s"):
        assert figure in text
    # The mean is labelled as such, next to the last value of the curve.
    last = short_number(list(train_rows())[-1]["loss"])
    assert f"mean of steps 2951 to 3000; latest {last}" in text
    assert "Final loss" not in text
    # The four that were set and the one with markup, not the forty defaults.
    assert text.count('<tr class="changed">') == 5
    assert "(5 of 45)" in text and "default.gin:12" in text
    assert "pipe 4 × data 2 × fsdp 2 × tensor 2" in text and "7.0 MiB" in text
    assert "Largest replicated arrays" in text
    assert "embed over tensor, mlp over fsdp+data (8 ways)" in text
    assert "embed over fsdp, mlp over tensor (4 ways)" in text
    assert text.count("norm/scale") == 2 and text.count("embed/table") == 1


def test_the_result_comes_first_and_the_forecast_last_and_folded(report):
    text = report.read_text("utf-8")
    found = re.findall(r"<h2>(.*?)</h2>", text)
    assert found == [
        "Curves",
        "Sample",
        "Mesh and sharding",
        "Pipeline",
        "Configuration",
        "Environment",
        "Forecast",
    ]
    assert text.index('class="figures"') < text.index("<h2>Curves")
    (folded,) = re.findall(r"<h2>Forecast</h2>(.*?)</section>", text, re.DOTALL)
    assert folded.startswith("<details><summary>") and folded.endswith("</details>")


@pytest.mark.parametrize(
    "dtype, drift", [("float32", "1e-6"), ("bfloat16", "5e-3"), ("int8", None)]
)
def test_the_report_states_the_expected_drift_on_other_meshes(tmp_path, dtype, drift):
    metrics.JsonLines(tmp_path / "metrics.jsonl").write([{"step": 1, "loss": 2.0}])
    (tmp_path / "sharding.json").write_text(json.dumps(sharding()))
    values = {"model.compute_dtype": {"value": dtype, "origin": "default"}}
    (tmp_path / "config.json").write_text(json.dumps({"values": values}))
    text = write_report(tmp_path).read_text("utf-8")
    if drift is None:
        assert "on another mesh" not in text
    else:
        assert f"Computed in {dtype}: on another mesh" in text and drift in text


def test_every_metric_of_an_evaluation_is_shown(tmp_path):
    metrics.JsonLines(tmp_path / "metrics.jsonl").write([{"step": 1, "loss": 2.0}])
    rows = [{"step": 1, "loss": 0.25, "top_1": 0.875, "time": 1.0}]
    metrics.JsonLines(tmp_path / "eval.jsonl").write(rows)
    text = write_report(tmp_path).read_text("utf-8")
    assert "<dt>Top 1, held out</dt><dd>0.875<small>at step 1" in text


def test_report_of_the_bare_minimum_lists_what_is_missing(tmp_path):
    rows = [{"step": s, "loss": 5.0 / s, "note": "text"} for s in (1, 2, 3)]
    metrics.JsonLines(tmp_path / "metrics.jsonl").write(rows)
    output = write_report(tmp_path, tmp_path / "else.html")
    text = output.read_text("utf-8")
    assert output.name == "else.html" and not (tmp_path / "report.html").exists()
    assert "<b>At step 3</b>" in text
    for name in ("eval.jsonl", "config.json", "sharding.json", "environment.json"):
        assert f"({name})" in text
    assert "(sample.txt)" in text and "(forecast.json)" in text
    assert re.findall(r"<h2>(.*?)</h2>", text) == ["Curves"]
    assert 'class="warning"' not in text


def test_arrays_are_not_called_replicated_on_one_device(tmp_path):
    metrics.JsonLines(tmp_path / "metrics.jsonl").write([{"step": 1, "loss": 2.0}])
    layout = {"arrays": [array("w", [4], [None], 1)], "mesh": {"data": 1, "tensor": 1}}
    (tmp_path / "sharding.json").write_text(json.dumps(layout))
    text = write_report(tmp_path).read_text("utf-8")
    assert "one device" in text and "Largest arrays" in text
    assert "replicated" not in text
    layout["mesh"]["data"] = 2
    (tmp_path / "sharding.json").write_text(json.dumps(layout))
    assert "Largest replicated" in write_report(tmp_path).read_text("utf-8")


def test_report_of_an_unfinished_and_of_an_empty_run(tmp_path):
    (tmp_path / "metrics.jsonl").write_text("")
    (tmp_path / "config.json").write_text(json.dumps(config(num_steps=500)))
    assert "No steps recorded yet" in write_report(tmp_path).read_text("utf-8")
    rows = [{"step": 200, "loss": math.nan}]
    metrics.JsonLines(tmp_path / "metrics.jsonl").write(rows)
    text = write_report(tmp_path).read_text("utf-8")
    assert "<b>At step 200</b> of 500" in text and "not finite" in text


def test_bad_run_folders_are_refused_with_the_remedy(tmp_path):
    with pytest.raises(ValueError, match="nowhere does not exist; pass the --workdir"):
        write_report(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="no metrics.jsonl.*meshloom train --workdir"):
        write_report(tmp_path)
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n')
    with pytest.raises(ValueError, match="absent does not exist; create it first"):
        write_report(tmp_path, tmp_path / "absent" / "report.html")
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match="config.json: invalid JSON.*remove"):
        write_report(tmp_path)
    assert not (tmp_path / "report.html").exists()
    (tmp_path / "metrics.jsonl").write_text('{"loss": 2.0}\n')
    with pytest.raises(
        ValueError, match="metrics.jsonl:1: `step` is missing or not an integer"
    ):
        write_report(tmp_path)


# Comes first, so that it catches every error of the page.
COLLECT = """<head><script>
window.errors = [];
window.addEventListener("error", (e) => window.errors.push(e.message));
document.addEventListener("securitypolicyviolation",
  (e) => window.errors.push("refused: " + e.blockedURI));
</script>"""

PROBE = """<script>
const curves = (pane) => [...document.querySelectorAll(pane + " path.curve")];
const boxes = (pane) => curves(pane).map((p) => {
  const box = p.getBBox();
  return [box.width, box.height, p.getTotalLength()];
});
const seen = { linear: boxes(".pane.linear") };
const loss = document.querySelector(".chart");
const plot = loss.querySelector(".plot");
const place = plot.getBoundingClientRect();
const move = (part) => plot.dispatchEvent(new PointerEvent("pointermove",
  { clientX: place.left + part * place.width, clientY: place.top + 5 }));
const read = () => [...loss.querySelectorAll(".legend b")].map((e) => e.textContent);
seen.last = read();
move(SPIKE / 3000);
seen.spike = read();
seen.guide = loss.querySelector(".guide").style.left;
move(NAN / 3000);
seen.nan = read();
plot.dispatchEvent(new PointerEvent("pointerleave"));
seen.left = read();
loss.querySelector(".log-switch").click();
seen.log = boxes(".chart:first-child .pane.log");
seen.hidden = getComputedStyle(loss.querySelector(".pane.linear")).display;
seen.changed = [...document.querySelectorAll(".config tbody tr")].filter(
  (row) => row.offsetHeight > 0).length;
document.querySelector(".changed-switch").click();
const filter = document.querySelector("#config-filter");
filter.value = "option_1 1.";
filter.dispatchEvent(new Event("input"));
seen.rows = [...document.querySelectorAll(".config tbody tr")].filter(
  (row) => row.offsetHeight > 0).length;
seen.schedule = [...document.querySelectorAll(".schedule rect")].map(
  (rect) => getComputedStyle(rect).fill);
seen.card = getComputedStyle(document.querySelector(".chart")).backgroundColor;
seen.wide = document.documentElement.scrollWidth > window.innerWidth;
seen.folded = !document.querySelector("details").open;
for (const part of document.querySelectorAll("details")) part.open = true;
document.documentElement.style.width = WIDTH + "px";
seen.tables = [...document.querySelectorAll("table, pre, .bars")].filter((part) =>
  part.scrollWidth > part.clientWidth
  || part.getBoundingClientRect().right > WIDTH).map((part) => part.textContent);
seen.bare = [...document.querySelectorAll("h2, h3.table")].filter((title) =>
  !title.nextElementSibling || title.nextElementSibling.offsetHeight < 10
  || /^H[1-6]$/.test(title.nextElementSibling.tagName)).map((e) => e.textContent);
seen.hacked = window.hacked === 1;
seen.errors = window.errors;
document.body.dataset.probe = JSON.stringify(seen);
</script></body>"""


def browser():
    path = shutil.which("chromium")
    if path is None:
        pytest.fail("chromium is not installed: apt-get install chromium")
    return path


def dump_dom(page, tmp_path, *flags):
    """Returns the page after its scripts ran, and kills the browser."""
    command = [browser(), "--headless", "--no-sandbox", "--disable-gpu"]
    command += ["--disable-quic", "--no-first-run", "--disable-background-networking"]
    command += ["--disable-component-update", "--disable-sync", *flags]
    command += [f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom", page.as_uri()]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
    )
    try:
        out, err = process.communicate(timeout=60)
    finally:
        # There is no group left if the browser and its children have already exited.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    assert process.returncode == 0, err.decode()[-2000:]
    return out.decode()


@pytest.mark.browser
@pytest.mark.parametrize("width", [1200, 400])
def test_browser_draws_the_curves_without_script_errors(report, tmp_path, width):
    text = report.read_text("utf-8").replace("<head>", COLLECT, 1)
    probe = PROBE.replace("SPIKE", str(SPIKE)).replace("NAN", str(NAN))
    probe = probe.replace("WIDTH", str(width))
    page = tmp_path / "probe.html"
    page.write_text(text.replace("</body>", probe), "utf-8")
    dom = dump_dom(page, tmp_path, f"--window-size={max(width, 500)},1400")
    (found,) = re.findall(r'<body data-probe="([^"]*)"', dom)
    seen = json.loads(html.unescape(found))

    assert seen["errors"] == [] and not seen["hacked"] and not seen["wide"]
    assert seen["tables"] == [] and seen["bare"] == [] and seen["folded"]
    # Loss and step time have 3 curves, gradient norm and throughput 2, the others 1.
    # In SVG units (1000 x 400) a curve spans most of the width and some height.
    assert len(seen["linear"]) == 12 and len(seen["log"]) == 3
    for box_width, box_height, length in seen["linear"] + seen["log"]:
        assert 900 <= box_width <= 1000 and 10 < box_height <= 400 and length >= 900
    assert seen["hidden"] == "none"
    # Paper, three swatches, four stages, 32 forwards and backwards each.
    assert len(seen["schedule"]) == 72 and seen["schedule"][0] == seen["card"]
    raw, _, _, step = seen["spike"]
    assert step == str(SPIKE) and float(raw) > 7 and seen["guide"] == "40%"
    assert seen["nan"][0] == "not finite" and seen["nan"][-1] == str(NAN)
    assert seen["last"] == seen["left"] and seen["last"][-1] == str(NUM_STEPS)
    assert seen["changed"] == 5
    # option_10 to option_15 are 1.25 to 1.875; later ones are 2 or more.
    assert seen["rows"] == 6


def test_a_missing_browser_fails_with_the_remedy(monkeypatch):
    monkeypatch.setenv("PATH", "")
    with pytest.raises(pytest.fail.Exception, match="apt-get install chromium"):
        browser()
