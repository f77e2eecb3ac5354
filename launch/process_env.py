"""Reads from the environment which process of which job this one is.

Meshloom's own variables can say it all. Otherwise the scheduler that started the
process says it, or both together: a launcher knows the coordinator, Slurm the index.

| variable | meaning |
|---|---|
| MESHLOOM_COORDINATOR | host:port of process 0 |
| MESHLOOM_NUM_PROCESSES | the number of processes |
| MESHLOOM_PROCESS_ID | the index of this process, from 0 |
| MESHLOOM_HOSTS | optional: h0,h1,... the host of each process |
| MESHLOOM_LOCAL_ID, MESHLOOM_LOCAL_COUNT | optional: index and count on this host |
| MESHLOOM_JOIN_SECONDS | optional: how long to wait for all processes; default 300 |
"""

import dataclasses
import ipaddress
from collections.abc import Mapping

from . import schedulers
from .schedulers import Facts

COORDINATOR, COUNT, NUMBER = NAMES = (
    "MESHLOOM_COORDINATOR",
    "MESHLOOM_NUM_PROCESSES",
    "MESHLOOM_PROCESS_ID",
)
HOSTS, JOIN_SECONDS = "MESHLOOM_HOSTS", "MESHLOOM_JOIN_SECONDS"
LOCAL_ID, LOCAL_COUNT = "MESHLOOM_LOCAL_ID", "MESHLOOM_LOCAL_COUNT"
OWN = "MESHLOOM variables"


@dataclasses.dataclass(frozen=True)
class ProcessEnv:
    """What the environment says about this process and its job.

    Attributes:
      coordinator: host:port of process 0; an IPv6 address is in brackets.
      local_id, local_count: index and count among the processes of this host; None if
        unknown.
      hosts: the host name of each process; () if unknown.
      num_hosts: how many hosts the job runs on; None if unknown.
      source: where this was found, such as "Slurm".
      join_seconds: how long to wait for all processes to join.
    """

    coordinator: str
    num_processes: int
    process_id: int
    source: str
    local_id: int | None = None
    local_count: int | None = None
    hosts: tuple[str, ...] = ()
    num_hosts: int | None = None
    join_seconds: float = 300.0

    @property
    def address(self) -> tuple[str, int]:
        """Returns the coordinator's host (without brackets) and port."""
        host, _, port = self.coordinator.rpartition(":")
        return host.removeprefix("[").removesuffix("]"), int(port)

    @property
    def is_on_several_hosts(self) -> bool:
        """Whether the job is known to run on more than one host."""
        return (self.num_hosts or 1) > 1

    def name(self, process: int) -> str:
        """Returns a process's name for messages, with its host if known."""
        if not self.hosts:
            return f"process {process}"
        return f"process {process} on {self.hosts[process]}"

    def describe(self, host: str) -> str:
        return (
            f"process {self.process_id} of {self.num_processes} on host {host}, found "
            f"from {self.source}; coordinator {self.coordinator}"
        )


def find(env: Mapping[str, str]) -> ProcessEnv | None:
    """Returns what the environment says; None if this process is not part of a job.

    Half a description is an error: a process that quietly trains alone costs a day
    before anyone notices. If Meshloom's own variables are complete, the scheduler's are
    ignored; if they are not, both must agree.
    """
    own = {name: env[name] for name in NAMES if name in env}
    facts = Facts(OWN) if len(own) == len(NAMES) else schedulers.find(env)
    if facts is None:
        if not own:
            return None
        facts = Facts(OWN)
    count = _agreed(own, COUNT, facts.num_processes, facts)
    number = _agreed(own, NUMBER, facts.process_id, facts)
    if number is None and count == 1:
        number = 0  # srun and mpirun do not number a job of one process
    coordinator = own.get(COORDINATOR, facts.coordinator)
    found = zip(NAMES, (coordinator, count, number), strict=True)
    missing = [name for name, value in found if value is None]
    if missing:
        raise ValueError(_half(missing, facts))
    assert coordinator is not None and count is not None and number is not None
    _check(coordinator, count, number)
    found = ProcessEnv(
        coordinator,
        count,
        number,
        facts.source,
        facts.local_id,
        facts.local_count,
        facts.hosts,
        facts.num_hosts,
    )
    found = _with_options(found, env)
    _check_loopback(found)
    return found


def is_loopback(host: str) -> bool:
    """Whether a name or address can only be reached from its own host."""
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name
        return False


def loopback_error(found: ProcessEnv, address: str) -> ValueError:
    host = found.address[0]
    what = f"{host}" if host == address else f"{host}, which is {address} here"
    return ValueError(
        f"the coordinator of this job is {what}: other hosts cannot reach it, and the "
        f"job runs on {found.num_hosts} hosts. Set {COORDINATOR} to a name or "
        f"address of process 0's host that the others can reach, such as "
        f"10.0.0.1:{found.address[1]}."
    )


def _agreed(
    own: Mapping[str, str], name: str, theirs: int | None, facts: Facts
) -> int | None:
    """Returns a number from our variable or the scheduler's, which must agree."""
    if name not in own:
        return theirs
    value = schedulers.whole(own, name)
    if theirs is not None and value != theirs:
        raise ValueError(
            f"{name} is {value}, but {facts.source} says {theirs}. Set all of "
            f"{', '.join(NAMES)} to override it, or unset {name}."
        )
    return value


def _half(missing: list[str], facts: Facts) -> str:
    remedy = facts.remedy or (
        f"Set all of {', '.join(NAMES)}, or none to train alone."
        if facts.source == OWN
        else f"{facts.source} does not provide it: set {' and '.join(missing)}, or "
        "none of these to train alone."
    )
    return (
        f"this process is part of a larger job, but {', '.join(missing)} is not set. "
        f"{remedy}"
    )


def _check(coordinator: str, count: int, number: int) -> None:
    host, _, port = coordinator.rpartition(":")
    if not host or not port.isdigit():
        raise ValueError(
            f"{COORDINATOR} is {coordinator!r}; expected host:port of process 0, such "
            "as host0:1234"
        )
    if ":" in host and not (host.startswith("[") and host.endswith("]")):
        raise ValueError(
            f"{COORDINATOR} is {coordinator!r}; write an IPv6 address in brackets: "
            f"[{host}]:{port}"
        )
    if not 0 < int(port) < 65536:
        raise ValueError(f"{COORDINATOR}: {port} is not a port; expected 1 to 65535")
    if number >= count:
        raise ValueError(
            f"{NUMBER} is {number}, but {COUNT} is {count}: expected 0 to "
            f"{count - 1}. Number the processes from 0."
        )


def _with_options(found: ProcessEnv, env: Mapping[str, str]) -> ProcessEnv:
    """Applies Meshloom's optional variables."""
    changes: dict = {}
    if HOSTS in env:
        hosts = tuple(env[HOSTS].split(","))
        if len(hosts) != found.num_processes or "" in hosts:
            raise ValueError(
                f"{HOSTS} is {env[HOSTS]!r}; expected {found.num_processes} host names "
                "separated by commas, one for each process, in order"
            )
        changes |= {"hosts": hosts, "num_hosts": len(set(hosts))}
        mine = [i for i, host in enumerate(hosts) if host == hosts[found.process_id]]
        changes["local_id"] = mine.index(found.process_id)
        changes["local_count"] = len(mine)
    for name, field in ((LOCAL_ID, "local_id"), (LOCAL_COUNT, "local_count")):
        if name in env:
            changes[field] = schedulers.whole(env, name)
    if (LOCAL_ID in env) != (LOCAL_COUNT in env):
        raise ValueError(f"set both {LOCAL_ID} and {LOCAL_COUNT}, or neither")
    found = dataclasses.replace(found, **changes)
    if found.local_count is not None and (found.local_id or 0) >= found.local_count:
        raise ValueError(
            f"{LOCAL_ID} is {found.local_id}, but there are {found.local_count} "
            f"processes on this host ({LOCAL_COUNT}): number them from 0"
        )
    if JOIN_SECONDS not in env:
        return found
    seconds = schedulers.whole(env, JOIN_SECONDS)
    if seconds < 1:
        raise ValueError(f"{JOIN_SECONDS} must be at least 1, got {seconds}")
    return dataclasses.replace(found, join_seconds=float(seconds))


def _check_loopback(found: ProcessEnv) -> None:
    host = found.address[0]
    if found.is_on_several_hosts and is_loopback(host):
        raise loopback_error(found, host)
