"""Learners without a model that play a job whose coordinator is killed on the way."""

from collections.abc import Sequence


class Learner:
    """A learner whose contribution follows from the version it started from.

    Args:
      house: the service, see tests/coordinator/conftest.py.
    """

    def __init__(self, house, index: int):
        self.house, self.index = house, index
        self.incarnation = 0
        self.round = 0  # the last that was done
        self.is_done, self.reason = False, ""

    def play(self) -> None:
        """Does what it may do, as far as it may; can be killed anywhere in between."""
        if not self.incarnation:
            answer = self.house.ask("join", learner=self.index, owner=f"me{self.index}")
            self.incarnation, self.round = answer["incarnation"], 0
        place = self.house.next(self.index, self.incarnation, self.round)
        if place["state"] == "left":
            self.incarnation = 0
        elif place["state"] == "done":
            self.is_done, self.reason = True, place["reason"]
        elif place["state"] == "go":
            self.begin(place["version"])
            self._contribute(place["round"], place["version"])

    def begin(self, version: int) -> None:
        """Called before a round, which starts from this version."""

    def _contribute(self, round: int, version: int) -> None:
        key = self.index, self.incarnation, round
        for server in self.house.servers:
            start = server.jobs["run"]["versions"][version]
            server.stage("run", key, start / 4 + self.index + round)
        if self.house.contribute(*key, version)["state"] == "ok":
            self.round = round


def play_to_the_end(
    house, learners: Sequence[Learner], killed, *, lose_servers: bool = False
) -> None:
    """Plays until all learners are done; starts the coordinator when it was killed.

    Args:
      killed: what is raised when that happens.
      lose_servers: whether the servers die with it.
    """
    is_up = False
    for _ in range(200):
        try:
            if not is_up:
                house.start()
                is_up = True
            if not house.job.is_initialized:
                house.initialize()
            for learner in learners:
                learner.play()
            if all(learner.is_done for learner in learners):
                return
        except killed:
            is_up = False
            for server in house.servers if lose_servers else ():
                server.lose()
    states = [(x.index, x.incarnation, x.round, x.is_done) for x in learners]
    raise AssertionError(f"the job did not end: {states}, {house.fate.passed[-9:]}")


def load_if_done(house) -> None:
    """Has the servers load a job that was done before they died."""
    if not house.job.is_held:
        house.ask("join", learner=0, owner="me0")
