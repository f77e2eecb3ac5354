"""Every test runs on 8 CPU devices and says so; none skips for want of devices."""

import gc
import os
import pathlib

from compiling import FLAGS

# Until all tests are imported, see pytest_collection_finish; with xdist, the process
# that deals them never collects.
gc.disable()

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


# With one of these marks, tests run one at a time: more processes that start at once
# would keep each other from renewing leases in time.
ALONE = ("fleets", "processes")
# Groups that take a minute and more. They come first, so that no worker is left with
# one of them at the end.
LONGEST = (
    *ALONE,
    "docs/recovery.md",
    "tests/fuzz/test_fuzz.py",
    "tests/pipeline/test_pipeline_training.py",
    "tests/record/test_storage.py",
    "tests/pipeline/test_pipeline.py",
    "tests/checkpoint/test_broken_saves.py",
    "tests/models/test_vision_parity.py",
    "tests/program/test_build.py",
    "tests/service/test_replicas.py",
    "tests/tune/test_tuning.py",
)


@pytest.hookimpl(tryfirst=True)  # before xdist reads the marks
def pytest_collection_modifyitems(items):
    """Keeps each file on one worker, for its fixtures, unless it is dealt in groups."""
    groups = {}
    for item in items:
        alone = [name for name in ALONE if item.get_closest_marker(name)]
        if found := item.get_closest_marker("xdist_group"):
            (groups[item],) = found.args
        else:
            file = item.path.relative_to(item.config.rootpath).as_posix()
            groups[item] = alone[0] if alone else file
            item.add_marker(pytest.mark.xdist_group(groups[item]))
    order = {name: number for number, name in enumerate(LONGEST)}
    items.sort(key=lambda item: order.get(groups[item], len(order)))


def pytest_collection_finish(session):
    """Leaves what was imported out of all later garbage collections.

    Most of the time they would look at that, a tenth of the time of a short training.
    """
    if getattr(session.config.option, "loadgroup", False):
        # With pytest 9.2, pytest-xdist 3.8 deals tests one by one, without a word.
        assert all("@" in item.nodeid for item in session.items), "groups are ignored"
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000)
    gc.enable()
