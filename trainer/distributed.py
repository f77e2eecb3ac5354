"""Joining a job of several processes: loudly, or not at all."""

import contextlib
import itertools
import os
import re
from collections.abc import Iterator
from typing import Any

NAMES = ("COORDINATOR", "NUM_PROCESSES", "PROCESS_ID")
# How long a process that leaves waits for the others. Processes that trained leave
# together; one that leaves with an error ends the job for all after this time.
LEAVING_SECONDS = 10
# How long processes wait for one another; what lies between two meetings takes less.
WAIT_SECONDS = 600.0
_BARRIERS = itertools.count()  # all processes meet in the same order


def initialize() -> None:
    """Joins the job described by MESHLOOM_{COORDINATOR,NUM_PROCESSES,PROCESS_ID}.

    All three or none. Half a description is an error: a process that quietly trains
    alone costs a day before anyone notices.
    """
    given = {
        n: os.environ[f"MESHLOOM_{n}"] for n in NAMES if f"MESHLOOM_{n}" in os.environ
    }
    if not given:
        return
    if missing := [f"MESHLOOM_{n}" for n in NAMES if n not in given]:
        raise ValueError(
            f"this is a process of a larger job, but {', '.join(missing)} is not set. "
            f"Set all of MESHLOOM_{', MESHLOOM_'.join(NAMES)}, or none to train alone."
        )
    coordinator = given["COORDINATOR"]
    count, number = _numbers(given)
    import jax
    from jax.experimental import multihost_utils

    jax.distributed.initialize(
        coordinator, count, number, shutdown_timeout_seconds=LEAVING_SECONDS
    )
    if jax.process_count() != count:
        raise ValueError(f"expected {count} processes, got {jax.process_count()}")
    if count > 1 and jax.default_backend() == "cpu":
        # Only process 0 would find its programs there. It would run ahead of those that
        # compile, and gloo waits no longer than 30 s for a group's other members.
        jax.config.update("jax_enable_compilation_cache", False)
    # The group of all is made while all are here; later it may wait as long as it must.
    wait_for_all("joined")
    multihost_utils.sync_global_devices("joined")


def _numbers(given: dict[str, str]) -> tuple[int, int]:
    """(number of processes, number of this one), checked."""
    host, _, port = given["COORDINATOR"].rpartition(":")
    if not host or not port.isdigit():
        raise ValueError(
            f"MESHLOOM_COORDINATOR is {given['COORDINATOR']!r}; expected host:port of "
            "process 0, for instance host0:1234"
        )
    for name in NAMES[1:]:
        if not given[name].isdigit():
            raise ValueError(
                f"MESHLOOM_{name} must be a whole number, got {given[name]!r}"
            )
    count, number = int(given["NUM_PROCESSES"]), int(given["PROCESS_ID"])
    if number >= count:
        raise ValueError(
            f"MESHLOOM_PROCESS_ID is {number}, but MESHLOOM_NUM_PROCESSES is {count}: "
            f"expected 0 to {count - 1}. Number the processes from 0."
        )
    return count, number


@contextlib.contextmanager
def all_or_none() -> Iterator[None]:
    """A block that ends well in every process of the job, or with an error in each.

    A process that gives up alone leaves the others waiting in their next collective.
    Every process must come here, and the block must hold no collective of its own.
    """
    error = None
    try:
        yield
    except Exception as raised:
        error = raised
    failed = [p for p, flag in enumerate(_gather(error is not None)) if flag]
    if error is not None:
        raise error
    if failed:
        raise ValueError(
            f"process {failed[0]} of this job cannot start; it says why. Mend that and "
            "start all processes again."
        )


def agree(what: str, value: int) -> int:
    """Returns `value`, which must be the same in every process of the job."""
    values = _gather(value)
    if len(set(values)) > 1:
        found = ", ".join(f"{v} in process {p}" for p, v in enumerate(values))
        raise ValueError(
            f"the processes of this job differ in {what}: {found}. Start all with the "
            "same command, and let them see the same run folder and data."
        )
    return value


def any_process(flag: bool) -> bool:
    """Whether the flag is set in any process of the job."""
    return any(_gather(flag))


def wait_for_all(where: str, seconds: float = WAIT_SECONDS) -> None:
    """Returns once every process of the job has come here, or names who has not."""
    import jax
    import orbax.checkpoint as ocp

    barrier = ocp.multihost.get_barrier_sync_fn()
    try:
        barrier(
            key=f"meshloom {next(_BARRIERS)} {where}", timeout_ms=int(1000 * seconds)
        )
    except jax.errors.JaxRuntimeError as error:
        if "DEADLINE_EXCEEDED" not in str(error):
            raise
        missing = re.findall(r"^(\d+)$", str(error), re.MULTILINE)
        raise ValueError(
            f"waited {seconds:g} s for all processes of this job at {where!r}, but "
            f"process {', '.join(missing) or '?'} did not come. Look into its log."
        ) from error


def _gather(value: Any) -> list[int]:
    """The value (31 bits at most) of each process, by its number."""
    import numpy as np
    from jax.experimental import multihost_utils

    values = multihost_utils.process_allgather(np.int32(value))
    return np.atleast_1d(np.asarray(values)).ravel().tolist()
