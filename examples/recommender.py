"""A recommender whose tables are larger than a learner: they live on the servers.

Ratings are products of planted factors, plus noise. Each step reads the rows of its
users and items, reads those of the next step ahead, and sends gradients of just these.

  meshloom serve --bind 127.0.0.1:7000 --folder runs --once &
  python examples/recommender.py --exchange 127.0.0.1:7000/rec --learner 0/1
  python examples/recommender.py --replay runs/rec
"""

import argparse
import dataclasses
import json
import time
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from meshloom.service.blocks.digest import digest_of
from meshloom.service.blocks.layout import Leaf, make_layout
from meshloom.service.blocks.tables import Table
from meshloom.service.learner.client import Client
from meshloom.service.learner.exchange import Exchange
from meshloom.service.learner.mover import Mover
from meshloom.service.learner.rows import Sent, TableRows
from meshloom.service.learner.servers import Servers
from meshloom.service.rounds.leases import from_ranges
from meshloom.service.rounds.policy import make_policy
from meshloom.service.server.job_store import JobStore
from meshloom.service.wire.calls import Channel
from meshloom.service.wire.coordinators import reach
from meshloom.trainer.data.planted import factors
from meshloom.trainer.job.group import Group
from meshloom.trainer.run.exchange_update import make_update

POLICY = make_policy("sync")
LAYOUT = make_layout([Leaf("bias", (1,), "float32", (None,))])
HELD_OUT = 1 << 40  # no learner leases so many blocks of data


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ratings:
    """Ratings of items by users; block k of the data is always the same.

    Attributes:
      width: of the factors.
      noise: standard deviation of what no model can know.
      batch: ratings in a block.
    """

    users: int = 2000
    items: int = 1000
    width: int = 8
    noise: float = 0.1
    batch: int = 1024
    seed: int = 0

    def planted(self, table: str, ids: np.ndarray) -> np.ndarray:
        """Returns the factors behind the ratings; products of two have variance 1."""
        return factors(self.seed, table == "items", ids, self.width)

    def block(self, number: int) -> dict[str, np.ndarray]:
        random = np.random.Generator(np.random.Philox(key=[self.seed, number]))
        users = random.integers(0, self.users, self.batch)
        items = random.integers(0, self.items, self.batch)
        true = (self.planted("users", users) * self.planted("items", items)).sum(1)
        noise = random.normal(size=self.batch) * self.noise
        ratings = (true + noise).astype(np.float32)
        return {"users": users, "items": items, "ratings": ratings}


class Batch(NamedTuple):
    """A block of the data: which rows it needs, and where its ratings use them."""

    ids: dict[str, np.ndarray]
    places: dict[str, np.ndarray]
    ratings: np.ndarray

    @classmethod
    def of(cls, block: Mapping[str, np.ndarray]) -> "Batch":
        ids, places = {}, {}
        for name in ("users", "items"):
            ids[name], places[name] = np.unique(block[name], return_inverse=True)
        return cls(ids, places, block["ratings"])


class State(NamedTuple):
    """The parameters that are no table."""

    params: dict[int, jax.Array]


class Parameters:
    """The bias, which learners hold as usual."""

    def __init__(self):
        sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        self.like = {0: jax.ShapeDtypeStruct((1,), jnp.float32, sharding=sharding)}

    def of(self, tree: Any) -> Any:
        return tree

    def put(self, state: State, arrays: Mapping[int, jax.Array]) -> State:
        return State(dict(arrays))


def loss(params, places, ratings):
    users = params["users"][places["users"]]
    items = params["items"][places["items"]]
    errors = (users * items).sum(axis=1) + params["bias"] - ratings
    return 0.5 * jnp.square(errors).sum()


_loss_and_gradients = jax.jit(jax.value_and_grad(loss))


def gradients(
    batch: Batch, rows: Mapping[str, np.ndarray], bias: Any
) -> tuple[float, jax.Array, dict[str, Sent]]:
    """Returns the loss, the gradient of the bias, and those of the rows."""
    size = batch.ratings.size  # rows are filled up, so that one program does for all
    params = {"bias": bias}
    for name, found in rows.items():
        params[name] = np.pad(found, [(0, size - len(found)), (0, 0)])
    value, grads = _loss_and_gradients(params, batch.places, batch.ratings)
    sent = {
        name: (ids, np.asarray(grads[name])[: ids.size])
        for name, ids in batch.ids.items()
    }
    return float(value), grads["bias"], sent


def job_spec(
    job: str, ratings: Ratings, rounds: int, learners: int, rate: float
) -> dict[str, Any]:
    tables = [
        Table(name=name, rows=rows, width=ratings.width, learning_rate=rate, scale=0.3)
        for name, rows in (("users", ratings.users), ("items", ratings.items))
    ]
    schedule = {"name": "Constant", "value": 0.01}
    update = {"kind": "optimizer", "optimizer": {"name": "AdamW"}}
    return {
        **{"job": job, "policy": POLICY.to_json(), "num_learners": learners},
        **{"num_rounds": rounds, "layout": LAYOUT.to_json()},
        "update": {**update, "schedule": schedule, "num_steps": rounds},
        **{"max_grad_norm": None, "skip_grad_norm": None},
        "compression": {"push": "float32"},
        "copies": 1,
        "data": {"digest": None, **dataclasses.asdict(ratings)},
        "stop": None,
        "config_digest": "recommender",
        "tables": [table.to_json() for table in tables],
        "version": metadata.version("meshloom"),
    }


def train(
    address: str,
    spec: Mapping[str, Any],
    learner: int,
    log: Callable[[str], None] = print,
) -> dict[str, float]:
    """Trains one learner to the end of the job; returns what was measured."""
    ratings, job = _ratings_of(spec), str(spec["job"])
    tables = TableRows(job, list(map(Table.from_json, spec["tables"])), Channel)

    def connect(opened: Mapping[str, Any]) -> Mover:
        tables.use(opened["servers"])
        # Jobs with tables have one copy of each block, which never moves.
        servers = Servers(job, LAYOUT, opened, Channel, lambda: opened)
        return Mover(job, LAYOUT, servers)

    exchange = Exchange(
        Client(reach(address), job, learner),
        Group(),
        Parameters(),
        LAYOUT,
        POLICY,
        connect=connect,
        tables=tables,
    )
    start = State({0: jnp.zeros(1, jnp.float32)})
    exchange.begin(spec, lambda: start.params, {"owner": f"{job}/{learner}"})
    state, began, num_rows, rounds = exchange.start(start), time.monotonic(), 0, 0
    try:
        while not (turn := exchange.turn).is_done:
            batch = Batch.of(ratings.block(turn.blocks[0]))
            rows = tables.read(turn.version, batch.ids)
            if turn.ahead:
                ahead = Batch.of(ratings.block(turn.ahead[0]))
                tables.read_ahead(turn.version, ahead.ids)
            value, bias, sent = gradients(batch, rows, state.params[0])
            sums = {"loss": value, "weight": float(ratings.batch)}
            exchange.send_gradients({0: bias}, sums, {"steps": 1}, rows=sent)
            state = exchange.merge(state, exchange.finish())
            num_rows += sum(map(len, rows.values()))
            rounds += 1
            if rounds % 20 == 0:
                log(f"round {turn.round}: loss {value / ratings.batch:.4f}")
        seconds = time.monotonic() - began
        version = exchange.turn.version
        held_out = Batch.of(ratings.block(HELD_OUT))
        rows = tables.read(version, held_out.ids)
        value, *_ = gradients(held_out, rows, state.params[0])
    finally:
        exchange.leave("done")
        tables.close()
    return {
        "held_out_rmse": float(np.sqrt(2 * value / ratings.batch)),
        "rows_per_s": num_rows / seconds,
        "rows": num_rows,
        "pulled_bytes": tables.pulled,
    }


def replay(folder: Path) -> bool:
    """Computes a finished training again; returns whether all bits are the same."""
    spec, final = (
        json.loads((folder / name).read_text()) for name in ("spec.json", "final.json")
    )
    ratings, store = _ratings_of(spec), JobStore(spec, make_update=make_update)
    store.stage(0, 0, 0, 0, 0, (0,), np.zeros(1, np.float32))
    (box,) = [slab.box for slab in LAYOUT.blocks[0].slabs]
    for line in (folder / "commits.jsonl").read_text().splitlines():
        row = json.loads(line)
        parts = row["contributions"]
        for part in parts:
            (number,) = from_ranges(part["blocks"])
            batch, version = Batch.of(ratings.block(number)), part["base"]
            rows = {
                name: store.tables[name].read(version, ids)[1]
                for name, ids in batch.ids.items()
            }
            bias = store.read(version, 0, box)
            _, gradient, sent = gradients(batch, rows, bias)
            key = part["learner"], part["incarnation"], part["round"]
            store.stage(*key, 0, 0, (0,), np.asarray(gradient))
            for name, (ids, values) in sent.items():
                store.tables[name].stage(key, ids, values)
        version = row["version"]
        store.merge(version, row["fragment"], parts, row["divisor"])
        keys = [[p["learner"], p["incarnation"], p["round"]] for p in parts]
        about = row["scale"], row["update_step"], row["share"]
        store.apply(version, *about, drop=keys)
    lanes = store.digest_lanes(final["version"])
    tables = (Table.from_json(table).layout.leaves[0] for table in spec["tables"])
    leaves = (*LAYOUT.leaves, *tables)
    return final["digests"] == {x.path: digest_of(x, lanes[x.path]) for x in leaves}


def _ratings_of(spec: Mapping[str, Any]) -> Ratings:
    data = {name: x for name, x in spec["data"].items() if name != "digest"}
    return Ratings(**data)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--exchange", metavar="ADDRESS/NAME")
    parser.add_argument("--learner", default="0/1", metavar="I/N")
    parser.add_argument("--replay", type=Path, metavar="FOLDER")
    parser.add_argument("--rounds", type=int, default=300)
    parser.add_argument("--rate", type=float, default=0.3)
    for name in ("users", "items", "width", "batch"):
        parser.add_argument(f"--{name}", type=int, default=getattr(Ratings, name))
    args = parser.parse_args(argv)
    if args.replay is not None:
        is_same = replay(args.replay)
        print("all arrays are bit-equal" if is_same else "FAILED: other digests")
        return 0 if is_same else 1
    if args.exchange is None:
        parser.error("expected --exchange ADDRESS/NAME, or --replay FOLDER")
    address, _, job = args.exchange.partition("/")
    learner, learners = map(int, args.learner.split("/"))
    sizes = {name: getattr(args, name) for name in ("users", "items", "width", "batch")}
    ratings = Ratings(**sizes)
    spec = job_spec(job or "rec", ratings, args.rounds, learners, args.rate)
    print(json.dumps({**train(address, spec, learner), "noise": ratings.noise}))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
