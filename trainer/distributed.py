"""Joining a job of several processes: loudly, or not at all."""

import os

NAMES = ("COORDINATOR", "NUM_PROCESSES", "PROCESS_ID")


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
    numbers = {}
    for name in NAMES[1:]:
        if not given[name].isdigit():
            raise ValueError(
                f"MESHLOOM_{name} must be a whole number, got {given[name]!r}"
            )
        numbers[name] = int(given[name])
    import jax

    jax.distributed.initialize(
        given["COORDINATOR"], numbers["NUM_PROCESSES"], numbers["PROCESS_ID"]
    )
    if jax.process_count() != numbers["NUM_PROCESSES"]:
        raise ValueError(
            f"expected {numbers['NUM_PROCESSES']} processes, got {jax.process_count()}"
        )
