"""Settings of jax that a command makes before it uses a device."""

import os
from pathlib import Path


def use_cpu(num_devices: int) -> None:
    """Makes jax see `num_devices` CPU devices and nothing else."""
    import jax

    if num_devices < 1:
        raise ValueError(f"--cpu-devices must be >= 1, got {num_devices}")
    if num_devices > 1:
        # Each device blocks a thread of XLA's pool in every collective it waits in, and
        # the pool has one per core: with two collectives at a time all wait forever
        # (seen with pipelines that gather weights in each microbatch). jax reads the
        # variable when it starts the first device.
        os.environ.setdefault("NPROC", str(max(4 * num_devices, os.cpu_count() or 1)))
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", num_devices)


def use_compilation_cache() -> None:
    """Keeps compiled programs between runs, unless jax was already told where."""
    import jax

    if jax.config.values["jax_compilation_cache_dir"] is None:
        cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        jax.config.update(
            "jax_compilation_cache_dir", str(Path(cache) / "meshloom" / "compiled")
        )
