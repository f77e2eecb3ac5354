"""Splits the time of a recovery into spans, from the supervisor and the ledger."""

import statistics
from collections.abc import Mapping, Sequence

from ...sharding.text import align
from ..record import metrics, phases
from .drill_job import Job

# The spans of a recovery, starting at the fault. `steps` covers the steps that are done
# again and the first new one.
SPANS = ("notice", "restart", "import", "join", "set up", "restore", "compile", "steps")


def spans(job: Job, fault_time: float, new_step: float) -> dict[str, float]:
    """Returns the seconds of each span of a recovery.

    If more than one attempt was needed, `restart` includes all but the last.

    Args:
      job: the job that recovered.
      fault_time: the Unix time of the fault.
      new_step: the Unix time of the first new step.

    Returns:
      Seconds by span; {} if the run recorded no phases since the fault.
    """
    rows = metrics.read(job.folder / "logs" / "supervisor.jsonl")
    rows = [row for row in rows if row["time"] >= fault_time]
    ends = [row["time"] for row in rows if row["event"] in ("death", "stall")]
    starts = [row["time"] for row in rows if row["event"] == "start"]
    recorded = [row for row in job.events("phases") if row["time"] >= fault_time]
    if not (ends and starts and recorded):
        return {}
    reached = [recorded[-1]["times"][name] for name in phases.NAMES]
    times = [fault_time, ends[0], starts[-1], *reached, new_step]
    pairs = zip(times, times[1:], strict=False)
    seconds = (round(after - before, 3) for before, after in pairs)
    return dict(zip(SPANS, seconds, strict=True))


def table(recoveries: Sequence[Mapping[str, float]]) -> str:
    """Formats the median and the maximum of each span; "" if there are none."""
    rows = [("span", "median", "longest")]
    for name in SPANS:
        found = [spans[name] for spans in recoveries if name in spans]
        if found:
            middle, longest = statistics.median(found), max(found)
            rows.append((name, f"{middle:.1f} s", f"{longest:.1f} s"))
    return align(rows, right=(1, 2)) if len(rows) > 1 else ""
