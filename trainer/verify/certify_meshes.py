"""The meshes of a certificate, and the local devices that they run on."""

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
class ProcessMesh:
    """A mesh and the number of processes that its devices are split across."""

    text: str
    spec: MeshSpec
    processes: int

    @classmethod
    def parse(cls, text: str) -> "ProcessMesh":
        """Parses "data=2,tensor=2", or "data=4@2" for two processes."""
        sizes, at, count = text.partition("@")
        if at and not (count.isdigit() and int(count) > 0):
            raise ValueError(
                f"mesh {text!r}: expected a number of processes after @, got "
                f"{count!r}. Example: data=4@2."
            )
        spec = MeshSpec.parse(sizes)
        if -1 in (getattr(spec, axis) for axis in AXES):
            raise ValueError(
                f"mesh {text!r}: every axis needs an explicit size here, -1 is not "
                "allowed"
            )
        mesh = cls(text, spec, int(count or 1))
        if mesh.devices % mesh.processes:
            raise ValueError(
                f"mesh {text!r}: its {mesh.devices} devices cannot be split evenly "
                f"across {mesh.processes} processes"
            )
        return mesh

    @property
    def devices(self) -> int:
        return math.prod(getattr(self.spec, axis) for axis in AXES)

    @property
    def key(self) -> tuple[str, int]:
        return str(self.spec), self.processes


@dataclasses.dataclass(frozen=True)
class Machine:
    """The devices that the runs use; "cpu" provides as many as a mesh needs."""

    platform: str = "cpu"
    devices: int = 0

    def environments(self, mesh: ProcessMesh, port: int) -> list[dict[str, str]]:
        """Returns the environment variables of each process of a run."""
        each = mesh.devices // mesh.processes
        envs = local.environments(
            mesh.processes,
            port,
            cpu_devices=each if self.platform == "cpu" else None,
        )
        for number, env in enumerate(envs):
            if mesh.processes == 1:
                for name in ("COORDINATOR", "NUM_PROCESSES", "PROCESS_ID"):
                    del env[f"MESHLOOM_{name}"]
            if self.platform == "gpu":
                own = range(number * each, (number + 1) * each)
                for vendor in ("CUDA", "ROCM"):
                    env[f"JAX_{vendor}_VISIBLE_DEVICES"] = ",".join(map(str, own))
        return envs


def find_machine(
    meshes: Sequence[ProcessMesh], log: Callable[[str], None], platforms: str
) -> Machine:
    """Returns the local accelerators if all runs fit on them, otherwise the CPU.

    Args:
      meshes: the meshes of all runs.
      log: receives a line if accelerators are left unused.
      platforms: the value of JAX_PLATFORMS; "cpu" selects the CPU.
    """
    if platforms == "cpu":
        return Machine()
    # In a subprocess, because this one would hold on to devices the runs need.
    found = subprocess.run(
        [sys.executable, "-P", "-c", PROBE],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=PROBE_SECONDS,
    )
    if found.returncode:
        raise ValueError(
            "jax found no devices on this machine: "
            f"{(found.stderr.strip().splitlines() or ['no error output'])[-1]}. Fix "
            "that, or set JAX_PLATFORMS=cpu."
        )
    platform, count = found.stdout.split()[-2:]
    return choose_machine(platform, int(count), meshes, log)


def choose_machine(
    platform: str, count: int, meshes: Sequence[ProcessMesh], log: Callable[[str], None]
) -> Machine:
    """Selects the accelerators, or the CPU if a mesh does not fit on them."""
    if platform == "cpu":
        return Machine()
    for mesh in meshes:
        if mesh.devices > count:
            why = f"mesh {mesh.text} needs {mesh.devices}"
        elif platform != "gpu" and (mesh.devices, mesh.processes) != (count, 1):
            why = f"mesh {mesh.text} does not use all of them in one process"
        else:
            continue
        log(f"Using the CPU: there are {count} {platform} devices, but {why}")
        return Machine()
    return Machine(platform, count)
