"""Every test runs on 8 CPU devices and says so; none skips for want of devices."""

import os
import pathlib

from compiling import FLAGS

# Before jax is imported, and for the processes that tests start too.
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {FLAGS}"

import jax  # noqa: E402
import pytest  # noqa: E402
from jax.experimental.compilation_cache import compilation_cache  # noqa: E402

# Compiled programs are kept between runs, also for the processes that tests start. Each
# pytest worker has a folder: jax writes a file in place, and another could read half.
WORKER = os.environ.get("PYTEST_XDIST_WORKER", "alone")
CACHE = pathlib.Path(__file__).parents[1] / "build" / "test-cache" / WORKER
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(CACHE))
jax.config.update("jax_compilation_cache_dir", os.environ["JAX_COMPILATION_CACHE_DIR"])
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)

# Before anything touches a device.
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_rank_promotion", "raise")

# Threads for all collectives that devices wait in (see trainer/commands/devices.py),
# here and not in the processes that tests start.
with pytest.MonkeyPatch.context() as patch:
    patch.setenv("NPROC", "32")
    jax.devices()


@pytest.fixture(scope="session", autouse=True)
def eight_devices():
    assert jax.device_count() == 8, jax.devices()


@pytest.fixture(scope="module", autouse=True)
def cache_of_compiled_programs(request):
    """Off for pipelines: from the cache, their programs hang: program/uncached.py."""
    marks = request.node.iter_markers("compiles_anew")
    jax.config.update("jax_enable_compilation_cache", not any(marks))
    compilation_cache.reset_cache()


@pytest.fixture
def toy(tmp_path, monkeypatch):
    """The module `toy` as a user's own, in a folder with the file "base.gin"."""
    import toy
    import toy_configs

    monkeypatch.chdir(tmp_path)
    toy_configs.write(toy_configs.BASE, "base.gin")
    return toy


def pytest_collection_modifyitems(items):
    """Keeps each file on one worker, for its fixtures, unless it is dealt in groups."""
    for item in items:
        if item.get_closest_marker("xdist_group") is None:
            name = str(item.path.relative_to(item.config.rootpath))
            item.add_marker(pytest.mark.xdist_group(name))
