"""The servers that are there, as a coordinator hears of them."""

import dataclasses
from collections.abc import Iterable

from ..blocks.placement import Placement
from .log import Log
from .servers import RemoteServer, ServerGroup
from .settings import Say, Settings
from .spec import JobSpec
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

    def group(self, spec: JobSpec, log: Log, say: Say) -> ServerGroup:
        """Returns the servers that are there, for a new job."""

        def record(placement: Placement, why: str) -> None:
            body = {"placement": placement.to_json(), "why": why}
            log.append(spec.job, "placement", body)
            names = ", ".join(placement.members)
            text = f"{spec.job}: {why}; blocks belong to {names}"
            about = {"epoch": placement.epoch, "servers": list(placement.members)}
            say(text, "placed", job=spec.job, reason=why, **about)

        servers = [registered.server for registered in self.values()]
        return ServerGroup(
            *(spec.job, spec.layout, servers, log.term, log.check, spec.tables),
            copies=spec.copies,
            record=record,
        )

    def take_lost(
        self, now: float, groups: Iterable[ServerGroup]
    ) -> dict[str, tuple[RemoteServer, str]]:
        """Removes servers that sent no heartbeat; returns them with the reason.

        Of servers of which others have all that they hold, less patience is needed.

        Args:
          groups: the servers of each job.
        """
        names: dict[bool, set[str]] = {False: set(), True: set()}
        for group in groups:
            names[group.placement.copies > 1].update(group.names)
        spared, busy = names[True] - names[False], names[True] | names[False]
        long, short = self._settings.lease_seconds, self._settings.failover_seconds
        away, self._looked = now - self._looked, now
        lost = {}
        for name, registered in self.items():
            limit = short if name in spared else long
            if away > limit / 2:
                # This process was paused, and got no heartbeat: all get another lease.
                registered.beats.heard = now
            if now - registered.beats.heard > limit:
                why = f"server {name} is lost: not heard of for {limit:g} s"
                if registered.is_leaving and name not in busy:
                    why = f"server {name} has left"
                lost[name] = registered.server, why
        for name in lost:
            del self[name]
        return lost
