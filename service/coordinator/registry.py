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
      jobs: of which it had blocks when it registered: one that was started again has
        none, under the same name.
      is_leaving: whether it has asked to leave.
    """

    server: RemoteServer
    beats: ServerBeats
    jobs: frozenset[str] = frozenset()
    is_leaving: bool = False


class Registry(dict[str, Registered]):
    """Servers by name; whoever uses it holds the coordinator's lock."""

    def __init__(self, settings: Settings, now: float):
        super().__init__()
        self._settings, self._looked = settings, now

    def hold_all(self, spec: JobSpec, placement: Placement | None) -> bool:
        """Returns whether servers that are there have every block, by a placement."""
        have = {name for name, server in self.items() if spec.job in server.jobs}
        return placement is not None and placement.is_held_by(
            spec.layout, spec.job, have
        )

    def group(self, spec: JobSpec, log: Log, say: Say) -> ServerGroup:
        """Returns the servers that are there, for a new job."""

        def record(placement: Placement, why: str) -> None:
            body = {"placement": placement.to_json(), "why": why}
            log.append(spec.job, "placement", body)
            names = ", ".join(placement.members)
            text = f"{spec.job}: {why}; blocks belong to {names}"
            if (found := len(placement.members)) < placement.copies:
                text += (
                    f"; there is only {found} copy of each, not {placement.copies}, "
                    "until another server comes"
                )
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

        A server of which others have all that it holds gets less time.

        Args:
          groups: the servers of each job.
        """
        used = {name: [] for name in self}
        for group in groups:
            for name in used.keys() & {*group.names}:
                used[name].append(group)
        long, short = self._settings.lease_seconds, self._settings.failover_seconds
        away, self._looked = now - self._looked, now
        lost = {}
        for name, registered in self.items():
            silent, limit = now - registered.beats.heard, long
            # Asked last: the answer takes a look at every block.
            if max(silent, 2 * away) > short and used[name]:
                if all(group.can_spare(name) for group in used[name]):
                    limit = short
            if away > limit / 2:
                # This process was paused, and got no heartbeat: all get another lease.
                registered.beats.heard = now
            elif silent > limit:
                why = f"server {name} is lost: not heard of for {limit:g} s"
                if registered.is_leaving and not used[name]:
                    why = f"server {name} has left"
                lost[name] = registered.server, why
        for name in lost:
            del self[name]
        return lost
