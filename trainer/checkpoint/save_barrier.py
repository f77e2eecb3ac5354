"""Where processes wait for one another in a save, unless one of them has failed.

A checkpoint counts when every process has written its part. Orbax's own barrier lets
the others wait 20 minutes for a process that could not write.
"""

import json
import sys
import threading
from collections.abc import Callable

import jax
import orbax.checkpoint as ocp

from ..job import joining
from ..record.save_errors import SaveFailed

FAILED_KEY = "meshloom/save failed"  # the first failure; the job ends with it
POLL_SECONDS = 0.25


class SaveBarrier:
    """A `barrier_sync_fn` of orbax that ends as soon as a process says it has failed.

    It raises SaveFailed then, with the reason of that process.

    Args:
      failed: makes the error to raise, from what orbax has met in this process.
    """

    def __init__(self, failed: Callable[[Exception], SaveFailed]):
        self._made = failed

    def __call__(self, *, key: str, timeout_ms: int) -> None:
        error = sys.exception()
        if isinstance(error, Exception):
            # Orbax cleans up, and would wait here for those who wait elsewhere for it.
            self.fail(self._made(error))
            return
        done = threading.Event()
        errors: list[Exception] = []

        def wait() -> None:
            try:
                ocp.multihost.get_barrier_sync_fn()(key=key, timeout_ms=timeout_ms)
            except Exception as error:
                errors.append(error)
            done.set()

        threading.Thread(target=wait, name="save barrier", daemon=True).start()
        while not done.wait(POLL_SECONDS):
            if failed := self._failed():
                raise failed
        if errors:
            raise self._failed() or errors[0]

    def fail(self, error: SaveFailed) -> None:
        """Tells the others that this process could not write its part."""
        if jax.process_count() == 1:
            return
        facts = {
            "process": jax.process_index(),
            "reason": str(error),
            "errno": error.errno,
        }
        joining.store().key_value_set(
            FAILED_KEY, json.dumps(facts), allow_overwrite=True
        )

    def _failed(self) -> SaveFailed | None:
        try:
            text = joining.store().key_value_try_get(FAILED_KEY)
        except jax.errors.JaxRuntimeError as error:
            if "NOT_FOUND" not in str(error):
                raise
            return None
        facts = json.loads(text)
        failed = SaveFailed(
            f"{joining.name(facts['process'])} could not write its part: "
            f"{facts['reason']}"
        )
        failed.errno = facts["errno"]
        return failed
