"""jax's key-value store, which every process of a job can reach without a device."""

import re
from typing import Any, Protocol

from ...launch.exit_codes import Unreachable


class Missing(Unreachable):
    """Some processes did not reach a barrier in time.

    Attributes:
      processes: their numbers; empty if the store does not say.
    """

    def __init__(self, barrier: str, seconds: float, processes: list[int]):
        names = ", ".join(f"process {number}" for number in processes)
        super().__init__(
            f"waited {seconds:g} s at barrier {barrier!r} for {names or 'a process'}"
        )
        self.processes = processes


class Store(Protocol):
    """Strings by key, shared by the processes of a job."""

    def set(self, key: str, value: str) -> None: ...

    def get(self, key: str) -> str | None:
        """Returns the value, or None if there is none yet."""
        ...

    def wait(self, key: str, seconds: float) -> str | None:
        """Returns the value once it is set, or None if it is not set in time."""
        ...

    def values(self, folder: str) -> list[str]:
        """Returns the values of all keys that start with `folder` and a slash."""
        ...

    def delete(self, key: str) -> None: ...

    def barrier(self, key: str, seconds: float) -> None:
        """Waits for every process of the job; raises `Missing` after `seconds`."""
        ...


class JaxStore:
    """The store of `jax.distributed`.

    jax has no public name for its client; orbax has one.
    """

    def __init__(self):
        import orbax.checkpoint as ocp

        self._client: Any = ocp.multihost.get_jax_distributed_client()

    def set(self, key: str, value: str) -> None:
        self._client.key_value_set(key, value, allow_overwrite=True)

    def get(self, key: str) -> str | None:
        return self._unless("NOT_FOUND", self._client.key_value_try_get, key)

    def wait(self, key: str, seconds: float) -> str | None:
        get = self._client.blocking_key_value_get
        return self._unless("DEADLINE_EXCEEDED", get, key, int(1000 * seconds))

    def values(self, folder: str) -> list[str]:
        return [value for _, value in self._client.key_value_dir_get(folder)]

    def delete(self, key: str) -> None:
        self._client.key_value_delete(key)

    def barrier(self, key: str, seconds: float) -> None:
        import jax

        try:
            self._client.wait_at_barrier(key, int(1000 * seconds))
        except jax.errors.JaxRuntimeError as error:
            if "DEADLINE_EXCEEDED" not in str(error):
                raise
            missing = re.findall(r"^(\d+)$", str(error), re.MULTILINE)
            raise Missing(key, seconds, [int(number) for number in missing]) from error

    @staticmethod
    def _unless(status: str, get: Any, *args: Any) -> str | None:
        """Returns what `get` returns, or None if it fails with this status."""
        import jax

        try:
            return get(*args)
        except jax.errors.JaxRuntimeError as error:
            if status not in str(error):
                raise
            return None
