"""One HTML file that shows a run: `meshloom report RUN`."""

import datetime
from pathlib import Path

from ..metrics import replace_text
from . import sections
from .data import read_run
from .page import page
from .pipeline import pipeline
from .plan import forecast


def write_report(run: Path, output: Path | None = None) -> Path:
    """Writes the report of a run folder and returns its path.

    Args:
      output: the file to write; `report.html` in the run folder if not given.
    """
    content = read_run(run)
    output = Path(run) / "report.html" if output is None else Path(output)
    if not output.parent.is_dir():
        raise ValueError(
            f"report {output}: the folder {output.parent} is not there; make it first"
        )
    now = datetime.datetime.now(datetime.UTC)
    body = [
        sections.header(content),
        sections.curves(content),
        forecast(content),
        pipeline(content),
        sections.sample(content),
        sections.configuration(content),
        sections.sharding(content),
        sections.environment(content),
        f"<footer>Written {now:%Y-%m-%d %H:%M} UTC by meshloom report.</footer>",
    ]
    replace_text(output, page(f"{content.name} · Meshloom", "\n".join(body)))
    return output
