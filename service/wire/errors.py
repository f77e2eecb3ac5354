"""How a call can fail: the other side said no, or it did not answer."""


class Refused(ValueError):
    """The other side said no. Its message is for the user; trying again is useless."""


class NotHere(Refused):
    """A server does not hold what it was asked for: by now others may."""


class Unavailable(ConnectionError):
    """The other side gave no answer: not reached, lost, or too slow."""


class NotLeader(Unavailable):
    """The coordinator that was asked does not lead, but stands by or was deposed.

    Attributes:
      leader: the address of the one that leads, if it is known.
    """

    def __init__(self, message: str, leader: str | None = None):
        super().__init__(message)
        self.leader = leader


class NoUpstream(Unavailable):
    """A merger whose upstream does not answer: ask it again, not another."""


class Busy(Unavailable):
    """The job is busy, with a checkpoint for example: ask again."""


class OldTerm(Exception):
    """A server obeys a coordinator with a higher term: this one must stop."""
