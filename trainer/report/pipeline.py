"""The report section on the pipeline: a picture of the schedule, and its cost."""

from html import escape
from typing import Any

from ...sharding.pipeline import Schedule, make, picture
from ...sharding.text import seconds_text
from ..record.metrics import median_step_seconds
from .data import RunFiles
from .tables import code, section, table

# The largest number of operations to draw (about 350 kB); more makes the page slow.
MAX_DRAWN = 2100
TEXT_WIDTH = 110
# Replaces the colors of the stand-alone picture by those of the page.
THEME = {
    f'fill="{picture.PAPER}" stroke="{picture.RULE}"': (
        'fill="var(--card)" stroke="var(--rule)"'
    ),
    f'font-weight="600" fill="{picture.INK}"': 'font-weight="600" fill="var(--ink)"',
    f'fill="{picture.SOFT}"': 'fill="var(--soft)"',
    f'fill="{picture.EMPTY}"': 'fill="var(--grid)"',
    ' xmlns="http://www.w3.org/2000/svg"': "",
}


def pipeline(run: RunFiles) -> str:
    """Returns the section on the latest schedule of the run; "" without a pipeline."""
    if run.pipeline is None:
        return ""
    found = run.pipeline
    sizes = ("num_stages", "num_microbatches", "num_chunks")
    schedule = make(found["name"], *(found[size] for size in sizes))
    chosen = "derived from the batch" if found["derived"] else "as configured"
    since = f", since step {found['start'] + 1}" if found["start"] else ""
    rows = [
        ["Schedule", f"{code(schedule.name)}{since}"],
        ["Stages × chunks", f"{schedule.num_stages} × {schedule.num_chunks}"],
        ["Microbatches", f"{schedule.num_microbatches}, {chosen}"],
        ["Bubble, simulated", f"{100 * found['bubble']:.1f} %"],
        ["Executed / useful work", f"{found['ratio']:.3f}"],
        ["Saved inputs per stage", f"at most {found['slots']}"],
        ["Remat", code(found["remat"])],
        ["Weights gathered", f"once per {escape(found['gather'])}"],
        *_measured(run, found),
    ]
    cost = found["ideal"] / schedule.num_microbatches - 1
    note = (
        "The bubble is computed from the schedule alone: stages run in lockstep, so a "
        f"tick costs every stage 1 if any runs a forward and {cost:g} if any runs a "
        "backward. The bubble is the share of that cost during which a stage has no "
        "microbatch."
    )
    facts = table(["Property", "Value"], rows)
    return section("Pipeline", f'{_picture(schedule)}{facts}<p class="note">{note}</p>')


def _measured(run: RunFiles, found: dict[str, Any]) -> list[list[str]]:
    """Returns the measured step time and the bubble's share of it."""
    median = median_step_seconds(run.train, found["start"])
    if median is None:
        return [["Step time, measured", "not yet"]]
    return [
        ["Step time, measured", f"{seconds_text(median)}, the median"],
        [
            "Bubble",
            f"{seconds_text(median * found['bubble'])} of it, if every tick takes its "
            "simulated share",
        ],
    ]


def _picture(schedule: Schedule) -> str:
    """Returns the picture or, for a large schedule, its first and last ticks."""
    S, M, R = schedule.num_stages, schedule.num_microbatches, schedule.num_chunks
    if 2 * S * M * R <= MAX_DRAWN:
        drawn = picture.svg(schedule)
        for old, new in THEME.items():
            drawn = drawn.replace(old, new)
        return f'<div class="schedule" tabindex="0">{drawn}</div>'
    chunks = f" --chunks {R}" if schedule.name == "interleaved" else ""
    command = (
        f"meshloom plan schedule --schedule {schedule.name} --stages {S} "
        f"--microbatches {M}{chunks} --svg FILE"
    )
    drawn = escape(picture.text(schedule, TEXT_WIDTH))
    return (
        f'<div class="schedule"><pre tabindex="0">{drawn}</pre></div>'
        f'<p class="note">The full schedule: {code(command)}</p>'
    )
