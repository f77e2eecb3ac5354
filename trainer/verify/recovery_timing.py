"""Where the seconds of a recovery go, from what the supervisor and the run note."""

import statistics
from collections.abc import Mapping, Sequence

from ...sharding.text import align
from ..record import metrics, phases
from .drill_job import Job

# From the fault on: what each span ends with. `steps` are those that are done again,
# and the new one.
SPANS = ("notice", "restart", "import", "join", "set up", "restore", "compile", "steps")


def spans(job: Job, struck: float, new_step: float) -> dict[str, float]:
    """Seconds of each span of a recovery; {} where the run noted no phases since.

    Where more than one attempt was needed, `restart` has all but the last.

    Args:
      struck, new_step: Unix times.
    """
    rows = metrics.read(job.folder / "logs" / "supervisor.jsonl")
    rows = [row for row in rows if row["time"] >= struck]
    ends = [row["time"] for row in rows if row["event"] in ("death", "stall")]
    starts = [row["time"] for row in rows if row["event"] == "start"]
    noted = [row for row in job.events("phases") if row["time"] >= struck]
    if not (ends and starts and noted):
        return {}
    reached = [noted[-1]["times"][name] for name in phases.NAMES]
    times = [struck, ends[0], starts[-1], *reached, new_step]
    pairs = zip(times, times[1:], strict=False)
    seconds = (round(after - before, 3) for before, after in pairs)
    return dict(zip(SPANS, seconds, strict=True))


def table(recoveries: Sequence[Mapping[str, float]]) -> str:
    """The median and the longest of each span; "" without any."""
    rows = [("span", "median", "longest")]
    for name in SPANS:
        found = [spans[name] for spans in recoveries if name in spans]
        if found:
            middle, longest = statistics.median(found), max(found)
            rows.append((name, f"{middle:.1f} s", f"{longest:.1f} s"))
    return align(rows, right=(1, 2)) if len(rows) > 1 else ""
