"""The parts of a report as HTML. Every text from a file is escaped here."""

import json
import re
from html import escape
from typing import Any

import numpy as np

from ..progress import duration
from .charts import Chart, Curve, render
from .curves import rolling_mean, short_number
from .data import Run, columns, training_seconds
from .tables import absent, code, plain_text, section, table

_TITLES = {
    "learning_rate": "Learning rate",
    "grad_norm": "Gradient norm",
    "step_s": "Step time, s",
    "bits_per_byte": "Evaluation: bits per byte",
}
_FROM_ZERO = ("learning_rate", "grad_norm", "step_s")
_RATE = "_per_s"  # ends the name of the throughput, as in tokens_per_s
_NUM_LARGEST = 12
_NUM_LAST = 50


def header(run: Run) -> str:
    """Returns the name, the state, and what needs attention."""
    step, total = run.last_step, run.total_steps
    if run.is_complete:
        state = f"<b>Complete</b>: {step} steps"
    elif total is None:
        state = f"<b>At step {step}</b>"
    else:
        state = f"<b>At step {step}</b> of {total}"
    return (
        f'<header><p class="kicker">Meshloom run report</p><h1>{escape(run.name)}</h1>'
        f'<p class="state">{state}</p>{_warning(run)}</header>{_figures(run)}'
    )


def _warning(run: Run) -> str:
    steps, loss = columns(run.train).get("loss", (np.array([]), np.array([])))
    bad = steps[~np.isfinite(loss)]
    if len(bad) == 0:
        return ""
    which = f"step {bad[0]}" if len(bad) == 1 else f"{len(bad)} steps from {bad[0]} on"
    return (
        f'<p class="warning">The loss is not finite at {which}: a gap and a dashed '
        "line in the charts.</p>"
    )


def _figures(run: Run) -> str:
    train, found = columns(run.train), []
    if "loss" in train:
        last = train["loss"][1][-_NUM_LAST:]
        finite = last[np.isfinite(last)]
        mean = short_number(float(finite.mean())) if len(finite) else "not finite"
        found.append(("Final loss", mean, f"mean of the last {len(last)} steps"))
    scored = [row for row in run.evals if np.isfinite(row.get("loss", np.nan))]
    if scored:
        best = min(scored, key=lambda row: row["loss"])
        at = f"at step {best['step']}"
        found.append(("Best evaluation loss", short_number(best["loss"]), at))
        if "bits_per_byte" in best:
            bits = short_number(best["bits_per_byte"])
            found.append(("Bits per byte, held out", bits, at))
    for name in train:
        if name.endswith(_RATE):
            median = short_number(float(np.median(train[name][1])), digits=3)
            unit = name.removesuffix(_RATE).capitalize()
            found.append((f"{escape(unit)} per second", median, "median"))
    seconds = training_seconds(run.train)
    if seconds is not None:
        found.append(("Time", duration(seconds), "without interruptions"))
    items = "".join(
        f"<div><dt>{name}</dt><dd>{value}<small>{note}</small></dd></div>"
        for name, value, note in found
    )
    return f'<dl class="figures">{items}</dl>' if items else ""


def curves(run: Run) -> str:
    """Returns all charts: the loss first, then the evaluation, then the rest."""
    if not run.train:
        return section("Curves", absent("No step was recorded yet."))
    train, evals, last = columns(run.train), columns(run.evals), run.last_step
    step_time = _step_time(run)
    for name in ("step_s", "bubble"):
        train.pop(name, None)
    found: list[tuple[str, tuple[Curve, ...]]] = []
    loss = _with_mean("training", *train.pop("loss")) if "loss" in train else ()
    if "loss" in evals:
        loss += (_evaluation("evaluation", *evals.pop("loss")),)
    if loss:
        found.append(("loss", loss))
    found += [(n, (_evaluation(_words(n), *evals[n]),)) for n in evals]
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
            from_zero=name in _FROM_ZERO or name.endswith(_RATE),
            with_log=name in ("loss", "grad_norm"),
            wide=name == "loss",
        )
        for index, (name, lines) in enumerate(found)
    ]
    html = f'<div class="charts">{"".join(render(chart) for chart in charts)}</div>'
    if not run.evals:
        html += absent("No evaluation yet (eval.jsonl).")
    return section("Curves", html)


def _step_time(run: Run) -> tuple[Curve, ...]:
    """Returns the step time and, for steps by a pipeline, the part that is bubble.

    Without a pipeline it is the throughput turned over, which needs no second chart.
    """
    rows = [row for row in run.train if {"step_s", "bubble"} <= row.keys()]
    if not rows:
        return ()
    steps = np.array([row["step"] for row in rows])
    lost = np.array([row["step_s"] * row["bubble"] for row in rows])
    return (
        *_with_mean("measured", *columns(run.train)["step_s"]),
        _evaluation("of it bubble, simulated", steps, lost),
    )


def _title(name: str) -> str:
    if name.endswith(_RATE):
        return f"Throughput, {name.removesuffix(_RATE)}/s"
    return _TITLES.get(name, _words(name).capitalize())


def _words(name: str) -> str:
    return name.replace("_", " ")


def _evaluation(label: str, steps: np.ndarray, values: np.ndarray) -> Curve:
    return Curve(label=label, style="dots", steps=steps, values=values)


def _with_mean(label: str, steps: np.ndarray, values: np.ndarray) -> tuple[Curve, ...]:
    """Returns the raw curve and, where it is long enough, a smoothed one on it."""
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


def configuration(run: Run) -> str:
    """Returns every value with its origin; those that are no default stand out."""
    html = absent("No configuration was recorded (config.json).")
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
            'class="changed-switch">only what differs from the defaults '
            f"({sum(changed)} of {len(changed)})</label></div>"
            f"{table(['Name', 'Value', 'Origin'], rows, marked=changed)}</div>"
        )
    if run.gin is not None:
        html += (
            "<details><summary>config.gin, which reproduces this run</summary>"
            f"<pre>{escape(run.gin)}</pre></details>"
        )
    return section("Configuration", html)


def sharding(run: Run) -> str:
    """Returns the mesh, the totals, the largest arrays and those not cut at all."""
    if run.sharding is None:
        return section("Sharding", absent("No plan was recorded (sharding.json)."))
    plan = run.sharding
    facts = [["Mesh", _mesh(plan.get("mesh"))]]
    for name, value in (plan.get("totals") or {}).items():
        facts.append([escape(_words(name).capitalize()), _amount(name, value)])
    arrays = sorted(plan.get("arrays", []), key=lambda a: -a.get("bytes", 0))
    html = table(["Property", "Value"], facts)
    html += f'<h3 class="table">Largest arrays{_of(arrays)}</h3>{_arrays(arrays)}'
    # On one device every array is whole, and that is no news.
    if not _is_one_device(plan):
        whole = [array for array in arrays if array.get("ways") == 1]
        html += f'<h3 class="table">Largest replicated arrays{_of(whole)}</h3>'
        html += _arrays(whole) if whole else absent("None: every array is cut.")
    return section("Sharding", html)


def _is_one_device(plan: dict[str, Any]) -> bool:
    mesh = plan.get("mesh")
    return isinstance(mesh, dict) and all(size == 1 for size in mesh.values())


def _of(arrays: list[dict[str, Any]]) -> str:
    shown = min(len(arrays), _NUM_LARGEST)
    return f", {shown} of {len(arrays)}" if len(arrays) > shown else ""


def _arrays(arrays: list[dict[str, Any]]) -> str:
    rows = []
    for array in arrays[:_NUM_LARGEST]:
        axes = [name or "–" for name in array.get("axes") or ()]
        rows.append(
            [
                code(str(array.get("path", ""))),
                escape(" × ".join(map(str, array.get("shape", ()))) or "scalar"),
                escape(str(array.get("dtype", ""))),
                code(", ".join(axes)),
                code(_spec(array.get("spec") or [])),
                escape(str(array.get("ways", ""))),
                _amount("bytes", array.get("bytes")),
                _amount("bytes", array.get("bytes_per_device")),
            ]
        )
    headings = ["Array", "Shape", "Type", "Axes", "Cut along", "Ways", "Size"]
    html = table([*headings, "Per device"], rows, numbers=(5, 6, 7))
    return f'<div class="dense">{html}</div>'


def _spec(spec: list[Any]) -> str:
    """Returns the mesh axes of each dimension, a dash where it is whole."""
    names = [part if isinstance(part, list) else [part or "–"] for part in spec]
    return ", ".join("+".join(map(str, part)) for part in names)


def _mesh(mesh: Any) -> str:
    if not isinstance(mesh, dict):
        return escape("not recorded" if mesh is None else str(mesh))
    cut = [f"{name} {size}" for name, size in mesh.items() if size != 1]
    return escape(" × ".join(cut) or "one device")


def _amount(name: str, value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return escape("" if value is None else plain_text(value))
    if "bytes" in name:
        text = short_number(value, digits=3)
        return f"{text}B" if text[-1].isalpha() else f"{text} B"
    return short_number(value) if abs(value) >= 1e5 else escape(str(value))


def environment(run: Run) -> str:
    if run.environment is None:
        return section("Environment", absent("Not recorded (environment.json)."))
    rows = [
        [escape(_words(k)), code(plain_text(v))] for k, v in run.environment.items()
    ]
    return section("Environment", table(["Name", "Value"], rows))


def sample(run: Run) -> str:
    if run.sample is None:
        return section("Sample", absent("No text was generated (sample.txt)."))
    return section("Sample", f"<pre>{escape(run.sample)}</pre>")
