"""What a server holds and has moved, as metrics for Prometheus."""

from collections.abc import Mapping
from typing import Any

from ..wire.exposition import Metric, Sample

OF_JOB = (
    ("store_version", "Newest version that this server holds.", "version"),
    ("store_blocks", "Blocks of a job that this server holds.", "blocks"),
    ("store_bytes", "Bytes of these blocks, in one version.", "bytes"),
    ("store_staged", "Contributions that are staged here.", "staged"),
)
MOVED = (
    ("received_bytes_total", "Bytes that learners sent.", "received_bytes"),
    ("sent_bytes_total", "Bytes that learners read.", "sent_bytes"),
)


def of_server(held: Mapping[str, Any]) -> list[Metric]:
    """Returns the metrics of what `BlockServer.held` says."""
    found = [
        Metric(f"meshloom_{name}", "counter", help, [Sample({}, held[at])])
        for name, help, at in MOVED
    ]
    for name, help, at in OF_JOB:
        samples = [
            Sample({"job": job["job"]}, job[at])
            for job in held["jobs"]
            if job[at] is not None  # a version, before the initial parameters
        ]
        found.append(Metric(f"meshloom_{name}", "gauge", help, samples))
    return found
