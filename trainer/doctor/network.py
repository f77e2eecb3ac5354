"""What the doctor finds of the network, and of what the job was told about it."""

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
    """Addresses of a host; [] where it has none, or nobody answers in time."""
    answers: queue.Queue[list[str]] = queue.Queue()

    def look() -> None:
        try:
            found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError):  # no such name, or no name at all
            found = []
        answers.put(list(dict.fromkeys(str(info[4][0]) for info in found)))

    # A name server that is gone can hold a lookup for half a minute.
    threading.Thread(target=look, daemon=True).start()
    with contextlib.suppress(queue.Empty):
        return answers.get(timeout=seconds)
    return []


def host(name: str, addresses: list[str]) -> Iterator[Finding]:
    """Whether other machines can find this one by its own name."""
    if not addresses:
        yield Finding(
            "host name",
            f"{name} has no address",
            "problem",
            "Give it one in DNS or in /etc/hosts, with the address of this machine.",
        )
    elif all(process_env.is_loopback(a.partition("%")[0]) for a in addresses):
        yield Finding(
            "host name",
            f"{name} is {', '.join(addresses)}, which other machines cannot reach",
            "warning",
            "Jobs of several machines need its network address in /etc/hosts, or an "
            "explicit address of process 0.",
        )
    else:
        yield Finding("host name", f"{name} is {', '.join(addresses)}")


def port(
    number: int, *, address: str | None, interface: str | None, addresses: list[str]
) -> Iterator[Finding]:
    """Whether the coordinator of a job could listen here, and be reached."""
    if interface is not None:
        address = _address_of(interface)
        if address is None:
            names = ", ".join(name for _, name in socket.if_nameindex())
            found = f"{interface} is no interface with an IPv4 address"
            remedy = f"Give --interface one of {names}, or use --address."
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
                "Choose another --port, or end the program that has it (ss -ltnp); "
                "--address must be one of this machine."
            )
            yield Finding("port", found, "problem", remedy)
            return
        chosen = listener.getsockname()[1]
    words = f"{address}:{chosen} is free for a coordinator"
    yield Finding("port", words + (", as an example" if not number else ""))


def _address_of(interface: str) -> str | None:
    """The IPv4 address of an interface; Linux alone can be asked."""
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
    """What is set, without secrets, and whether it makes sense."""
    given = {
        name: value
        for name, value in sorted(environ.items())
        if name.startswith(MATTER) or name == "NPROC"
    }
    shown = [f"{name}={value}" for name, value in masked(given).items()]
    yield Finding("variables", " ".join(shown) or "none that matter are set")
    yield from _place(environ)
    devices, threads = (environ.get(n, "") for n in ("JAX_NUM_CPU_DEVICES", "NPROC"))
    if devices.isdigit() and int(devices) > 1:
        found = int(threads) if threads.isdigit() else os.cpu_count() or 1
        if found < 4 * int(devices):
            yield Finding(
                "threads",
                f"{found} for {devices} CPU devices: they may wait for ever",
                "warning",
                f"Set NPROC={4 * int(devices)}; meshloom's own --cpu-devices does.",
            )


def _place(environ: Mapping[str, str]) -> Iterator[Finding]:
    """Where a process that is started here would stand in a job."""
    try:
        found = process_env.find(environ)
    except ValueError as error:
        words, _, remedy = str(error).partition(". ")
        yield Finding("place in the job", words, "problem", remedy)
        return
    if found is None:
        return
    words = (
        f"process {found.process_id} of {found.num_processes}, found from "
        f"{found.source}; they meet at {found.coordinator}"
    )
    if resolve(found.address[0]):
        yield Finding("place in the job", words)
    else:
        remedy = "Mend MESHLOOM_COORDINATOR (HOST:PORT), or the name in DNS."
        words += "; that host has no address"
        yield Finding("place in the job", words, "problem", remedy)


def scheduler(environ: Mapping[str, str]) -> Iterator[Finding]:
    found = [name for name, variable in SCHEDULERS.items() if variable in environ]
    yield Finding("scheduler", " and ".join(found) or "none: this is a plain shell")
