"""Joins a job of several processes, or fails loudly."""

import socket
from collections.abc import MutableMapping

from ...launch import gpus, process_env, rendezvous
from .fault_points import Hold
from .group import Group
from .store import JaxStore

# How long a process that leaves waits for the others. Processes that trained leave
# together; one that leaves with an error ends the job for all after this time.
LEAVING_SECONDS = 10
# All processes have met before jax connects them; it aborts those that wait longer.
CONNECT_SECONDS = 120


def join(environ: MutableMapping[str, str]) -> Group:
    """Joins the job that the environment describes, if any.

    Runs no collective: processes that differ must find out through the store, not by
    waiting for each other in different programs. `connect` runs the first one.

    Args:
      environ: see launch/process_env.py. GPUs are divided and proxies avoided by
        changing it.

    Returns:
      The group of the job's processes; a group of one without a job.
    """
    hold = Hold.of_environment(environ)
    place = process_env.find(environ)
    if place is None:
        return Group(hold=hold)
    host = socket.gethostname()
    bind = rendezvous.resolve(place) if place.process_id == 0 else None
    print(place.describe(host) + _meaning(place, bind), flush=True)
    _divide_gpus(place, environ)
    import jax

    has_gpus = gpus.num_installed() > 0 and jax.config.values["jax_platforms"] != "cpu"
    hosts = rendezvous.meet(place, host, bind, has_gpus=has_gpus)
    if place.process_id != 0:
        rendezvous.wait_for_service(place)
    _avoid_proxies(place.address[0], environ)
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
    store = JaxStore() if place.num_processes > 1 else None
    index, size = place.process_id, place.num_processes
    return Group(index, size, store, hosts=hosts, hold=hold)


def _start_devices(host: str) -> int:
    """Starts the devices and returns the number of processes that own them.

    On the CPU gloo tells the others the address of this host's own name. If there is
    none, it fails with a line number of its own source.
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
    """Runs the first collective of all devices.

    Every process must arrive at about the same time: gloo gives up on the first
    collective after 30 s, and waits as long as it must in later ones.
    """
    from jax.experimental import multihost_utils

    multihost_utils.sync_global_devices("connect")


def _meaning(place: process_env.ProcessEnv, bind: str | None) -> str:
    """Says what process 0's name resolves to if that is surprising (127.0.1.1)."""
    if bind is None or not process_env.is_loopback(bind):
        return ""
    if process_env.is_loopback(place.address[0]):
        return ""
    return f" ({bind}: reached from this host only)"


def _avoid_proxies(host: str, environ: MutableMapping[str, str]) -> None:
    """Lets jax reach the coordinator directly, as the rendezvous did.

    Through http_proxy it would fail and abort; its warning is then not needed.
    """
    import jax

    if not any(name.lower().endswith("_proxy") for name in environ):
        return
    variable = "no_grpc_proxy"
    before = environ.get(variable) or environ.get("no_proxy", "")
    environ[variable] = ",".join(filter(None, (before, host)))
    jax.config.update("jax_check_proxy_envs", False)


def _divide_gpus(
    place: process_env.ProcessEnv, environ: MutableMapping[str, str]
) -> None:
    """Gives each process its GPUs before jax sees any; Slurm has already done so."""
    if place.source == "Slurm" or place.local_id is None or place.local_count is None:
        return
    own = gpus.share(environ, gpus.num_installed(), place.local_id, place.local_count)
    if own is not None:
        environ[gpus.VARIABLE] = own
        print(f"{gpus.VARIABLE}={own}", flush=True)
