"""The events of a job once more, to another engine."""

import json

from meshloom.service.rounds import events, snapshot
from meshloom.service.rounds.engine import Engine


def replay(world, cut: int | None = None) -> list:
    """Returns the decisions of a new engine for the events of a world.

    Args:
      cut: the number of events after which another engine goes on from a snapshot.
    """
    facts = world.policy, world.num_learners, world.num_rounds
    engine, decisions = Engine(*facts), []
    for number, event in enumerate(world.events):
        if number == cut:
            taken = json.dumps(snapshot.take(engine), allow_nan=False)
            engine = Engine(*facts)
            snapshot.put_back(engine, json.loads(taken))
        line = json.dumps(event.to_json())
        decisions.append(engine.handle(events.from_json(json.loads(line))))
    return decisions
