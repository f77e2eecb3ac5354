"""The result of `meshloom test` as one HTML file."""

import datetime
from html import escape

from ...sharding.text import short_number
from ..run.testing import Tested
from .page import page
from .tables import code, plain_text, section, table


def tested_page(tested: Tested) -> str:
    """Returns the page: key numbers, every metric, the data, where it comes from."""
    now = datetime.datetime.now(datetime.UTC)
    figures = "".join(
        f"<div><dt>{escape(_title(name))}</dt><dd>{short_number(value)}"
        f"<small>{_interval(tested, name)}</small></dd></div>"
        for name, value in tested.metrics.items()
    )
    body = (
        '<header><p class="kicker">Meshloom test</p>'
        f"<h1>{escape(tested.run.name)}</h1>"
        f'<p class="state"><b>Step {tested.step}</b>, {escape(tested.split)} split, '
        f"{tested.num_examples:,} examples</p></header>"
        f'<dl class="figures">{figures}</dl>{_metrics(tested)}{_data(tested)}'
        f"<footer><p>Written {now:%Y-%m-%d %H:%M} UTC by meshloom test.</p></footer>"
    )
    return page(f"{tested.run.name}, {tested.split} split · Meshloom", body)


def _metrics(tested: Tested) -> str:
    rows = []
    for name, value in tested.metrics.items():
        low, high = tested.intervals.get(name) or (None, None)
        ends = ["" if x is None else f"{x:.6g}" for x in (low, high)]
        rows.append([escape(_title(name)), f"{value:.6g}", *ends])
    html = table(["Metric", "Mean", "From", "To"], rows, numbers=(1, 2, 3))
    note = f'<p class="note">{escape(tested.describe_intervals())}.</p>'
    return section("Metrics", html + note)


def _data(tested: Tested) -> str:
    rows = [
        [escape(_title(name)), code(plain_text(value))]
        for name, value in tested.data.items()
    ]
    rows.append(["State", code(tested.state)])
    overlap = f'<p class="note">{escape(tested.describe_overlap())}.</p>'
    return section("Data and checkpoint", table(["Property", "Value"], rows) + overlap)


def _title(name: str) -> str:
    return name.replace("_", " ").capitalize()


def _interval(tested: Tested, name: str) -> str:
    found = tested.intervals.get(name)
    if found is None:
        return "no interval"
    return f"{short_number(found[0])} to {short_number(found[1])}"
