"""Reads what schedulers say about a process's job in environment variables.

Each reader returns None unless its scheduler started this process as one of several.
MPI launchers come before Slurm: inside a Slurm job they start their own daemons with
srun, whose variables the processes inherit.
"""

import dataclasses
import re
import zlib
from collections.abc import Mapping

# The ports we choose from, below the ephemeral range of operating systems.
PORTS = range(20000, 28000)
# Slurm gives steps without srun (a batch script, an interactive shell) ids from here.
SPECIAL_STEPS = 0xFFFFFFF0
# Next to the ports that libtpu uses (8471 to 8481).
TPU_PORT = 8482


@dataclasses.dataclass(frozen=True)
class Facts:
    """What is known about a job; None and () for what is not."""

    source: str
    num_processes: int | None = None
    process_id: int | None = None
    coordinator: str | None = None
    local_id: int | None = None
    local_count: int | None = None
    hosts: tuple[str, ...] = ()
    num_hosts: int | None = None
    remedy: str = ""


def find(env: Mapping[str, str]) -> Facts | None:
    for reader in (_open_mpi, _mpich, _slurm, _cloud_tpu, _kubeflow, _kubernetes):
        if (facts := reader(env)) is not None:
            return facts
    return None


def whole(env: Mapping[str, str], name: str) -> int:
    """Returns the whole number in a variable that is set."""
    if not env[name].isdecimal():
        raise ValueError(f"{name} must be a whole number, got {env[name]!r}")
    return int(env[name])


def expand(nodes: str) -> list[str]:
    """Expands a Slurm node list: n[0-1,4],m7 is n0, n1, n4, m7."""
    found = []
    for part in re.findall(r"(?:[^,\[]|\[[^\]]*\])+", nodes):
        names = [""]
        for text, ranges in re.findall(r"([^\[]*)(?:\[([^\]]*)\])?", part):
            ends = [end for r in ranges.split(",") for end in _range(r)]
            names = [name + text + end for name in names for end in ends]
        found += names
    return found


def _range(text: str) -> list[str]:
    """Expands 008-011 with its zeros; returns anything else as it is."""
    first, dash, last = text.partition("-")
    if not dash:
        return [text]
    return [str(n).zfill(len(first)) for n in range(int(first), int(last) + 1)]


def _port(*job: str) -> int:
    """Returns a port that all processes of a job agree on, and few other jobs share."""
    return PORTS[zlib.crc32(".".join(job).encode()) % len(PORTS)]


def _optional(env: Mapping[str, str], name: str) -> int | None:
    return whole(env, name) if name in env else None


def _open_mpi(env: Mapping[str, str]) -> Facts | None:
    prefix = "OMPI_COMM_WORLD_"
    if not {f"{prefix}RANK", f"{prefix}SIZE"} <= env.keys():
        return None
    job = env.get("PMIX_NAMESPACE") or env.get("OMPI_MCA_ess_base_jobid", "Open MPI")
    facts = _mpi(env, "Open MPI", prefix, job)
    # Open MPI 4 says where mpirun runs. Process 0 is there too, unless a host list says
    # otherwise; then binding to that address fails. Open MPI 5 does not say it.
    uri = re.search(r"tcp://([\d.]+)", env.get("OMPI_MCA_orte_hnp_uri", ""))
    if facts is not None and facts.coordinator is None and uri is not None:
        address = f"{uri[1]}:{_port(job)}"
        facts = dataclasses.replace(facts, coordinator=address, remedy="")
    return facts


def _mpich(env: Mapping[str, str]) -> Facts | None:
    if not {"PMI_RANK", "PMI_SIZE"} <= env.keys():
        return None
    if "SLURM_STEP_ID" in env and "MPI_LOCALRANKID" not in env:
        return None  # srun itself speaks PMI, and its own variables say more
    renamed = {
        "RANK": "PMI_RANK",
        "SIZE": "PMI_SIZE",
        "LOCAL_RANK": "MPI_LOCALRANKID",
        "LOCAL_SIZE": "MPI_LOCALNRANKS",
    }
    known = {new: env[old] for new, old in renamed.items() if old in env}
    # MPICH's mpiexec does not give its job an id: a second job on this host at the same
    # time gets an error that the port is in use.
    return _mpi(known, "MPICH", "", env.get("PMI_JOBID", "MPICH"))


def _mpi(env: Mapping[str, str], source: str, prefix: str, job: str) -> Facts | None:
    count = whole(env, f"{prefix}SIZE")
    if count == 1:
        return None
    local_count = _optional(env, f"{prefix}LOCAL_SIZE")
    facts = Facts(
        source,
        count,
        whole(env, f"{prefix}RANK"),
        local_id=_optional(env, f"{prefix}LOCAL_RANK"),
        local_count=local_count,
        remedy=f"{source} does not say where process 0 is: start the job with "
        "`meshloom launch mpi`, or set MESHLOOM_COORDINATOR to its host:port.",
    )
    if local_count == count:
        coordinator = f"127.0.0.1:{_port(job)}"
        return dataclasses.replace(facts, num_hosts=1, coordinator=coordinator)
    if local_count is not None:  # a lower bound: hosts may have fewer
        facts = dataclasses.replace(facts, num_hosts=-(-count // local_count))
    return facts


def _slurm(env: Mapping[str, str]) -> Facts | None:
    if not {"SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_PROCID"} <= env.keys():
        return None
    if whole(env, "SLURM_STEP_ID") >= SPECIAL_STEPS:
        return None
    named = [n for n in ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS") if n in env]
    count = whole(env, named[0]) if named else 1
    if count == 1:
        return None
    nodes = expand(env.get("SLURM_STEP_NODELIST", ""))
    job = ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT")
    port = _port(*(env.get(name, "0") for name in job))
    tasks = _tasks(env.get("SLURM_STEP_TASKS_PER_NODE", ""))
    number, local_id = whole(env, "SLURM_PROCID"), _optional(env, "SLURM_LOCALID")
    node = _optional(env, "SLURM_NODEID")
    hosts: tuple[str, ...] = ()
    # With blocks, the first node has the first tasks; srun has other distributions.
    in_blocks = env.get("SLURM_DISTRIBUTION", "block").startswith("block")
    if in_blocks and len(tasks) == len(nodes) and sum(tasks) == count:
        hosts = tuple(n for n, k in zip(nodes, tasks, strict=True) for _ in range(k))
    return Facts(
        "Slurm",
        count,
        number,
        f"{nodes[0]}:{port}" if nodes else None,
        local_id,
        tasks[node] if node is not None and node < len(tasks) else None,
        hosts,
        _optional(env, "SLURM_STEP_NUM_NODES") or len(nodes) or None,
    )


def _tasks(text: str) -> list[int]:
    """Returns the tasks of each node from Slurm's 2(x3),1."""
    found = []
    for number, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", text):
        found += [int(number)] * int(times or 1)
    return found


def _cloud_tpu(env: Mapping[str, str]) -> Facts | None:
    """Reads a slice of several hosts on GKE, or several slices."""
    if not {"TPU_WORKER_ID", "TPU_WORKER_HOSTNAMES"} <= env.keys():
        return None
    hosts = tuple(env["TPU_WORKER_HOSTNAMES"].split(","))
    slices = _optional(env, "MEGASCALE_NUM_SLICES") or 1
    this = _optional(env, "MEGASCALE_SLICE_ID") or 0
    if len(hosts) * slices == 1:
        return None
    first = hosts[0]
    if slices > 1:
        first = env.get("MEGASCALE_COORDINATOR_ADDRESS", "").split(":")[0]
    return Facts(
        "Cloud TPU",
        len(hosts) * slices,
        whole(env, "TPU_WORKER_ID") + this * len(hosts),
        f"{first}:{TPU_PORT}" if first else None,
        0,
        1,
        hosts if slices == 1 else (),
        len(hosts) * slices,
    )


def _kubeflow(env: Mapping[str, str]) -> Facts | None:
    """Reads the variables that the JAX runtime of Kubeflow Trainer 2 documents."""
    count, number = "JAX_NUM_PROCESSES", "JAX_PROCESS_ID"
    if not {count, number} & env.keys() or env.get(count) == "1":
        return None
    address = env.get("JAX_COORDINATOR_ADDRESS")
    missing = {count, number, "JAX_COORDINATOR_ADDRESS"} - env.keys()
    remedy = f"Kubeflow would set {', '.join(sorted(missing))}, which is missing too."
    return Facts(
        "Kubernetes",
        _optional(env, count),
        _optional(env, number),
        address,
        remedy=remedy if missing else "",
    )


def _kubernetes(env: Mapping[str, str]) -> Facts | None:
    """Reads the index of a pod of an indexed Job; our variables say the rest.

    In a JobSet of several jobs, a pod is also told the index of its job.
    """
    ours = {"MESHLOOM_COORDINATOR", "MESHLOOM_NUM_PROCESSES"} & env.keys()
    if "JOB_COMPLETION_INDEX" not in env or not ours:
        return None
    number = whole(env, "JOB_COMPLETION_INDEX")
    if "MESHLOOM_JOB_INDEX" in env:
        each = "MESHLOOM_PROCESSES_PER_JOB"
        if each not in env:
            raise ValueError(f"MESHLOOM_JOB_INDEX is set, but {each} is not. Set both.")
        number += whole(env, "MESHLOOM_JOB_INDEX") * whole(env, each)
    return Facts("Kubernetes", process_id=number)
