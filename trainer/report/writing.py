"""Writes the HTML report of a run: `meshloom report RUN`."""

import datetime
from pathlib import Path

from ...launch.atomic_file import replace_text
from . import sections
from .data import RunFiles, read_run
from .layout import sharding
from .learners import learners
from .mistakes import mistakes
from .page import page
from .pipeline import pipeline
from .plan import forecast
from .result import header
from .timeline import timeline


def write_report(run: Path, output: Path | None = None) -> Path:
    """Writes the report of a run folder and returns its path.

    Args:
      run: the run folder.
      output: the file to write; defaults to `report.html` in the run folder.
    """
    content = read_run(run)
    output = Path(run) / "report.html" if output is None else Path(output)
    if not output.parent.is_dir():
        raise ValueError(
            f"report {output}: folder {output.parent} does not exist; create it first"
        )
    now = datetime.datetime.now(datetime.UTC)
    body = [
        header(content),
        sections.curves(content),
        learners(content.learners),
        timeline(content.timeline),
        mistakes(content),
        sections.sample(content),
        sharding(content),
        pipeline(content),
        sections.configuration(content),
        sections.environment(content),
        forecast(content),
        _footer(content, now),
    ]
    replace_text(output, page(f"{content.name} · Meshloom", "\n".join(body)))
    return output


def _footer(run: RunFiles, now: datetime.datetime) -> str:
    missing = ""
    if run.missing:
        missing = f"<p>Missing from this run folder: {', '.join(run.missing)}.</p>"
    written = f"<p>Written {now:%Y-%m-%d %H:%M} UTC by meshloom report.</p>"
    return f"<footer>{missing}{written}</footer>"
