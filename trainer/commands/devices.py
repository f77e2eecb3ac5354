"""Configures Python, jax and gRPC before a command uses them."""

import contextlib
import gc
import os
from collections.abc import Iterator
from pathlib import Path


def use_cpu(num_devices: int) -> None:
    """Makes jax see `num_devices` CPU devices and nothing else."""
    import jax

    if num_devices < 1:
        raise ValueError(f"--cpu-devices must be >= 1, got {num_devices}")
    if num_devices > 1:
        # A device that waits in a collective blocks a thread of XLA's pool, which has
        # one thread per core: with two collectives at a time it can deadlock (seen with
        # pipelines that gather weights in each microbatch). jax reads the variable when
        # it initializes the backend.
        os.environ.setdefault("NPROC", str(max(4 * num_devices, os.cpu_count() or 1)))
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", num_devices)


def use_compilation_cache() -> None:
    """Enables jax's compilation cache, unless it is already configured."""
    import jax

    if jax.config.values["jax_compilation_cache_dir"] is None:
        cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        jax.config.update(
            "jax_compilation_cache_dir", str(Path(cache) / "meshloom" / "compiled")
        )


def quiet_grpc() -> None:
    """Keeps gRPC from logging what we report in one line, such as a taken port."""
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")


@contextlib.contextmanager
def without_collection() -> Iterator[None]:
    """Pauses garbage collection, which takes a fifth of the time of large imports."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
