"""Checks of the network, and of the variables that describe the job."""

import contextlib
import os
import queue
import socket
import struct
import sys
import threading
from collections.abc import Iterator, Mapping

from ...launch import process_env
from ...launch.masking import masked
from .findings import Finding

MATTER = ("MESHLOOM_", "JAX_", "XLA_", "LIBTPU_", "TPU_", "NCCL_", "CUDA_VISIBLE_")
SCHEDULERS = {
    "Slurm": "SLURM_JOB_ID",
    "Open MPI": "OMPI_COMM_WORLD_SIZE",
    "MPI (PMI)": "PMI_SIZE",
    "Kubernetes": "KUBERNETES_SERVICE_HOST",
}
LOOKUP_SECONDS = 4.0


def resolve(name: str, seconds: float = LOOKUP_SECONDS) -> list[str]:
    """Returns the addresses of a host; [] if the lookup fails or times out."""
    answers: queue.Queue[list[str]] = queue.Queue()

    def look() -> None:
        try:
            found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError):  # unknown or invalid name
            found = []
        answers.put(list(dict.fromkeys(str(info[4][0]) for info in found)))

    # An unreachable name server can block a lookup for half a minute.
    threading.Thread(target=look, daemon=True).start()
    with contextlib.suppress(queue.Empty):
        return answers.get(timeout=seconds)
    return []


def host(name: str, addresses: list[str]) -> Iterator[Finding]:
    """Checks whether other machines can reach this one by its host name."""
    if not addresses:
        yield Finding(
            "host name",
            f"{name} has no address",
            "problem",
            "Add this machine to DNS or to /etc/hosts.",
        )
    elif all(process_env.is_loopback(a.partition("%")[0]) for a in addresses):
        yield Finding(
            "host name",
            f"{name} is {', '.join(addresses)}, unreachable from other machines",
            "warning",
            "Multi-host jobs need its network address in /etc/hosts, or an explicit "
            "address of process 0.",
        )
    else:
        yield Finding("host name", f"{name} is {', '.join(addresses)}")


def port(
    number: int, *, address: str | None, interface: str | None, addresses: list[str]
) -> Iterator[Finding]:
    """Checks whether the coordinator of a job can listen here and be reached."""
    if interface is not None:
        address = _address_of(interface)
        if address is None:
            names = ", ".join(name for _, name in socket.if_nameindex())
            found = f"{interface} is not an interface with an IPv4 address"
            remedy = f"Pass one of {names} as --interface, or use --address."
            yield Finding("port", found, "problem", remedy)
            return
    address = address or (addresses or ["127.0.0.1"])[0]
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family) as listener, socket.socket(family) as caller:
        try:
            listener.bind((address, number))
            listener.listen(1)
            caller.settimeout(2)
            caller.connect((address, listener.getsockname()[1]))
        except OSError as error:
            where = f"{address}:{number}" if number else address
            found = f"cannot listen on {where}: {error.strerror or error}"
            remedy = (
                "Choose another --port, or stop the program that uses it (ss -ltnp); "
                "--address must belong to this machine."
            )
            yield Finding("port", found, "problem", remedy)
            return
        chosen = listener.getsockname()[1]
    summary = f"{address}:{chosen} is free for a coordinator"
    yield Finding("port", summary + (" (an example)" if not number else ""))


def _address_of(interface: str) -> str | None:
    """Returns the IPv4 address of an interface; Linux only."""
    if not sys.platform.startswith("linux"):
        return None
    import fcntl

    siocgifaddr = 0x8915
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        request = struct.pack("256s", interface.encode()[:15])
        try:
            answer = fcntl.ioctl(probe.fileno(), siocgifaddr, request)
        except OSError:  # no such interface, or one without an address
            return None
    return socket.inet_ntoa(answer[20:24])


def variables(environ: Mapping[str, str]) -> Iterator[Finding]:
    """Lists the relevant variables, with secrets masked, and checks them."""
    given = {
        name: value
        for name, value in sorted(environ.items())
        if name.startswith(MATTER) or name == "NPROC"
    }
    shown = [f"{name}={value}" for name, value in masked(given).items()]
    yield Finding("variables", " ".join(shown) or "no relevant variables are set")
    yield from _distributed(environ)
    devices, threads = (environ.get(n, "") for n in ("JAX_NUM_CPU_DEVICES", "NPROC"))
    if devices.isdigit() and int(devices) > 1:
        found = int(threads) if threads.isdigit() else os.cpu_count() or 1
        if found < 4 * int(devices):
            yield Finding(
                "threads",
                f"{found} for {devices} CPU devices: collectives may deadlock",
                "warning",
                f"Set NPROC={4 * int(devices)}, as --cpu-devices does.",
            )


def _distributed(environ: Mapping[str, str]) -> Iterator[Finding]:
    """Checks which process of which job a process started here would be."""
    try:
        found = process_env.find(environ)
    except ValueError as error:
        summary, _, remedy = str(error).partition(". ")
        yield Finding("distributed", summary, "problem", remedy)
        return
    if found is None:
        return
    summary = (
        f"process {found.process_id} of {found.num_processes}, found from "
        f"{found.source}; coordinator {found.coordinator}"
    )
    if resolve(found.address[0]):
        yield Finding("distributed", summary)
    else:
        remedy = "Fix MESHLOOM_COORDINATOR (HOST:PORT), or the name in DNS."
        summary += ", whose host has no address"
        yield Finding("distributed", summary, "problem", remedy)


def scheduler(environ: Mapping[str, str]) -> Iterator[Finding]:
    """Reports the scheduler that started this process."""
    found = [name for name, variable in SCHEDULERS.items() if variable in environ]
    yield Finding("scheduler", " and ".join(found) or "none")
