"""Joins a job of several processes, or fails loudly."""

import socket
from collections.abc import MutableMapping

from ...launch import gpus, process_env, rendezvous
from . import fault_points
from .group import Group
from .store import JaxStore

# How long a process that shuts down waits for the others. After training all shut down
# together; one that fails ends the job for all of them after this time.
SHUTDOWN_SECONDS = 10
# jax aborts a process that waits longer; all have already met in the rendezvous.
CONNECT_SECONDS = 120


def join(environ: MutableMapping[str, str]) -> Group:
    """Joins the job that the environment describes, if any.

    Runs no collective: processes that differ must find out through the store, not by
    waiting for each other in different programs. `connect` runs the first one.

    Args:
      environ: see launch/process_env.py. It is modified, to assign GPUs to processes
        and to bypass proxies.

    Returns:
      The group of the job's processes; a group of one if there is no job.
    """
    hold = fault_points.of_environment(environ)
    place = process_env.find(environ)
    if place is None:
        return Group(hold=hold)
    host = socket.gethostname()
    bind = rendezvous.resolve(place) if place.process_id == 0 else None
    print(place.describe(host) + _loopback_note(place, bind), flush=True)
    _assign_gpus(place, environ)
    import jax

    has_gpus = gpus.num_installed() > 0 and jax.config.values["jax_platforms"] != "cpu"
    hosts = rendezvous.meet(place, host, bind, has_gpus=has_gpus)
    if place.process_id != 0:
        rendezvous.wait_for_service(place)
    _bypass_proxies(place.address[0], environ)
    port = place.address[1]
    if bind is not None:
        bind = f"[{bind}]:{port}" if ":" in bind else f"{bind}:{port}"
    # It would handle SIGTERM itself and hide the second one; see preemption.py.
    jax.config.update("jax_enable_preemption_service", False)
    jax.distributed.initialize(
        place.coordinator,
        place.num_processes,
        place.process_id,
        # jax would query the scheduler again and take one GPU per process.
        cluster_detection_method="deactivate",
        initialization_timeout=CONNECT_SECONDS,
        coordinator_bind_address=bind,
        shutdown_timeout_seconds=SHUTDOWN_SECONDS,
    )
    count = _start_devices(host)
    if count != place.num_processes:
        raise ValueError(f"expected {place.num_processes} processes, got {count}")
    if place.num_processes > 1 and jax.default_backend() == "cpu":
        # Only process 0 would hit the cache. It would run ahead of the processes that
        # compile, and gloo waits at most 30 s for the other members of a group.
        jax.config.update("jax_enable_compilation_cache", False)
    store = JaxStore() if place.num_processes > 1 else None
    index, size = place.process_id, place.num_processes
    return Group(index, size, store, hosts=hosts, hold=hold)


def _start_devices(host: str) -> int:
    """Starts the devices and returns the number of processes that own them.

    On the CPU, gloo advertises the address that this host's name resolves to. If it
    does not resolve, gloo fails with nothing but a line number of its own source.
    """
    import jax

    try:
        return jax.process_count()
    except RuntimeError as error:
        if "gloo/transport/tcp" not in str(error):
            raise
        raise ValueError(
            f"the name of this host, {host!r}, does not resolve to an address, and "
            "other processes must reach this one by it. Add it to DNS or to "
            "/etc/hosts, with an address that the other hosts can reach."
        ) from error


def connect() -> None:
    """Runs the first collective of all devices.

    Every process must call this, within 30 s of each other: gloo times out in the first
    collective, and waits indefinitely in later ones.
    """
    from jax.experimental import multihost_utils

    multihost_utils.sync_global_devices("connect")


def _loopback_note(place: process_env.ProcessEnv, bind: str | None) -> str:
    """Returns a note if process 0's name resolves to loopback, such as 127.0.1.1."""
    if bind is None or not process_env.is_loopback(bind):
        return ""
    if process_env.is_loopback(place.address[0]):
        return ""
    return f" ({bind}: reachable from this host only)"


def _bypass_proxies(host: str, environ: MutableMapping[str, str]) -> None:
    """Makes jax connect to the coordinator directly, as the rendezvous did.

    Through http_proxy it would fail and abort. jax's warning about proxies is disabled,
    since it no longer applies.
    """
    import jax

    if not any(name.lower().endswith("_proxy") for name in environ):
        return
    variable = "no_grpc_proxy"
    before = environ.get(variable) or environ.get("no_proxy", "")
    environ[variable] = ",".join(filter(None, (before, host)))
    jax.config.update("jax_check_proxy_envs", False)


def _assign_gpus(
    place: process_env.ProcessEnv, environ: MutableMapping[str, str]
) -> None:
    """Assigns this process its GPUs before jax sees any; Slurm has already done so."""
    if place.source == "Slurm" or place.local_id is None or place.local_count is None:
        return
    own = gpus.share(environ, gpus.num_installed(), place.local_id, place.local_count)
    if own is not None:
        environ[gpus.VARIABLE] = own
        print(f"{gpus.VARIABLE}={own}", flush=True)
