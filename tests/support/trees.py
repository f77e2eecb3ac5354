"""A service in this process, mergers below it, and learners whose model is one array.

Calls go through real sockets; what servers receive and send is counted by relays.
"""

import contextlib
import dataclasses
import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from importlib import metadata
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from job_specs import job_spec
from relays import Relay, relays

from meshloom.service.blocks.layout import Leaf, make_layout
from meshloom.service.coordinator.coordinator import Coordinator
from meshloom.service.coordinator.servers import RemoteServer
from meshloom.service.coordinator.settings import Settings
from meshloom.service.learner.client import Client
from meshloom.service.learner.exchange import Exchange
from meshloom.service.learner.mover import Mover
from meshloom.service.learner.servers import Servers
from meshloom.service.merger.merger import MergerProcess
from meshloom.service.rounds.policy import Policy
from meshloom.service.server.server import ServerProcess
from meshloom.service.wire.calls import Channel, Server
from meshloom.service.wire.coordinators import reach
from meshloom.trainer.run.exchange_update import make_update

SHAPE = (256, 200)
SIZE = SHAPE[0] * SHAPE[1]
LAYOUT = make_layout([Leaf("w", SHAPE, "float32", (None, None))], block_bytes=20_000)
VERSION = metadata.version("meshloom")
LIMIT = 300.0  # of a training; it takes seconds on a quiet machine


@dataclasses.dataclass
class State:
    params: dict[int, jax.Array]


class Parameters:
    """The only array of the model, on one device."""

    def __init__(self):
        sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        self.like = {0: jax.ShapeDtypeStruct(SHAPE, jnp.float32, sharding=sharding)}

    def of(self, tree):
        return tree

    def put(self, state, arrays):
        return State(dict(arrays))


class Alone:
    """A group of one process."""

    is_first = True

    def exchange(self, what, work, judge):
        return judge([work()])


class Service:
    """A coordinator and servers behind relays.

    Attributes:
      relays: between the servers and whoever sends to them.
      sent: what each learner has sent, by (learner, incarnation, round).
      read: the parameters from which it has computed that.
    """

    def __init__(self, folder: Path, policy: Policy, num_learners: int, **spec):
        self._save_every = spec.pop("save_every", 100)
        self.folder, self.policy, self.num_learners = folder, policy, num_learners
        self.spec = job_spec(
            policy,
            LAYOUT,
            **{"num_learners": num_learners, "version": VERSION, **spec},
        )
        self.sent: dict[tuple[int, int, int], np.ndarray] = {}
        self.read: dict[tuple[int, int, int], np.ndarray] = {}
        self.losses = 0
        self._stack = contextlib.ExitStack()
        servers = [ServerProcess(make_update=make_update) for _ in range(2)]
        for server in servers:
            self._stack.callback(server.close)
        self.relays: list[Relay] = self._stack.enter_context(
            relays(*(server.address for server in servers))
        )
        self._servers = dict(zip("ab", servers, strict=True))
        self._start("127.0.0.1:0")
        self._stack.callback(lambda: self._stop())
        self.address = f"127.0.0.1:{self._calls.port}"

    def _start(self, bind: str) -> None:
        center = Coordinator(
            self.folder,
            num_servers=2,
            version=VERSION,
            # The servers here do not beat.
            settings=Settings(lease_seconds=10_000, save_every=self._save_every),
            connect=lambda n, a: RemoteServer(n, a, Channel(a)),
            clock=time.monotonic,
            say=lambda *text, **fields: None,
        )
        self._center = center
        for (name, server), relay in zip(
            self._servers.items(), self.relays, strict=True
        ):
            # What the coordinator asks for is not counted.
            center.register_server({"name": name, "address": relay.address})
            direct = RemoteServer(name, relay.address, Channel(server.address))
            center._servers[name].server = direct
        self._calls = Server(bind, center.methods, {})

    def _stop(self) -> None:
        self._calls.close(0)
        self._center.close()

    def lose_all(self) -> None:
        """Starts everything again, with servers that have nothing of the job."""
        self.losses += 1
        self._stop()
        for server in self._servers.values():
            with contextlib.closing(Channel(server.address)) as channel:
                channel.call("Forget", {"job": "run", "term": self._center._log.term})
        self._start(self.address)

    def merger(self, upstream: str | None = None) -> MergerProcess:
        clock = time.monotonic
        above = upstream or self.address
        merger = MergerProcess("127.0.0.1:0", above, version=VERSION, clock=clock)
        self._stack.callback(merger.close)
        return merger

    def pause(self, seconds: float) -> None:
        """Lets the coordinator answer nobody for a while."""
        self._calls.close(0)
        time.sleep(seconds)
        self._calls = Server(self.address, self._center.methods, {})

    def moved(self) -> np.ndarray:
        """Returns the bytes sent to the servers, and received from them."""
        return np.array(
            [sum(getattr(r, x) for r in self.relays) for x in ("up", "down")]
        )

    def commits(self) -> list[dict]:
        return self.rows("commits.jsonl")

    def rows(self, name: str) -> list[dict]:
        file = self.folder / "run" / name
        return [json.loads(line) for line in file.read_text().splitlines()]

    def final(self) -> dict:
        return json.loads((self.folder / "run" / "final.json").read_text())

    def close(self) -> None:
        self._stack.close()


class Learner:
    """A learner with real exchanges, whose gradients follow from its parameters."""

    def __init__(self, service: Service, index: int, address: str):
        self.service, self.index = service, index
        self.weight = 1.0 + index % 3
        client = Client(reach(address), "run", index)
        self.exchange = Exchange(
            client,
            Alone(),
            Parameters(),
            LAYOUT,
            service.policy,
            connect=self._connect,
        )
        self.params: np.ndarray | None = None

    def _connect(self, opened) -> Mover:
        # With one copy nobody asks where the blocks are now.
        servers = Servers("run", LAYOUT, opened, Channel, lambda: opened)
        return Mover("run", LAYOUT, servers)

    def run(self, before_round: Callable[[int], None]) -> None:
        """Trains to the end.

        Args:
          before_round: called before each contribution, with the round.
        """
        exchange = self.exchange
        start = {
            0: jnp.asarray(np.linspace(-1, 1, SIZE, dtype=np.float32).reshape(SHAPE))
        }
        exchange.begin(self.service.spec, lambda: start, {"owner": str(self.index)})
        state = exchange.start(State(start))
        try:
            while not exchange.turn.is_done:
                before_round(exchange.turn.round)
                state = self._round(state)
            self.params = np.asarray(state.params[0])
        finally:
            exchange.leave("done")

    def _round(self, state: State) -> State:
        exchange, turn = self.exchange, self.exchange.turn
        now = np.asarray(state.params[0])
        # What is computed twice differs, as with data that was leased anew.
        seed = self.index, turn.round, exchange.who["incarnation"]
        noise = np.random.default_rng(seed).normal(size=SHAPE).astype(np.float32)
        gradient = np.float32(0.1) * now + np.float32(0.01) * noise
        sums = {"weight": self.weight, "loss": float(np.square(now).mean())}
        who = exchange.who["learner"], exchange.who["incarnation"], turn.round
        if self.service.policy.outer is None:
            sent = gradient * np.float32(self.weight)
            exchange.send_gradients({0: jnp.asarray(sent)}, sums, {"steps": 1})
        else:
            new = now - gradient
            sent = now - new
            exchange.send_change({0: jnp.asarray(new)}, sums, {"steps": 1})
        self.service.sent[who], self.service.read[who] = sent, now
        return exchange.merge(state, exchange.finish())


def train(
    service: Service,
    addresses: Sequence[str],
    before_round: Callable[[int, int], None] = lambda learner, round: None,
) -> list[Learner]:
    """Trains all learners, each with the address that it is given."""
    learners = [Learner(service, i, a) for i, a in enumerate(addresses)]

    def work(learner: Learner) -> Callable[[], None]:
        return lambda: learner.run(lambda round: before_round(learner.index, round))

    at_once([work(learner) for learner in learners])
    return learners


def at_once(work: Sequence[Callable[[], None]]) -> None:
    """Does everything in a thread of its own, and waits for all."""
    errors: list[BaseException] = []

    def run(one: Callable[[], None]) -> None:
        try:
            one()
        except BaseException as error:
            errors.append(error)
            raise

    threads = [threading.Thread(target=run, args=(x,), daemon=True) for x in work]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + LIMIT
    for thread in threads:
        while thread.is_alive():
            assert time.monotonic() < deadline, "took too long"
            assert not errors, errors
            thread.join(0.1)
    assert not errors, errors


@contextlib.contextmanager
def service(
    folder: Path, policy: Policy, num_learners: int, **spec
) -> Iterator[Service]:
    made = Service(folder, policy, num_learners, **spec)
    try:
        yield made
    finally:
        made.close()
