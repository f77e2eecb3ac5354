"""Tables of a job, from learners through real servers to its log and its replay."""

import importlib.util
import sys
from importlib import metadata

import numpy as np
import pytest
import trees
from job_specs import job_spec
from paths import ROOT

from meshloom.service.blocks.layout import Leaf, make_layout
from meshloom.service.blocks.tables import Table
from meshloom.service.coordinator.servers import ServerGroup
from meshloom.service.coordinator.spec import check_same, parse_spec
from meshloom.service.rounds.policy import make_policy
from meshloom.service.server.job_store import JobStore
from meshloom.service.server.server import BlockServer
from meshloom.service.wire import rows
from meshloom.service.wire.calls import Channel
from meshloom.service.wire.errors import Refused, Unavailable
from meshloom.service.wire.messages import encode
from meshloom.trainer.run.exchange_update import make_update

VERSION = metadata.version("meshloom")
LAYOUT = make_layout([Leaf("bias", (1,), "float32", (None,))])
TABLE = Table(name="t", rows=50, width=2, learning_rate=0.1, block_bytes=80)


def load_example():
    path = ROOT / "examples" / "recommender.py"
    spec = importlib.util.spec_from_file_location("recommender", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["recommender"] = module  # dataclasses look there
    spec.loader.exec_module(module)
    return module


recommender = load_example()


def small_spec(**changes):
    facts = {"version": VERSION, "num_rounds": 3, "tables": [TABLE.to_json()]}
    return job_spec(make_policy("local-sgd"), LAYOUT, **{**facts, **changes})


def spec_of(ratings, rounds: int) -> dict:
    """Returns the spec of the example, with rows of both tables at both servers."""
    spec = recommender.job_spec("run", ratings, rounds, 2, 0.3)
    for table in spec["tables"]:
        table["block_bytes"] = max(160, table["rows"] * 4 * table["width"] // 8)
    return spec


def train(folder, ratings, rounds: int):
    """Trains the example with two learners; returns what they measured, and bytes."""
    spec = spec_of(ratings, rounds)
    measured: list[dict] = []
    with trees.service(folder, recommender.POLICY, 2) as service:

        def learner(index: int) -> None:
            quiet = recommender.train(service.address, spec, index, lambda text: None)
            measured.append(quiet)

        trees.at_once([lambda i=i: learner(i) for i in range(2)])
        return measured, service.moved()


def table_of(folder, ratings, rounds: int) -> dict[str, np.ndarray]:
    """Returns the tables of the newest checkpoint."""
    store = JobStore(spec_of(ratings, rounds), make_update=make_update)
    store.load(folder / "run" / "service" / str(rounds), rounds)
    found = {}
    for name, part in store.tables.items():
        found[name] = part.read(rounds, np.arange(part.table.rows))[1]
    return found


def test_planted_factors_are_recovered_and_the_log_replays_them(tmp_path):
    ratings, rounds = recommender.Ratings(users=60, items=40, width=4, batch=256), 60
    measured, moved = train(tmp_path, ratings, rounds)
    tables = table_of(tmp_path, ratings, rounds)
    planted = {n: ratings.planted(n, np.arange(len(x))) for n, x in tables.items()}
    true = planted["users"] @ planted["items"].T
    error = tables["users"] @ tables["items"].T - true
    assert np.linalg.norm(error) < 0.1 * np.linalg.norm(true)
    for found in measured:
        assert found["held_out_rmse"] < 1.2 * ratings.noise
        # All rows of each batch, and the held-out ones; nothing else.
        assert found["rows"] <= rounds * 100
    assert recommender.replay(tmp_path / "run")


def test_what_a_step_moves_does_not_grow_with_the_table(tmp_path):
    moved = []
    for users in (1_000, 100_000):
        ratings = recommender.Ratings(users=users, items=50, width=4, batch=16)
        _, found = train(tmp_path / str(users), ratings, 4)
        moved.append(found)
    # In the large table more of the 16 users of a batch are different ones.
    assert (moved[1] < 1.1 * moved[0]).all(), moved
    assert moved[1].sum() < 0.05 * 100_000 * 4 * 4


def test_rows_survive_the_wire_and_damage_is_found():
    ids = np.array([3, 5, 900_000_000_000])
    values = np.arange(6, dtype=np.float32).reshape(3, 2)
    sent = list(rows.encode({"job": "x"}, ids, values))
    about, *found = rows.decode(iter(sent))
    assert about["job"] == "x"
    np.testing.assert_array_equal(found[0], ids)
    np.testing.assert_array_equal(found[1], values)
    flipped = bytes([sent[2][0] ^ 1]) + sent[2][1:]
    for messages, text in (
        (sent[:2], "rows are short: 24 of 48 bytes"),
        ([*sent, b"more"], "more than the 48 bytes"),
        ([header(rows=-1, width=2)], "header of rows: rows -1"),
        ([header(rows=100_000_000, width=200)], "too many; send fewer"),
        ([b"[]"], "header of rows"),
        ([], "header of rows"),
    ):
        with pytest.raises(Refused, match=text):
            rows.decode(iter(messages))
    with pytest.raises(Unavailable, match="rows are damaged: CRC32C"):
        rows.decode(iter([*sent[:2], flipped]))


def header(**fields) -> bytes:
    return encode({**fields, "crc32c": 0})


class Recording:
    """A server that notes what it is told to create, and has a store of it."""

    def __init__(self, name: str):
        self.name, self.address = name, f"{name}:1"
        self.blocks = BlockServer()

    def call(self, method, message):
        return self.blocks.methods[method](message)


def test_a_server_without_parameters_has_its_part_of_a_table():
    servers = [Recording("a"), Recording("b")]
    group = ServerGroup("run", LAYOUT, servers, tables=[TABLE])
    assert group.names == ["a", "b"]  # the only block of parameters is at one of them
    group.create(small_spec())
    group.create(small_spec())  # again: they keep what they have
    stores = [s.blocks._store("run") for s in servers]
    assert [len(store.owned) for store in stores] in ([0, 1], [1, 0])
    owned = [*stores[0].tables["t"].owned, *stores[1].tables["t"].owned]
    assert sorted(owned) == [*range(5)] and len(stores[0].tables["t"].owned) in (
        1,
        2,
        3,
        4,
    )
    assert sum(store.status()["bytes"] for store in stores) == 4 + 50 * 3 * 4
    (holder,) = [store for store in stores if store.owned]
    holder.stage(0, 0, 0, 0, 0, (0,), np.zeros(1, np.float32))
    alone = JobStore(small_spec())
    alone.stage(0, 0, 0, 0, 0, (0,), np.zeros(1, np.float32))
    digests = group.digests(0)
    assert set(digests) == {"bias", "t"}
    assert ServerGroup("run", LAYOUT, [Recording("c")], tables=[TABLE]).names == ["c"]
    group.close()


def test_a_commit_is_one_for_parameters_and_rows(tmp_path):
    store = JobStore(small_spec())
    store.stage(0, 0, 0, 0, 0, (0,), np.ones(1, np.float32))
    part = {"learner": 0, "incarnation": 1, "round": 1, "base": 0, "coefficient": 1.0}
    store.stage(0, 1, 1, 0, 0, (0,), np.full(1, 3.0, np.float32))
    with pytest.raises(Refused, match="table 't', learner 0 .*round 1: nothing of it"):
        store.merge(1, 0, [part], 1.0)
    ids = np.array([7])
    store.tables["t"].stage((0, 1, 1), ids, np.array([[0.0, 4.0]], np.float32))
    assert store.merge(1, 0, [part], 1.0)["sum_of_squares"] == 25.0
    assert store.status()["staged"] == [[0, 1, 1]]
    store.apply(1, 1.0, 0, 1.0, drop=[[0, 1, 1]])
    assert store.status()["staged"] == []
    before = store.digest_lanes(1)
    store.save(tmp_path, 1)
    other = JobStore(small_spec())
    other.load(tmp_path, 1)
    assert other.digest_lanes(1) == before and set(before) == {"bias", "t"}
    assert store.holds([0], {"t": range(5)}) and not store.holds([0], {"t": [0]})
    with pytest.raises(Refused, match=r"no rows of table 'x' are here, but of \['t'\]"):
        store.pull_rows({"table": "x", "version": 1, "since": None, "ids": ""})


def test_learners_must_agree_on_tables():
    spec = parse_spec(small_spec(), VERSION)
    assert spec.tables == (TABLE,)
    for changes, found in (
        ({"tables": []}, "another tables"),
        ({"tables": [{**TABLE.to_json(), "rows": 51}]}, "another tables"),
    ):
        with pytest.raises(Refused, match=found):
            check_same(spec, parse_spec(small_spec(**changes), VERSION))
    for tables, found in (
        ([TABLE.to_json()] * 2, "two arrays have the name 't'"),
        ([{**TABLE.to_json(), "name": "bias"}], "two arrays have the name 'bias'"),
        ([{"name": "t"}], "expected an object with"),
    ):
        with pytest.raises(Refused, match=found):
            parse_spec(small_spec(tables=tables), VERSION)
    with pytest.raises(Refused, match="copies is 2, and the job has tables, whose row"):
        parse_spec(small_spec(copies=2), VERSION)


def test_mergers_refuse_a_job_with_tables_or_copies(tmp_path):
    with trees.service(tmp_path, make_policy("local-sgd"), 2) as service:
        channel = Channel(service.merger().address)
        with pytest.raises(Refused, match="has tables, whose rows a merger does not"):
            channel.call("OpenJob", small_spec())
        with pytest.raises(Refused, match=r"move, and .* 2 copies. Set exchange.copie"):
            channel.call("OpenJob", small_spec(copies=2, tables=[]))
        channel.close()
