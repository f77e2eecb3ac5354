"""A Kubernetes job as the user describes it, validated."""

import dataclasses
import math
import re

from ..flags import run_folder
from ..masking import holds_secret, looks_secret, secret_argument

FORMS = ("jobset", "trainjob")
# The longest DNS label; Kubernetes adds "-" and five letters to the name of a pod.
LONGEST, SUFFIX = 63, 6
TPU, GPU = "google.com/tpu", "nvidia.com/gpu"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """What to run, and where.

    Attributes:
      command: arguments of `meshloom`.
      hosts: processes per slice; each has a host and all of its accelerators.
      tpu: (accelerator, topology) as in GKE's node labels; None without TPUs.
      devices: accelerators per host.
      requests: other resources per host, such as {"cpu": "8"}.
      volumes: persistent volume claims, by mount path.
      env, secrets: variables, and the (secret, key) of those whose value is secret.
      queue: a Kueue queue; "" for none.
      max_restarts: None for 5; the runtime of a TrainJob has its own limit.
      runtime: the runtime of a TrainJob.
      learners: train with so many, each on `hosts`; 0 for an ordinary job.
      servers: of the service through which learners exchange parameters.
      save_commits: commits between two checkpoints of the service.
      token: the (secret, key) that learners and service show each other.
      is_fenced: whether a network policy lets only the job's own pods reach its ports.
    """

    name: str
    image: str
    command: tuple[str, ...]
    hosts: int
    slices: int = 1
    tpu: tuple[str, str] | None = None
    devices: int = 0
    requests: dict[str, str] = dataclasses.field(default_factory=dict)
    volumes: dict[str, str] = dataclasses.field(default_factory=dict)
    env: dict[str, str] = dataclasses.field(default_factory=dict)
    secrets: dict[str, tuple[str, str]] = dataclasses.field(default_factory=dict)
    namespace: str = "default"
    queue: str = ""
    grace_seconds: int = 120
    max_restarts: int | None = None
    port: int = 8476
    form: str = "jobset"
    runtime: str = "jax-distributed"
    learners: int = 0
    servers: int = 1
    save_commits: int | None = None
    token: tuple[str, str] | None = None
    is_fenced: bool = True

    def __post_init__(self):
        self._check_numbers()
        self._check_names()
        self._check_secrets()
        if self.form == "trainjob":
            self._check_trainjob()
        if self.learners:
            self._check_fleet()

    @property
    def group(self) -> str:
        """The name of the replicated job; for a TrainJob, its runtime's."""
        if self.learners:
            return "learner"
        return "node" if self.form == "trainjob" else "worker"

    @property
    def container(self) -> str:
        return "node" if self.form == "trainjob" else "meshloom"

    @property
    def resource(self) -> str | None:
        if not self.devices:
            return None
        return TPU if self.tpu else GPU

    @property
    def run_folder(self) -> str:
        return run_folder(self.command)

    def _check_numbers(self) -> None:
        least = {"hosts": 1, "slices": 1, "devices": 0, "grace_seconds": 1, "port": 1}
        least |= {"learners": 0, "servers": 1}
        for name, number in least.items():
            if getattr(self, name) < number:
                found = getattr(self, name)
                raise ValueError(
                    f"{_flag(name)} must be at least {number}, got {found}"
                )
        if self.port > 65535:
            raise ValueError(f"--port must be at most 65535, got {self.port}")
        if self.max_restarts is not None and self.max_restarts < 0:
            raise ValueError(
                f"--max-restarts must not be negative, got {self.max_restarts}"
            )
        if self.tpu is None:
            return
        accelerator, topology = self.tpu
        chips = chips_of(topology)
        if self.hosts * self.devices != chips:
            raise ValueError(
                f"--tpu-topology {topology} of {accelerator} has {chips} chips, but "
                f"{self.hosts} host(s) with {self.devices} chips have "
                f"{self.hosts * self.devices}. Leave --hosts out, or set "
                "--chips-per-host to the number in a node of the pool."
            )

    def _check_names(self) -> None:
        for flag in ("name", "namespace"):
            if not re.fullmatch(r"[a-z]([a-z0-9-]*[a-z0-9])?", getattr(self, flag)):
                raise ValueError(
                    f"--{flag} is {getattr(self, flag)!r}; expected lowercase "
                    "letters, digits and -, starting with a letter, as in a host name"
                )
        longest = f"{self.name}-{self.group}-{self.slices - 1}-{self.hosts - 1}"
        if self.learners:
            names = (f"learner-{self.learners - 1}-{self.hosts - 1}", "coordinator-0-0")
            longest = max((f"{self.name}-{name}" for name in names), key=len)
        if (excess := len(longest) + SUFFIX - LONGEST) > 0:
            raise ValueError(
                f"--name {self.name} is too long: pods are called {longest}-abcde, but "
                f"names have at most {LONGEST} characters. Shorten it by {excess}."
            )
        for name in (*self.env, *self.secrets):
            if not re.fullmatch(r"[A-Za-z_]\w*", name, re.ASCII):
                raise ValueError(f"{name!r} is not a variable name; expected A_NAME")
        if both := sorted({*self.env} & {*self.secrets}):
            raise ValueError(f"{both[0]} is in both --env and --secret-env; remove one")
        for folder in self.volumes:
            if not folder.startswith("/"):
                raise ValueError(
                    f"--volume mounts at {folder!r}; expected an absolute path, such "
                    "as CLAIM:/checkpoints"
                )
        for name in self.requests:
            if not re.fullmatch(r"[a-z][a-z0-9./-]*", name):
                raise ValueError(
                    f"--request of {name!r}; expected a resource, such as cpu=8"
                )

    def _check_secrets(self) -> None:
        """Refuses secrets: a manifest is printed, stored and read by many."""
        for name, value in self.env.items():
            if value and (looks_secret(name) or holds_secret(value)):
                raise ValueError(
                    f"--env {name} looks like a secret, and would be readable in the "
                    "manifest. Put it into a Secret of the cluster and refer to it: "
                    f"--secret-env {name}=SECRET:KEY"
                )
        if shown := secret_argument(self.command):
            raise ValueError(
                f"the command contains {shown!r}, which looks like a secret and would "
                "be readable in the manifest. Let the run read it from a variable: "
                "--secret-env NAME=SECRET:KEY"
            )

    def _check_trainjob(self) -> None:
        if self.slices > 1:
            raise ValueError(
                f"--slices is {self.slices}, but a TrainJob has one group of hosts; "
                "use --form jobset"
            )
        if self.max_restarts is not None:
            raise ValueError(
                "--max-restarts cannot be set for a TrainJob: it has the failure "
                f"policy of its runtime {self.runtime}. Leave it out, or use --form "
                "jobset"
            )

    def _check_fleet(self) -> None:
        if self.form == "trainjob" or self.slices > 1:
            found = "--slices" if self.slices > 1 else "--form trainjob"
            raise ValueError(
                f"{found} cannot be combined with --learners: each learner is one "
                "group of hosts of a JobSet. Leave it out."
            )
        if self.token is None:
            raise ValueError(
                "--learners needs --token-secret SECRET:KEY, without which everyone "
                "who reaches the service could change the parameters. Make one with: "
                "kubectl create secret generic SECRET --from-literal=KEY=..."
            )
        if not self.run_folder.startswith("/"):
            raise ValueError(
                f"the run folder is {self.run_folder!r}, but learners and service "
                "share it: expected an absolute path on a --volume, such as "
                "train --workdir /runs/x"
            )


def chips_of(topology: str) -> int:
    """Returns the number of chips of a topology such as 4x4 or 2x2x4."""
    if not re.fullmatch(r"[1-9]\d*(x[1-9]\d*){1,2}", topology):
        raise ValueError(
            f"--tpu-topology is {topology!r}; expected two or three sizes, such as 4x4"
        )
    return math.prod(map(int, topology.split("x")))


def _flag(name: str) -> str:
    names = {"devices": "--gpus or --chips-per-host"}
    return names.get(name, f"--{name.replace('_', '-')}")
