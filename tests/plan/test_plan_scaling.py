"""How the best plan scales, as numbers, a table and a picture."""

import dataclasses
import json
from xml.etree import ElementTree

from test_plan_search_cli import POOR, run
from tiny_plans import config

from meshloom.trainer.plan import parse_target
from meshloom.trainer.plan.searching.searching import device_rate, scaling


def test_strong_scaling_keeps_the_batch_and_weak_its_part():
    c = dataclasses.replace(config(), batch_size=8)
    target = parse_target("v5e-16")
    strong, weak = (scaling(c, target, k, most=64) for k in ("strong", "weak"))
    assert [p.target.num_devices for p in strong] == [8, 16, 32, 64]
    assert {p.config.batch_size for p in strong} == {8}
    assert [p.config.batch_size for p in weak] == [4, 8, 16, 32]
    c = dataclasses.replace(c, batch_size=2)
    odd = scaling(c, parse_target("v5e-64"), "weak", most=64)
    assert [p.target.num_devices for p in odd] == [
        32,
        64,
    ]  # no part of an example elsewhere


def test_efficiency_is_of_a_device_against_the_smallest_that_fits():
    c = dataclasses.replace(config(), batch_size=64)
    target = parse_target(POOR.replace("hbm=2e5", "hbm=14e6"))
    points = scaling(c, target, "strong", least=1, most=32)
    assert points[0].best is None and points[0].efficiency is None
    fitting = [p for p in points if p.best is not None]
    assert len(fitting) >= 3 and fitting[0].efficiency == 1
    for point in fitting:
        assert point.best_forecast.seconds_an_example == min(
            c.seconds for c in point.fitting
        )
        rate = device_rate(point.best_forecast) / device_rate(fitting[0].best_forecast)
        assert point.efficiency == rate
    assert fitting[-1].efficiency < 1


def test_the_table_and_the_picture_have_all_sizes(capsys, tmp_path):
    path = tmp_path / "scale.svg"
    argv = ["plan", "--config", "drill", "--target", "v5e-256", "--batch", 8, "--scale"]
    status, out, _ = run(capsys, *argv, "--svg", path)
    assert status == 0 and "█" in out and "strong: batch 8 on all" in out
    assert "weak: batch 8 on v5e-256" in out
    picture = ElementTree.parse(path).getroot()
    words = ["".join(e.itertext()) for e in picture.iter() if e.tag.endswith("text")]
    for num in ("8", "64", "128", "100%", "drill on v5e"):
        assert num in words
    circles = [e for e in picture.iter() if e.tag.endswith("circle")]
    rows = [line for line in out.splitlines() if "remat" in line]
    assert len(circles) == len(rows) > 3
    _, out, _ = run(capsys, *argv, "strong", "--json")
    found = json.loads(out)
    assert list(found) == ["strong"]
    assert [p["devices"] for p in found["strong"]] == [8 * 2**n for n in range(10)]
    assert found["strong"][-1]["target"] == "16xv5e-256"
    assert found["strong"][-1]["best"] is None  # 8 examples are too few
