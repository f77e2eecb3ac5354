"""The status of a coordinator as metrics for Prometheus."""

from collections.abc import Iterable, Mapping
from typing import Any

from ..wire.exposition import Metric, Sample

Status = Mapping[str, Any]

OF_JOB = (
    ("version", "gauge", "Newest version of the shared parameters.", "version"),
    ("checkpoint_version", "gauge", "Version of the newest checkpoint.", "checkpoint"),
    ("learners", "gauge", "Learners that are there.", "learners"),
    ("learners_expected", "gauge", "Learners of the job.", "num_learners"),
    ("learners_waiting", "gauge", "Learners that wait for others.", "waiting"),
    ("contributed_bytes_total", "counter", "Bytes of all contributions.", "bytes"),
)
OF_LEARNER = (
    ("learner_round", "gauge", "Round that a learner was released for.", "round"),
    ("learner_lag_rounds", "gauge", "Rounds behind the furthest learner.", "lag"),
    (
        *("learner_staleness_commits", "gauge"),
        *("Commits since the version that a learner started from.", "staleness"),
    ),
    ("learner_heard_seconds", "gauge", "Seconds since the last heartbeat.", "heard_s"),
)
OF_SERVER = (
    ("server_heard_seconds", "gauge", "Seconds since the last heartbeat.", "heard_s"),
    ("server_held_blocks", "gauge", "Blocks that a server holds.", "blocks"),
    ("server_held_bytes", "gauge", "Bytes of these blocks.", "bytes"),
)


def of_coordinator(status: Status | None) -> list[Metric]:
    """Returns the metrics of a status; None: of a coordinator that stands by."""
    leads = [Sample({}, float(status is not None))]
    found = [_metric("leads", "gauge", "1 if this coordinator leads.", leads)]
    if status is None:
        return found
    term = [Sample({}, status["term"])]
    found.append(_metric("term", "gauge", "Term of this coordinator.", term))
    jobs = [({"job": name}, job) for name, job in status["jobs"].items()]
    states = [Sample({**labels, "state": job["state"]}, 1) for labels, job in jobs]
    found.append(_metric("job_state", "gauge", "1 for the state of a job.", states))
    found += _metrics(OF_JOB, jobs)
    learners = [
        ({**labels, "learner": str(row["learner"])}, row)
        for labels, job in jobs
        for row in job.get("members", ())
    ]
    here = [Sample({**labels, "state": row["state"]}, 1) for labels, row in learners]
    found.append(_metric("learner_state", "gauge", "1 for a learner's state.", here))
    found += _metrics(OF_LEARNER, learners)
    servers = [({"server": row["name"]}, row) for row in status["servers"]]
    return found + _metrics(OF_SERVER, servers)


def _metrics(
    kinds: Iterable[tuple[str, Any, str, str]],
    rows: list[tuple[dict[str, str], Status]],
) -> list[Metric]:
    """Returns a metric of each kind, with a sample of each row that has the number."""
    return [
        _metric(name, kind, help, [Sample(x, row[at]) for x, row in rows if at in row])
        for name, kind, help, at in kinds
    ]


def _metric(name: str, kind: Any, help: str, samples: list[Sample]) -> Metric:
    return Metric(f"meshloom_{name}", kind, help, samples)
