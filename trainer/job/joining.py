"""Joining a job of several processes: loudly, or not at all."""

import contextlib
import itertools
import json
import os
import re
import socket
from collections.abc import Callable, Iterator
from typing import Any

from ...launch import gpus, process_env, rendezvous
from ...launch.exit_codes import Unreachable
from ..record import failures
from ..record.failures import CorruptCheckpoint, Unreadable

# How long a process that leaves waits for the others. Processes that trained leave
# together; one that leaves with an error ends the job for all after this time.
LEAVING_SECONDS = 10
# How long processes wait for one another; what lies between two meetings takes less.
WAIT_SECONDS = 600.0
# Once all have met, jax has nobody to wait for; it aborts a process that waits longer.
CONNECT_SECONDS = 120
HOST_KEY = "meshloom/host"  # in jax's store: where each process is, said by process 0
ANSWER_MS = 60_000  # for process 0 to read and judge what all have said
_BARRIERS = itertools.count()  # all processes meet in the same order
_QUESTIONS = itertools.count()

Report = dict[str, Any]


def initialize() -> None:
    """Joins the job that the environment describes, if any (see launch/process_env.py).

    Makes no collective: processes that differ must find it out by words, and not by
    waiting for one another in different programs. `connect` makes the first.
    """
    place = process_env.find(os.environ)
    if place is None:
        return
    host = socket.gethostname()
    bind = rendezvous.resolve(place) if place.process_id == 0 else None
    print(place.describe(host) + _meaning(place, bind), flush=True)
    _divide_gpus(place)
    import jax

    has_gpus = gpus.num_installed() > 0 and jax.config.values["jax_platforms"] != "cpu"
    hosts = rendezvous.meet(place, host, bind, has_gpus=has_gpus)
    if place.process_id != 0:
        rendezvous.wait_for_service(place)
    _avoid_proxies(place.address[0])
    port = place.address[1]
    if bind is not None:
        bind = f"[{bind}]:{port}" if ":" in bind else f"{bind}:{port}"
    # It would take SIGTERM, and hide the second one; see preemption.py.
    jax.config.update("jax_enable_preemption_service", False)
    jax.distributed.initialize(
        place.coordinator,
        place.num_processes,
        place.process_id,
        # jax would ask the scheduler again, and take one GPU for each process.
        cluster_detection_method="deactivate",
        initialization_timeout=CONNECT_SECONDS,
        coordinator_bind_address=bind,
        shutdown_timeout_seconds=LEAVING_SECONDS,
    )
    count = _start_devices(host)
    if count != place.num_processes:
        raise ValueError(f"expected {place.num_processes} processes, got {count}")
    if place.num_processes > 1 and jax.default_backend() == "cpu":
        # Only process 0 would find its programs there. It would run ahead of those that
        # compile, and gloo waits no longer than 30 s for a group's other members.
        jax.config.update("jax_enable_compilation_cache", False)
    if place.num_processes > 1 and place.process_id == 0:
        for process, name in enumerate(hosts):
            store().key_value_set(f"{HOST_KEY}/{process}", name)
    wait_for_all("joined")


def _start_devices(host: str) -> int:
    """The number of processes that devices belong to.

    On the CPU gloo tells the others the address of this host's own name, and fails
    with a line number of its own where there is none.
    """
    import jax

    try:
        return jax.process_count()
    except RuntimeError as error:
        if "gloo/transport/tcp" not in str(error):
            raise
        raise ValueError(
            f"the name of this host, {host!r}, has no address here, and by it other "
            "processes must reach this one. Add it to DNS or to /etc/hosts, with an "
            "address that the other hosts can reach."
        ) from error


def connect() -> None:
    """Makes the group of all devices while all processes are here.

    Later it may wait as long as it must; the first time, gloo gives up after 30 s.
    """
    from jax.experimental import multihost_utils

    wait_for_all("connect")
    multihost_utils.sync_global_devices("connect")


def _meaning(place: process_env.Place, bind: str | None) -> str:
    """What process 0's name means to itself if that surprises (Debian: 127.0.1.1)."""
    if bind is None or not process_env.is_loopback(bind):
        return ""
    if process_env.is_loopback(place.address[0]):
        return ""
    return f" ({bind}: reached from this host only)"


def _avoid_proxies(host: str) -> None:
    """Lets jax reach the coordinator as the meeting did, directly.

    By http_proxy it would not, and abort; jax's warning of it is then not needed.
    """
    import jax

    if not any(name.lower().endswith("_proxy") for name in os.environ):
        return
    variable = "no_grpc_proxy"
    before = os.environ.get(variable) or os.environ.get("no_proxy", "")
    os.environ[variable] = ",".join(filter(None, (before, host)))
    jax.config.update("jax_check_proxy_envs", False)


def _divide_gpus(place: process_env.Place) -> None:
    """Before jax sees any; Slurm has shown each process its own already."""
    if place.source == "Slurm" or place.local_id is None or place.local_count is None:
        return
    own = gpus.share(
        os.environ, gpus.num_installed(), place.local_id, place.local_count
    )
    if own is not None:
        os.environ[gpus.VARIABLE] = own
        print(f"{gpus.VARIABLE}={own}", flush=True)


def store() -> Any:
    """jax's store of keys and values, which every process of the job can reach.

    jax has no public name for it; orbax has one.
    """
    import orbax.checkpoint as ocp

    return ocp.multihost.get_jax_distributed_client()


def name(process: int) -> str:
    """A process in words, with its host if it was told."""
    import jax

    try:
        return (
            f"process {process} on {store().key_value_try_get(f'{HOST_KEY}/{process}')}"
        )
    except jax.errors.JaxRuntimeError as error:
        if "NOT_FOUND" not in str(error):
            raise
        return f"process {process}"  # of a job that did not join by `initialize`


@contextlib.contextmanager
def all_or_none(what: str = "ready", seconds: float = WAIT_SECONDS) -> Iterator[None]:
    """A block that ends well in every process of the job, or fails alike in each.

    A process that gives up alone leaves the others waiting in their next collective.
    Every process must come here, and the block must hold no collective of its own. It
    needs none itself: processes that differ in devices can meet here too.

    Where processes fail in different ways, all raise the first of these that any has
    met: what the user must fix (ValueError), CorruptCheckpoint, Unreadable. Anything
    else is raised where it happened, and is Unreachable to the others.
    """
    error = None
    try:
        yield
    except Exception as raised:
        error = raised
    kind = _kind(error)
    report = {"kind": kind, "reason": str(error or "")}
    worst = consult(what, report, _worst, seconds)
    if not worst["kind"]:
        return
    if error is not None and worst["kind"] in (kind, OTHER):
        raise error
    raise ERRORS.get(worst["kind"], Unreachable)(
        f"{name(worst['process'])} of this job failed, and all others with it: "
        f"{worst['reason']}"
    )


# In this order: what is wrong whatever the others have met comes first.
FIX, CORRUPT, UNREADABLE, OTHER = "fix", "corrupt", "unreadable", "other"
ERRORS = {FIX: ValueError, CORRUPT: CorruptCheckpoint, UNREADABLE: Unreadable}


def _kind(error: Exception | None) -> str:
    if error is None:
        return ""
    if isinstance(error, CorruptCheckpoint):
        return CORRUPT
    if failures.is_user_error(error):
        return FIX
    return UNREADABLE if isinstance(error, Unreadable) else OTHER


def _worst(reports: list[Report]) -> Report:
    for kind in (FIX, CORRUPT, UNREADABLE, OTHER):
        for process, report in enumerate(reports):
            if report["kind"] == kind:
                return report | {"process": process}
    return {"kind": ""}


def consult(
    what: str,
    report: Report,
    judge: Callable[[list[Report]], Report],
    seconds: float = WAIT_SECONDS,
) -> Report:
    """Process 0 hears the report of each process; all get what it makes of them.

    By jax's store and not by devices, so that processes can speak whose devices or
    programs differ. Reports and answers are JSON; nothing is unpickled.
    """
    import jax

    if not jax.distributed.is_initialized() or jax.process_count() == 1:
        return judge([report])  # without a device, which may take long to start
    key = f"meshloom/{next(_QUESTIONS)} {what}"
    store().key_value_set(f"{key}/{jax.process_index()}", json.dumps(report))
    wait_for_all(what, seconds)
    if jax.process_index() == 0:
        reports = []
        for process in range(jax.process_count()):
            text = store().blocking_key_value_get(f"{key}/{process}", ANSWER_MS)
            store().key_value_delete(f"{key}/{process}")
            reports.append(json.loads(text))
        answer = json.dumps(judge(reports))
        store().key_value_set(f"{key}/answer", answer)
    return json.loads(store().blocking_key_value_get(f"{key}/answer", ANSWER_MS))


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
        names = ", ".join(name(int(process)) for process in missing)
        raise Unreachable(
            f"waited {seconds:g} s for all processes of this job at {where!r}, but "
            f"{names or 'process ?'} did not come. Look into its log."
        ) from error


def _gather(value: Any) -> list[int]:
    """The value (31 bits at most) of each process, by its number."""
    import numpy as np
    from jax.experimental import multihost_utils

    values = multihost_utils.process_allgather(np.int32(value))
    return np.atleast_1d(np.asarray(values)).ravel().tolist()
