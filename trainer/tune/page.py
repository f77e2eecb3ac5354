"""The results of a search: a table for the terminal, `tune.json` and a page."""

import datetime
import json
from html import escape
from pathlib import Path
from typing import Any

import optuna

from ...launch.atomic_file import replace_text
from ...sharding.text import align, counted, duration, short_number
from ..report.page import page
from ..report.tables import absent, code, section, table
from .pictures import Line, learning_curves, parallel_coordinates
from .study import REASON, SECONDS, SETTINGS, best
from .tuning import BEST, Tuning, trial_folder

PAGE, DOCUMENT = "tune.html", "tune.json"
# With fewer finished trials, importances would be noise.
LEAST_FOR_IMPORTANCE = 5
_TERMINAL_ROWS = 10
_STATES = {"complete": "finished", "pruned": "stopped early", "fail": "failed"}


def write(tuning: Tuning) -> list[str]:
    """Writes the results and returns the lines to print."""
    study = tuning.study()
    results = document(tuning, study)
    replace_text(tuning.folder / DOCUMENT, json.dumps(results, indent=1) + "\n")
    replace_text(tuning.folder / PAGE, _html(results))
    return _lines(results, tuning.folder)


def document(tuning: Tuning, study: optuna.Study) -> dict[str, Any]:
    """Returns the search as JSON data; values that are not finite are null."""
    leader = best(study)
    trials = []
    for trial in study.get_trials(deepcopy=False):
        trials.append(
            {
                "number": trial.number,
                "state": trial.state.name.lower(),
                "value": trial.value if trial.state.name == "COMPLETE" else None,
                "settings": trial.user_attrs.get(SETTINGS, {}),
                "evaluations": trial.intermediate_values,
                "seconds": trial.user_attrs.get(SECONDS),
                "reason": trial.user_attrs.get(REASON),
                "folder": str(
                    trial_folder(tuning.folder, trial.number).relative_to(tuning.folder)
                ),
            }
        )
    return {
        "format": 1,
        "name": tuning.folder.name,
        "metric": tuning.definition.metric,
        "direction": tuning.definition.direction,
        "best": None if leader is None else leader.number,
        "importance": importance(study),
        "trials": trials,
    }


def importance(study: optuna.Study) -> dict[str, float] | None:
    """Returns the share of each setting in the differences; None with few trials."""
    done = study.get_trials(states=(optuna.trial.TrialState.COMPLETE,))
    if len(done) < LEAST_FOR_IMPORTANCE or len({trial.value for trial in done}) < 2:
        return None
    return optuna.importance.get_param_importances(study)


def _ranked(results: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns the trials, the best first, then those without a result."""
    sign = -1 if results["direction"] == "maximize" else 1
    return sorted(
        results["trials"],
        key=lambda t: (t["value"] is None, sign * (t["value"] or 0), t["number"]),
    )


def _counts(results: dict[str, Any]) -> str:
    states = [trial["state"] for trial in results["trials"]]
    found = (f"{states.count(s)} {name}" for s, name in _STATES.items() if s in states)
    running = states.count("running")
    return ", ".join([*found, *([f"{running} to continue"] if running else [])])


def _lines(results: dict[str, Any], folder: Path) -> list[str]:
    trials = _ranked(results)
    if not trials:
        return []
    names = list(trials[0]["settings"])
    rows = [["trial", results["metric"], "steps", "time", *names]]
    for trial in trials[:_TERMINAL_ROWS]:
        rows.append(
            [
                str(trial["number"]),
                _result(trial),
                str(_last_step(trial)),
                duration(trial["seconds"] or 0),
                *(_setting(trial, name) for name in names),
            ]
        )
    lines = [align(rows, right=(0, 1, 2, 3))]
    if len(trials) > _TERMINAL_ROWS:
        lines.append(f"... and {len(trials) - _TERMINAL_ROWS} more in {folder / PAGE}")
    lines.append(f"{counted(len(trials), 'trial')}: {_counts(results)}")
    if results["best"] is not None:
        lines.append(
            f"The best settings, as a config: {folder / BEST}; report: {folder / PAGE}"
        )
    return lines


def _setting(trial: dict[str, Any], name: str) -> str:
    """Returns a value with four digits; the files have all of them."""
    text = str(trial["settings"].get(name, ""))
    try:
        return text if text.isdigit() else short_number(float(text))
    except ValueError:
        return text


def _result(trial: dict[str, Any]) -> str:
    if trial["value"] is not None:
        return short_number(trial["value"])
    return str(_STATES.get(trial["state"], trial["state"]))


def _last_step(trial: dict[str, Any]) -> int:
    return max((int(step) for step in trial["evaluations"]), default=0)


def _html(results: dict[str, Any]) -> str:
    lines = [_line(trial, results) for trial in results["trials"]]
    metric = results["metric"]
    now = datetime.datetime.now(datetime.UTC)
    body = [
        _header(results),
        section("Learning curves", learning_curves(lines, metric) + _LEGEND)
        if any(line.curve for line in lines)
        else "",
        _section_of_settings(results, lines),
        section("Trials", _table(results)),
        f"<footer><p>Written {now:%Y-%m-%d %H:%M} UTC by meshloom tune.</p></footer>",
    ]
    return page(f"{results['name']} · Meshloom", "\n".join(body))


_LEGEND = (
    '<ul class="legend"><li><i class="swatch dots"></i>best</li>'
    '<li><i class="swatch"></i>finished</li>'
    '<li><i class="swatch raw"></i>stopped early or failed</li></ul>'
)


def _line(trial: dict[str, Any], results: dict[str, Any]) -> Line:
    kind = "complete" if trial["value"] is not None else "other"
    if trial["number"] == results["best"]:
        kind = "best"
    curve = {int(step): value for step, value in trial["evaluations"].items()}
    return Line(trial["number"], kind, trial["settings"], curve, trial["value"])


def _header(results: dict[str, Any]) -> str:
    figures = [("Trials", str(len(results["trials"])), _counts(results))]
    leader = next(
        (t for t in results["trials"] if t["number"] == results["best"]), None
    )
    if leader is not None:
        note = f"trial {leader['number']}, at step {_last_step(leader)}"
        name = f"Best held-out {results['metric']}"
        figures.insert(0, (name, short_number(leader["value"]), note))
    seconds = sum(trial["seconds"] or 0 for trial in results["trials"])
    figures.append(("Time", duration(seconds), "of all trials together"))
    items = "".join(
        f"<div><dt>{escape(name)}</dt><dd>{escape(value)}<small>{escape(note)}</small>"
        "</dd></div>"
        for name, value, note in figures
    )
    title = escape(results["name"])
    return (
        f'<header><p class="kicker">Meshloom search</p><h1>{title}</h1></header>'
        f'<dl class="figures">{items}</dl>'
    )


def _section_of_settings(results: dict[str, Any], lines: list[Line]) -> str:
    html = ""
    if results["importance"] is None:
        html += absent(
            f"Importances need {LEAST_FOR_IMPORTANCE} finished trials that differ."
        )
    else:
        bars = "".join(
            f"<li><span>{code(name)}</span><b>{share:.0%}</b>"
            f'<i><u style="width:{100 * share:.1f}%"></u></i></li>'
            for name, share in results["importance"].items()
        )
        html += f'<h3>Share in the differences</h3><ul class="bars">{bars}</ul>'
    html += parallel_coordinates(lines, results["metric"])
    return section("Settings", html)


def _table(results: dict[str, Any]) -> str:
    trials = _ranked(results)
    names = list(trials[0]["settings"]) if trials else []
    headings = ["Trial", f"Held-out {results['metric']}", "Steps", "Time", *names]
    rows = []
    for trial in trials:
        result = escape(trial["reason"] or _result(trial))
        rows.append(
            [
                str(trial["number"]),
                result,
                str(_last_step(trial)),
                duration(trial["seconds"] or 0),
                *(code(_setting(trial, name)) for name in names),
            ]
        )
    marked = [trial["number"] == results["best"] for trial in trials]
    return table(headings, rows, numbers=(2, 3), marked=marked)
