"""The barrier of a save, at which processes wait for each other until one fails.

A checkpoint is committed once every process has written its shards. In orbax's own
barrier the others would wait 20 minutes for a process that could not write.
"""

import json
import sys
import threading
from collections.abc import Callable

from ..job.group import Group
from ..record.save_errors import SaveFailed

FAILED = "save failed"  # the key of the first failure; the job ends with it
POLL_SECONDS = 0.25


class SaveBarrier:
    """A `barrier_sync_fn` for orbax that ends as soon as any process reports a failure.

    It then raises SaveFailed with the reason that the process gave.

    Args:
      make_error: converts what orbax raised in this process into the error to report.
    """

    def __init__(self, group: Group, make_error: Callable[[Exception], SaveFailed]):
        self._group, self._make_error = group, make_error
        self._handled: BaseException | None = None

    def begin(self) -> None:
        """Notes what the caller of a save is handling, such as a request to stop.

        That is not the reason of a failure.
        """
        self._handled = sys.exception()

    def __call__(self, *, key: str, timeout_ms: int) -> None:
        error = sys.exception()
        if isinstance(error, Exception) and error is not self._handled:
            # Orbax is cleaning up. The others wait for this process elsewhere, so
            # waiting for them here would never end.
            self.fail(self._make_error(error))
            return
        if self._group.size == 1:
            return
        store, done = self._group.store, threading.Event()
        errors: list[Exception] = []

        def wait() -> None:
            try:
                store.barrier(self._group.key(key), timeout_ms / 1000)
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
        """Reports to the other processes that this one could not write its shards."""
        group = self._group
        if group.size == 1:
            return
        facts = {"process": group.index, "reason": str(error), "errno": error.errno}
        group.store.set(group.key(FAILED), json.dumps(facts))

    def _failed(self) -> SaveFailed | None:
        text = self._group.store.get(self._group.key(FAILED))
        if text is None:
            return None
        facts = json.loads(text)
        failed = SaveFailed(
            f"{self._group.describe(facts['process'])} could not write its shards: "
            f"{facts['reason']}"
        )
        failed.errno = facts["errno"]
        return failed
