"""Every test runs on 8 CPU devices and says so; none skips for want of devices."""

import jax
import pytest

# Before anything touches a device.
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_rank_promotion", "raise")


@pytest.fixture(scope="session", autouse=True)
def eight_devices():
    assert jax.device_count() == 8, jax.devices()
