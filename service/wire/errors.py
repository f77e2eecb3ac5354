"""How a call can fail: the other side said no, or it did not answer."""


class Refused(ValueError):
    """The other side said no. Its message is for the user; trying again is useless."""


class Unavailable(ConnectionError):
    """The other side gave no answer: not reached, lost, or too slow."""
