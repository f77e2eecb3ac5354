"""The meshes of a certificate, and the devices of this machine that they run on."""

import dataclasses
import math
import subprocess
import sys
from collections.abc import Callable, Sequence

from ...launch.targets import local
from ...sharding import MeshSpec
from ...sharding.mesh import AXES

PROBE = "import jax; print(jax.default_backend(), jax.local_device_count())"
PROBE_SECONDS = 300


@dataclasses.dataclass(frozen=True)
class Target:
    """A mesh and the number of processes that its devices are divided among."""

    text: str
    spec: MeshSpec
    processes: int

    @classmethod
    def parse(cls, text: str) -> "Target":
        """Reads "data=2,tensor=2", or "data=4@2" for two processes."""
        sizes, at, count = text.partition("@")
        if at and not (count.isdigit() and int(count) > 0):
            raise ValueError(
                f"mesh {text!r}: expected a number of processes after @, found "
                f"{count!r}. Write it as data=4@2."
            )
        spec = MeshSpec.parse(sizes)
        if -1 in (getattr(spec, axis) for axis in AXES):
            raise ValueError(
                f"mesh {text!r}: a certificate is of one mesh, so no axis may be -1. "
                "Write its size."
            )
        target = cls(text, spec, int(count or 1))
        if target.devices % target.processes:
            raise ValueError(
                f"mesh {text!r}: its {target.devices} devices cannot be divided among "
                f"{target.processes} processes. Take a number that divides them."
            )
        return target

    @property
    def devices(self) -> int:
        return math.prod(getattr(self.spec, axis) for axis in AXES)

    @property
    def key(self) -> tuple[str, int]:
        return str(self.spec), self.processes


@dataclasses.dataclass(frozen=True)
class Machine:
    """Where the runs are: "cpu" has as many devices as are asked for."""

    platform: str = "cpu"
    devices: int = 0

    def environments(self, target: Target, port: int) -> list[dict[str, str]]:
        """What each process of a run is told."""
        each = target.devices // target.processes
        envs = local.environments(
            target.processes,
            port,
            cpu_devices=each if self.platform == "cpu" else None,
        )
        for number, env in enumerate(envs):
            if target.processes == 1:
                for name in ("COORDINATOR", "NUM_PROCESSES", "PROCESS_ID"):
                    del env[f"MESHLOOM_{name}"]
            if self.platform == "gpu":
                own = range(number * each, (number + 1) * each)
                for vendor in ("CUDA", "ROCM"):
                    env[f"JAX_{vendor}_VISIBLE_DEVICES"] = ",".join(map(str, own))
        return envs


def find_machine(
    targets: Sequence[Target], say: Callable[[str], None], platforms: str
) -> Machine:
    """The accelerators of this machine if all runs fit on them; otherwise the CPU.

    Args:
      platforms: the variable JAX_PLATFORMS; "cpu" asks for the CPU.
    """
    if platforms == "cpu":
        return Machine()
    # Not in this process, which would hold the devices that the runs need.
    found = subprocess.run(
        [sys.executable, "-P", "-c", PROBE],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=PROBE_SECONDS,
    )
    if found.returncode:
        raise ValueError(
            "jax finds no devices on this machine: "
            f"{(found.stderr.strip().splitlines() or ['it says nothing'])[-1]}. Mend "
            "that, or set JAX_PLATFORMS=cpu."
        )
    platform, count = found.stdout.split()[-2:]
    return choose(platform, int(count), targets, say)


def choose(
    platform: str, count: int, targets: Sequence[Target], say: Callable[[str], None]
) -> Machine:
    if platform == "cpu":
        return Machine()
    for target in targets:
        if target.devices > count:
            why = f"mesh {target.text} needs {target.devices}"
        elif platform != "gpu" and (target.devices, target.processes) != (count, 1):
            why = f"mesh {target.text} is not all of them in one process"
        else:
            continue
        say(f"On the CPU: there are {count} {platform} devices, and {why}")
        return Machine()
    return Machine(platform, count)
