"""The forecast of a step as HTML: in the report of a run, and as its own page."""

import datetime
from collections.abc import Iterable
from html import escape
from pathlib import Path
from typing import Any

from ...launch.atomic_file import replace_text
from ...sharding.text import human_bytes, seconds_text, short_number
from ..plan.comparison import compare
from ..record.metrics import median_step_seconds
from .data import RunFiles
from .page import page
from .tables import absent, code, section, table

Bar = tuple[str, str, str, float]  # name, detail, value, share of the whole


def forecast(run: RunFiles) -> str:
    """Returns the forecast of the run's last part beside what was measured, folded."""
    found = run.forecast
    if found is None:
        return ""
    if "plan" not in found:
        return section("Forecast", absent(f"There is none: {found['reason']}."))
    parts = forecast_parts(found["plan"])
    return section(
        "Forecast",
        "<details><summary>Memory and time of a step: forecast, measured, and how the "
        f"forecast was made</summary>{_against(run, found)}{parts}</details>",
    )


def write_forecast(document: dict[str, Any], title: str, output: Path) -> None:
    """Writes the page of a forecast without a run.

    Args:
      document: of Forecast.to_json.
    """
    if not output.parent.is_dir():
        raise ValueError(f"--html {output}: the folder {output.parent} does not exist")
    words = '<p class="state"><b>It fits</b></p>'
    if not document["fits"]:
        words = '<p class="warning"><b>It does not fit</b></p>'
    now = datetime.datetime.now(datetime.UTC)
    body = [
        f'<header><p class="kicker">Meshloom plan</p><h1>{escape(title)}</h1>'
        f"{words}</header>",
        section("Forecast", forecast_parts(document)),
        f"<footer>Written {now:%Y-%m-%d %H:%M} UTC by meshloom plan.</footer>",
    ]
    replace_text(output, page(f"{title} · Meshloom", "\n".join(body)))


def forecast_parts(document: dict[str, Any]) -> str:
    """Returns what a step takes on a device: facts, memory, work, traffic, time."""
    blocks = [_facts(document), *_memory(document), *_work(document), _time(document)]
    return "".join(blocks)


def _against(run: RunFiles, found: dict[str, Any]) -> str:
    """Returns forecast and measured side by side, as far as they are known."""
    memory = found["plan"]["memory"]["peak"]
    measured = found.get("measured") or {
        "memory": None,
        "memory_of": "",
        "seconds": median_step_seconds(run.train, found["start"]),
    }
    rows = []
    for name, expected, truth, show, whose in (
        ("Memory of a device", memory, measured["memory"], human_bytes,
         measured["memory_of"]),
        ("Time of a step", found["seconds"], measured["seconds"], seconds_text,
         "median"),
    ):  # fmt: skip
        cells = ["not yet", ""]
        if truth:
            words = f"{show(truth)}, {whose}" if whose else show(truth)
            cells = [escape(words), f"{expected / truth:.2f}" if expected else ""]
        rows.append([name, show(expected) if expected else "none", *cells])
    notes = [f"{line}." for line in compare(found)[1:]]
    if found["start"]:
        notes.append(f"Of the steps since {found['start'] + 1}.")
    headings = ["", "Forecast", "Measured", "Forecast / measured"]
    shown = "".join(f'<p class="note">{escape(note)}</p>' for note in notes)
    return table(headings, rows, numbers=(1, 2, 3)) + shown


def _facts(document: dict[str, Any]) -> str:
    target = document["target"]
    sizes = [f"{k} {v}" for k, v in document["mesh"].items() if v > 1]
    numbers = (
        f"{short_number(target['flops'], 3)}FLOP/s, "
        f"{short_number(target['hbm_bandwidth'], 3)}B/s of memory"
    )
    rows = [
        ["Target", f"{code(target['name'])}, {target['devices']:d} devices"],
        ["A device", f"{numbers}; {escape(target['source'])}"],
        ["Mesh", escape(" × ".join(sizes) or "one device")],
        ["Sharding", code(document["plan"])],
        ["Batch", f"{document['batch_size']:d} examples"],
        ["Microbatches", f"{document['num_microbatches']:d}"],
        ["Remat", code(document["remat"] or "unknown")],
    ]
    return table(["Property", "Value"], rows)


def _memory(document: dict[str, Any]) -> list[str]:
    memory, target = document["memory"], document["target"]
    room = target["hbm"] if target["available"] is None else target["available"]
    peak = memory["peak"]
    parts = [
        (part["name"], part["detail"], human_bytes(part["bytes"]), part["bytes"] / peak)
        for part in memory["parts"]
        if part["bytes"]
    ]
    share = f"{peak / room:.1%} of {human_bytes(room)}"
    whole = [("peak", f"at the {memory['moment']}", share, peak / room)]
    whole += [
        (f"at the {name}", "", f"{human_bytes(count)}", count / room)
        for name, count in memory["moments"].items()
        if name != memory["moment"]
    ]
    return [
        _bars(f"Memory of a device: {human_bytes(peak)} at the peak", whole),
        _bars("What makes up the peak", parts),
    ]


def _work(document: dict[str, Any]) -> list[str]:
    flops, traffic = document["flops"], document["traffic_by_axes"]
    most = max(flops["executed"], flops["model"])
    work = [
        (name, words, f"{short_number(flops[name], 4)}FLOP", flops[name] / most)
        for name, words in (
            ("executed", "with what is recomputed and in bubbles"),
            ("model", "what the update needs"),
        )
    ]
    total = max(traffic.values(), default=1)
    kinds = {axes: set() for axes in traffic}
    for transfer in document["traffic"]:
        kinds[",".join(transfer["axes"])].add(transfer["kind"])
    sent = [
        (f"over {axes}", ", ".join(sorted(kinds[axes])), human_bytes(n), n / total)
        for axes, n in sorted(traffic.items(), key=lambda item: -item[1])
    ]
    blocks = [_bars("Work of a device and step", work)]
    if sent:  # one device sends nothing
        blocks.append(_bars("Traffic of a device and step, payload", sent))
    return blocks


def _time(document: dict[str, Any]) -> str:
    seconds = document["seconds"]
    serial = seconds["serial"]
    parts = [
        (name, "", seconds_text(value), value / serial)
        for name, value in seconds.items()
        if name not in ("serial", "step", "overlapped")
    ]
    return _bars(
        f"Time of a step: {seconds_text(seconds['step'])}; "
        f"{seconds_text(seconds['overlapped'])} if all overlapped, "
        f"{seconds_text(serial)} if nothing did",
        parts,
    )


def _bars(title: str, bars: Iterable[Bar]) -> str:
    """Returns a list with a bar for each value; one over 100 % is marked."""
    items = "".join(
        f"<li><span>{escape(name)} <small>{escape(detail)}</small></span>"
        f"<b>{escape(value)}</b>"
        f"<i{' class=over' if share > 1 else ''}>"
        f'<u style="width:{100 * min(share, 1):.2f}%"></u></i></li>'
        for name, detail, value, share in bars
    )
    return f'<h3 class="table">{escape(title)}</h3><ul class="bars">{items}</ul>'
