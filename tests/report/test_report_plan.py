"""The plan as HTML, in the report of a run and as a page of its own."""

import json
import re

import pytest
from test_plan_explain import found

from meshloom.trainer import cli
from meshloom.trainer.record import metrics
from meshloom.trainer.report import write_report
from meshloom.trainer.report.plan import forecast_parts, write_forecast


def document(start=0, measured=None, **changes):
    it = found("fsdp=4,tensor=2")
    content = {"start": start, "seconds": 0.5, "plan": it.to_json() | changes}
    return content | ({"measured": measured} if measured else {})


def write_run(folder, content):
    (folder / "forecast.json").write_text(json.dumps(content))
    rows = [{"step": s, "loss": 5.0 / s, "step_s": 0.25 * s} for s in range(1, 8)]
    metrics.JsonLines(folder / "metrics.jsonl").write(rows)
    return folder


def section(folder) -> str:
    text = write_report(folder).read_text("utf-8")
    (html,) = re.findall(r"<section><h2>Forecast</h2>(.*?)</section>", text, re.DOTALL)
    return html


def bars(html) -> dict[str, list[tuple[str, str, float]]]:
    """{title: [(name with detail, value, per cent)]}."""
    lists = re.findall(r'<h3 class="table">([^<]*)</h3><ul[^>]*>(.*?)</ul>', html)
    item = r"<li><span>(.*?)</span><b>(.*?)</b><i[^>]*><u style=\"width:(.*?)%\">"
    return {
        title: [(re.sub("<[^>]*>", "", n), v, float(w)) for n, v, w in found]
        for title, items in lists
        for found in [re.findall(item, items)]
    }


def test_bars_show_all_of_the_plan():
    it = found("fsdp=4,tensor=2")
    html = forecast_parts(it.to_json())
    shown = list(bars(html).items())
    titles = [title for title, _ in shown]
    assert titles[0].startswith("Memory of a device: ")
    assert titles[1:4] == [
        "What makes up the peak",
        "Work of a device and step",
        "Traffic of a device and step, payload",
    ]
    peak, parts, work, traffic, time = (rows for _, rows in shown)
    assert len(parts) == len([part for part in it.memory.parts if part.bytes])
    assert sum(width for *_, width in parts) == pytest.approx(100, abs=0.1)
    assert len(peak) == 3 and all(width < 1 for *_, width in peak)
    assert work[1][2] == round(100 * it.flops.model / it.flops.executed, 2)
    assert {name.split()[1] for name, *_ in traffic} >= {"fsdp", "tensor"}
    assert sum(width for *_, width in time) == pytest.approx(100, abs=0.1)
    assert "h100:1x8" in html and "fsdp 4 × tensor 2" in html


def test_one_device_sends_nothing():
    html = forecast_parts(found("fsdp=1", "h100:1x1").to_json())
    assert "Traffic" not in html


def test_what_was_found_stands_beside_the_forecast(tmp_path):
    seen = {"memory": 2**30, "memory_of": "in use at most", "seconds": 2.0}
    html = section(write_run(tmp_path, document(3, seen)))
    assert "1.0 GiB, in use at most" in html and ">2 s, median<" in html
    assert ">0.25<" in html and "Of the steps since 4." in html
    # It says something about the forecast, nothing about the run: not in red.
    assert '<p class="note">The step time is far off: 4 times its forecast.' in html
    assert "warning" not in html


def test_before_the_end_the_step_time_is_what_was_recorded(tmp_path):
    html = section(write_run(tmp_path, document(start=4)))
    assert ">1.5 s, median<" in html  # of steps 5, 6 and 7
    assert html.count("not yet") == 1 and "warning" not in html


def test_without_a_forecast_the_reason_stands_there(tmp_path):
    write_run(tmp_path, {"start": 0, "reason": "<b>no</b> numbers"})
    assert "There is none: &lt;b&gt;no&lt;/b&gt; numbers." in section(tmp_path)


def test_text_of_the_file_is_escaped_and_gaps_are_refused(tmp_path):
    content = document(plan="<img src=x>")
    content["plan"]["memory"]["parts"][0] |= {"name": "<img 1>", "detail": "<img 2>"}
    html = section(write_run(tmp_path, content))
    assert "<img" not in html and "&lt;img src=x&gt;" in html
    assert "&lt;img 1&gt; <small>&lt;img 2&gt;</small>" in html
    content = document()
    content.pop("seconds")
    with pytest.raises(ValueError, match="forecast.json: missing seconds; restore"):
        write_report(write_run(tmp_path, content))


def test_a_plan_is_a_page_of_its_own(tmp_path, capsys):
    page = tmp_path / "plan.html"
    argv = "plan --config llama3_8b --target v5p-128 --batch 4096"
    argv += " --set num_microbatches=1 --html"
    assert cli.main([*argv.split(), str(page)]) == 1
    text = page.read_text("utf-8")
    assert "<h1>llama3_8b on v5p-128</h1>" in text and "default-src 'none'" in text
    assert "It does not fit" in text
    (peak,) = re.findall("<li><span>peak .*?</li>", text)
    update = re.search("<li><span>at the update .*?</li>", text)
    assert "<i class=over>" in peak and update and "<i>" in update[0]
    with pytest.raises(ValueError, match="absent does not exist"):
        write_forecast({}, "x", tmp_path / "absent" / "plan.html")
