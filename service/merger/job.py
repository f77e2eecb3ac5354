"""One job at a merger: what its learners send is added up, and one sum passed on.

A contribution that was acknowledged here is in the log of the coordinator. What was not
is sent again by its learner, to whoever answers then, if this process dies.
"""

import logging
import secrets
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from ..blocks.box import Box
from ..blocks.layout import Layout
from ..rounds.policy import Policy
from ..server.staging import Pool, Staging
from ..server.summing import Summed, summed
from ..wire import codecs, sums, tensors
from ..wire.errors import Refused, Unavailable
from ..wire.sums import FIRST, Key, key_of, tree_of
from .gathering import Gathering, Item, without
from .upstream import Upstream
from .versions import Versions

SILENCE_SECONDS = 6.0  # learners send a heartbeat every two seconds
LOOK_SECONDS = 0.25
RETRY_SECONDS = 0.5
WAIT_SECONDS = 10.0  # at most, of a call that waits for its sum
_LOG = logging.getLogger(__name__)


class MergedJob:
    """A job whose learners exchange through this merger.

    Attributes:
      staging: what they have sent, and is not passed on yet.
      push_codec: how they pack it. Sums are never packed.
      newest: of no use here: a merger has no version of its own.
    """

    newest: int | None = None

    def __init__(
        self,
        spec: Mapping[str, Any],
        upstream: Callable[[Layout], Upstream],
        clock: Callable[[], float],
    ):
        self.name = str(spec["job"])
        self.layout = Layout.from_json(spec["layout"])
        self._policy = Policy.from_json(spec["policy"])
        self.push_codec = codecs.of_job(spec, "push")
        blocks = set(range(len(self.layout.blocks)))
        self.staging = Staging(self.name, self.layout, blocks, Pool())
        self._upstream = upstream(self.layout)
        self._versions = Versions(self.layout, self._upstream)
        self._clock = clock
        # Stands for this process in the keys of sums; another one for other sums of
        # the same learner and round.
        self._number = secrets.randbits(40)
        self._sent: dict[int, int] = {}  # the last round, by the lowest learner
        self._changed = threading.Condition()  # guards what follows
        self._gathering = Gathering(SILENCE_SECONDS)
        self._had_children = False
        self._done: set[int] = set()  # learners that read the last version, and leave
        self._is_closing = False
        name = f"merger of {self.name}"
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    # What learners, and mergers below, ask for.

    def opened(self, answer: Mapping[str, Any]) -> None:
        """Records what the upstream has answered about the servers there."""
        self._upstream.use(answer)
        self._versions.keep_to(answer["history"])

    def stage(
        self,
        learner: int,
        incarnation: int,
        round: int,
        block: int,
        slab: int,
        start: Sequence[int],
        array: np.ndarray,
    ) -> None:
        """Adds a piece of a contribution; of round 0, of the initial parameters."""
        self.staging.add((learner, incarnation, round), block, slab, start, array)

    def read(
        self, version: int, boxes: Sequence[tuple[int, Box]]
    ) -> Iterator[tuple[tensors.Place, Sequence[int], tensors.Sent]]:
        """Returns boxes of a version, as they are sent."""
        try:
            return self._versions.read(version, boxes)
        except Unavailable as error:  # the servers above may be others by now
            _LOG.warning("job %r: %s; trying again", self.name, error)
            self._upstream.open()
            return self._versions.read(version, boxes)

    def initialize(self, learner: int) -> None:
        """Passes on the initial parameters that a learner has sent here."""
        for key in self.staging.keys():
            if (key[0], key[2]) == (learner, 0):
                self._push(key, {key: 1.0}, range(len(self.layout.blocks)))
                self.staging.clear(round=0)

    def hear(self, learner: int, incarnation: int) -> None:
        with self._changed:
            self._had_children = True
            self._gathering.hear(learner, incarnation, self._clock())

    def joined(self, learner: int, answer: Mapping[str, Any]) -> None:
        """Notes that a learner has joined, and what it was answered.

        If the service goes on from a checkpoint, everybody joins again: versions that
        are here may be of a history that was abandoned.
        """
        self._versions.keep_to(answer["history"])
        self.hear(learner, answer["incarnation"])

    def told(self, learner: int, incarnation: int, answer: Mapping[str, Any]) -> None:
        """Notes what a learner was told to do next."""
        with self._changed:
            if answer["state"] == "go":
                self._gathering.release(learner, incarnation, answer["round"])
            elif answer["state"] in ("left", "done"):
                if answer["state"] == "done":
                    self._done.add(learner)
                self._gathering.remove(learner, incarnation)
            self._changed.notify_all()

    def leave(self, learner: int, incarnation: int) -> None:
        with self._changed:
            self._done.discard(learner)
            self._gathering.remove(learner, incarnation)
            if not self._gathering.children and not self._done:
                self._versions.clear()
            self._changed.notify_all()

    def contribute(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Takes a contribution, or a sum of some; waits until it is passed on.

        Returns:
          The state "wait" if that takes longer: then the same is to be asked again.
        """
        item, now = self._item_of(message), self._clock()
        seconds = message.get("seconds", WAIT_SECONDS)
        if not isinstance(seconds, int | float):
            raise Refused(f"contribution: seconds is {seconds!r}, expected a number")
        with self._changed:
            for learner, incarnation, _ in item.keys:
                self._gathering.hear(learner, incarnation, now)
            known = self._gathering.items.get(item.key)
            if known is None and (missing := self._missing(item.key)) is not None:
                _LOG.warning("job %r: %s; it is to be sent again", self.name, missing)
                return {"state": "elsewhere"}
            if known is None:
                self._gathering.add(item)
                self._changed.notify_all()
                known = item
            self._changed.wait_for(lambda: known.is_over, min(seconds, WAIT_SECONDS))
            if known.error is not None:
                self._gathering.items.pop(item.key, None)  # asked again, it is tried
                raise Unavailable(f"{known.error}; join again") from known.error
            return known.answer or {"state": "wait"}

    def is_over(self) -> bool:
        """Whether there were learners, and none is left."""
        with self._changed:
            return self._had_children and not self._gathering.children

    def close(self) -> None:
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()
        self._upstream.close()
        self._thread.join(5.0)

    def _missing(self, key: Key) -> str | None:
        """Returns what of a contribution has not arrived here, if anything."""
        try:
            self.staging.complete(key, self._blocks_of(key[2]))
        except Refused as error:
            return str(error)
        return None

    def _item_of(self, message: Mapping[str, Any]) -> Item:
        now = self._clock()
        if "tree" in message:
            tree = message["tree"]
            sums.contributions_of(tree)
            parts = message.get("parts")
            if not isinstance(parts, list):
                raise Refused(f"sum: parts is {parts!r}, expected a list")
            return Item(key_of(tree), parts, 1.0, now, tree)
        names = ("learner", "incarnation", "round")
        key = key_of([message.get(name) for name in names])
        weight, steps = message.get("weight"), message.get("steps")
        if not isinstance(weight, int | float) or type(steps) is not int or steps < 1:
            raise Refused(
                f"learner {key[0]}, round {key[2]}: weight is {weight!r} and steps is "
                f"{steps!r}, expected numbers"
            )
        coefficient, _ = self._policy.coefficient(float(weight), steps)
        hidden = ("place", "seconds", "job")
        part = {name: x for name, x in message.items() if name not in hidden}
        return Item(key, [part], coefficient, now)

    # What the thread of the job does.

    def _run(self) -> None:
        while True:
            with self._changed:
                if self._is_closing:
                    return
                now = self._clock()
                self._gathering.look(now)
                items = self._gathering.ready(now)
                if not items:
                    self._forget(now)
                    self._changed.wait(LOOK_SECONDS)
            try:
                self._pass_on(items)
            except Exception as error:
                if not isinstance(error, ValueError):
                    _LOG.exception("job %r: a sum was not passed on", self.name)
                with self._changed:
                    for item in items:
                        item.error = error
                    self._changed.notify_all()

    def _forget(self, now: float) -> None:
        """Forgets old answers, which those who asked have got by now."""
        items = self._gathering.items
        for key, item in list(items.items()):
            if item.is_over and now - item.arrived > 6 * WAIT_SECONDS:
                del items[key]

    def _pass_on(self, items: list[Item]) -> None:
        """Adds items up and passes the sum on, without those that cannot count."""
        key = self._key_of(items) if items else None
        while key is not None and not self._is_closing:
            try:
                answer = self._send(key, items)
            except Unavailable as error:
                _LOG.warning("job %r: %s; trying again", self.name, error)
                answer = {"state": "elsewhere"}
            if answer["state"] == "ok":
                self._finish(items, {"state": "ok"})
                return
            if answer["state"] == "regroup":
                gone = [key_of(key) for key in answer["gone"]]
                with self._changed:
                    before, items = items, without(items, gone)
                self._finish([item for item in before if item.is_over])
                key = self._key_of(items) if items else None
                continue
            with self._changed:
                self._changed.wait_for(lambda: self._is_closing, RETRY_SECONDS)
            try:
                self._upstream.open()
            except Unavailable as error:
                _LOG.info("job %r: %s", self.name, error)

    def _key_of(self, items: Sequence[Item]) -> Key:
        """Returns a key that no other sum has."""
        round = items[0].key[2]
        lowest = min(key[0] for item in items for key in item.keys)
        if round <= self._sent.get(lowest, 0):
            self._number += 1
        self._sent[lowest] = round
        return FIRST + lowest, self._number, round

    def _send(self, key: Key, items: Sequence[Item]) -> dict[str, Any]:
        """Pushes the sum of items, and contributes it."""
        weights = {item.key: item.coefficient for item in items}
        self._push(key, weights, self._blocks_of(key[2]))
        tree = tree_of(key, [item.tree or item.key for item in items])
        parts = [part for item in items for part in item.parts]
        while True:
            answer = self._upstream.contribute(tree, parts, WAIT_SECONDS)
            if answer["state"] != "wait" or self._is_closing:
                return answer

    def _push(
        self, key: Key, weights: Mapping[Key, float], blocks: Sequence[int]
    ) -> None:
        def pieces(own: Sequence[int]) -> Iterator[Summed]:
            return summed(self.staging, self.layout, own, weights)

        self._upstream.push(key, blocks, pieces)

    def _finish(self, items: Sequence[Item], answer: dict | None = None) -> None:
        for item in items:
            self.staging.drop(*item.key)
            # Rounds before are over: pieces of learners that died while they sent.
            for key in self.staging.keys():
                if 0 < key[2] < item.key[2]:
                    self.staging.drop(*key)
        with self._changed:
            for item in items:
                item.answer = item.answer or answer
            self._changed.notify_all()

    def _blocks_of(self, round: int) -> list[int]:
        fragment = self._policy.fragment_of(round)
        return [
            block.index
            for block in self.layout.blocks
            if self.layout.fragment_of(block.index) == fragment
        ]
