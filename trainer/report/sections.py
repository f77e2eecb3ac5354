"""The sections of a report as HTML. All text from files is escaped here."""

import json
import re
from html import escape

import numpy as np

from ..record.curves import rolling_mean
from .charts import Chart, Curve, render
from .data import RATE, RunFiles, columns
from .tables import absent, code, plain_text, section, table

_TITLES = {
    "learning_rate": "Learning rate",
    "grad_norm": "Gradient norm",
    "step_s": "Step time, s",
    "bits_per_byte": "Bits per byte, held out",
    "learners": "Contributions per commit",
    "staleness": "Staleness, commits",
    "wait_s": "Contributions waited, s",
    "bytes": "Bytes sent per commit",
    "exchange_s": "Exchange, s",
    "exchange_wait_s": "Waiting for the exchange, s",
}
_FROM_ZERO = (
    *("learning_rate", "grad_norm", "step_s", "learners", "staleness", "wait_s"),
    *("bytes", "pushed_bytes", "pulled_bytes", "exchange_s", "exchange_wait_s"),
)


def curves(run: RunFiles) -> str:
    """Returns all charts: loss first, then evaluation metrics, then the rest."""
    if not run.train:
        return section("Curves", absent("No steps recorded yet."))
    train, evals, last = columns(run.train), columns(run.evals), run.last_step
    step_time = _step_time(run)
    for name in ("step_s", "bubble"):
        train.pop(name, None)
    found: list[tuple[str, tuple[Curve, ...]]] = []
    both = [name for name in train if name in evals]
    for name in dict.fromkeys(["loss", *both, *evals]):
        lines = _with_mean("training", *train.pop(name)) if name in train else ()
        if name in evals:
            label = "held out" if name in ("loss", *both) else _words(name)
            lines += (_evaluation(label, *evals[name]),)
        if lines:
            found.append((name, lines))
    for name, (steps, values) in train.items():
        if name == "learning_rate":
            line = Curve(label=_words(name), style="mean", steps=steps, values=values)
            found.append((name, (line,)))
        else:
            found.append((name, _with_mean(_words(name), steps, values)))
    if step_time:
        found.append(("step_s", step_time))
    charts = [
        Chart(
            name=f"{index}-{re.sub('[^A-Za-z0-9_-]', '-', name)}",
            title=_title(name),
            curves=lines,
            last_step=last,
            from_zero=name in _FROM_ZERO or name.endswith(RATE),
            with_log=name in ("loss", "grad_norm"),
            wide=name == "loss",
        )
        for index, (name, lines) in enumerate(found)
    ]
    html = f'<div class="charts">{"".join(render(chart) for chart in charts)}</div>'
    return section("Curves", html)


def _step_time(run: RunFiles) -> tuple[Curve, ...]:
    """Returns the step time and, for pipelined steps, the bubble's share of it.

    Without a pipeline the step time is the inverse of the throughput, which needs no
    second chart.
    """
    rows = [row for row in run.train if {"step_s", "bubble"} <= row.keys()]
    if not rows:
        return ()
    steps = np.array([row["step"] for row in rows])
    lost = np.array([row["step_s"] * row["bubble"] for row in rows])
    return (
        *_with_mean("measured", *columns(run.train)["step_s"]),
        _evaluation("bubble, simulated", steps, lost),
    )


def _title(name: str) -> str:
    if name.endswith(RATE):
        return f"Throughput, {name.removesuffix(RATE)}/s"
    return _TITLES.get(name, _words(name).capitalize())


def _words(name: str) -> str:
    return name.replace("_", " ")


def _evaluation(label: str, steps: np.ndarray, values: np.ndarray) -> Curve:
    return Curve(label=label, style="dots", steps=steps, values=values)


def _with_mean(label: str, steps: np.ndarray, values: np.ndarray) -> tuple[Curve, ...]:
    """Returns the raw curve and, if it is long enough, a smoothed one on top."""
    window = min(len(values) // 60, 250) * 2 + 1
    if window < 5:
        return (Curve(label=label, style="mean", steps=steps, values=values),)
    smooth = rolling_mean(values, window)
    unit = "steps" if steps[-1] - steps[0] == len(steps) - 1 else "points"
    return (
        Curve(label=label, style="raw", steps=steps, values=values),
        Curve(label=f"mean over {window} {unit}", style="mean", steps=steps,
              values=smooth),
    )  # fmt: skip


def configuration(run: RunFiles) -> str:
    """Returns every value with its origin; defaults are hidden at first."""
    html = ""
    if run.config is not None:
        rows, changed = [], []
        for path, entry in sorted(run.config.get("values", {}).items()):
            origin = entry.get("origin", "")
            value = json.dumps(entry.get("value"), ensure_ascii=False)
            rows.append([code(path), code(value), escape(origin)])
            changed.append(origin != "default")
        html = (
            '<div class="config"><div class="tools"><input type="search" '
            'id="config-filter" placeholder="Filter" aria-label="Filter the '
            'configuration"><label class="switch"><input type="checkbox" '
            'class="changed-switch" checked>only non-default values '
            f"({sum(changed)} of {len(changed)})</label></div>"
            f"{table(['Name', 'Value', 'Origin'], rows, marked=changed)}</div>"
        )
    if run.gin is not None:
        html += (
            "<details><summary>config.gin, which reproduces this run</summary>"
            f"<pre>{escape(run.gin)}</pre></details>"
        )
    return section("Configuration", html) if html else ""


def environment(run: RunFiles) -> str:
    if run.environment is None:
        return ""
    rows = [
        [escape(_words(k)), code(plain_text(v))] for k, v in run.environment.items()
    ]
    return section("Environment", table(["Name", "Value"], rows))


def sample(run: RunFiles) -> str:
    if run.sample is None:
        return ""
    return section("Sample", f"<pre>{escape(run.sample)}</pre>")
