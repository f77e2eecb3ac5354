"""The servers that are there, as a coordinator hears of them."""

import dataclasses
from collections.abc import Container

from .servers import RemoteServer
from .settings import Settings
from .status import ServerBeats


@dataclasses.dataclass
class Registered:
    """A server that said it is there, and what it said since.

    Attributes:
      is_leaving: whether it has asked to leave.
    """

    server: RemoteServer
    beats: ServerBeats
    is_leaving: bool = False


class Registry(dict[str, Registered]):
    """Servers by name; whoever uses it holds the coordinator's lock."""

    def __init__(self, settings: Settings, now: float):
        super().__init__()
        self._settings, self._looked = settings, now

    def take_lost(
        self, now: float, spared: Container[str], busy: Container[str]
    ) -> dict[str, tuple[RemoteServer, str]]:
        """Removes servers that were not heard of; returns them with the reason.

        Args:
          spared: servers of which others have all that they hold; the others are
            waited for longer.
          busy: servers that have a part in a job.
        """
        long, short = self._settings.lease_seconds, self._settings.failover_seconds
        away, self._looked = now - self._looked, now
        lost = {}
        for name, registered in self.items():
            limit = short if name in spared else long
            if away > limit / 2:
                # This process was paused, and heard nobody: all get another lease.
                registered.beats.heard = now
            if now - registered.beats.heard > limit:
                why = f"server {name} is lost: not heard of for {limit:g} s"
                if registered.is_leaving and name not in busy:
                    why = f"server {name} has left"
                lost[name] = registered.server, why
        for name in lost:
            del self[name]
        return lost
