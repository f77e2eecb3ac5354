"""Tests of servers over real sockets, and of one that is killed in its own process."""

import json
import os
import signal
import subprocess
import sys
import threading
import time

import google_crc32c
import numpy as np
import pytest

from meshloom.service.blocks import hashing
from meshloom.service.blocks.layout import Box, Leaf, make_layout
from meshloom.service.blocks.pieces import pieces
from meshloom.service.server import copying
from meshloom.service.server import server as server_lib
from meshloom.service.server.server import BlockServer, ServerProcess
from meshloom.service.wire import tensors
from meshloom.service.wire.calls import Channel, Download, Server
from meshloom.service.wire.errors import Refused, Unavailable
from meshloom.service.wire.messages import encode

LEAVES = [
    Leaf("table", (600, 40), "float32", (None, "embed")),
    Leaf("up", (3, 50, 40), "bfloat16", ("layer", None, "ff")),
    Leaf("scale", (), "float32", ()),
]
LAYOUT = make_layout(LEAVES, block_bytes=6_000)
OUTER = {"learning_rate": 1.0, "momentum": 0.0, "nesterov": False}
SPEC = {
    "job": "j",
    "policy": {"outer": OUTER, "compensation": 0.0},
    "layout": LAYOUT.to_json(),
    "update": {"kind": "outer"},
}


def values(seed):
    rng = np.random.default_rng(seed)
    arrays = [rng.normal(size=leaf.shape).astype(np.float32) for leaf in LEAVES]
    # Representable in bfloat16, so that every comparison below is exact.
    return [np.asarray(np.round(a * 4) / 4, np.float32) for a in arrays]


class Group:
    """A job on several servers, as a learner and a coordinator see it."""

    def __init__(self, addresses, job="j", **credentials):
        self.job = job
        self.channels = {a: Channel(a, **credentials) for a in addresses}
        self.owners = hashing.owners(LAYOUT, job, addresses)

    def all(self, method, **message):
        message = {"job": self.job, **message}
        return [c.call(method, message, 30) for c in self.channels.values()]

    def create(self):
        for address, channel in self.channels.items():
            blocks = [b for b, owner in self.owners.items() if owner == address]
            channel.call("Create", {"job": self.job, "spec": SPEC, "blocks": blocks})

    def busiest(self):
        """Returns address and channel of the server with the most blocks."""
        owners = list(self.owners.values())
        return max(self.channels.items(), key=lambda item: owners.count(item[0]))

    def rows(self, arrays, address):
        for leaf, array in enumerate(arrays):
            for block, slab, box in pieces(LAYOUT, leaf, Box.whole(array.shape)):
                if self.owners[block] == address:
                    yield block, slab, box.start, array[(*box.slices(), ...)]

    def push(self, learner, round, arrays):
        for address, channel in self.channels.items():
            rows = self.rows(arrays, address)
            channel.push(self.job, learner, 0, round, rows, 30)

    def commit(self, version, learner=0):
        row = {"learner": learner, "incarnation": 0, "round": version}
        rows = [{**row, "base": version - 1, "coefficient": 1.0, "weight": 1.0}]
        facts = {"fragment": 0, "contributions": rows, "divisor": 1.0}
        self.all("Merge", version=version, **facts)
        drop = [[learner, 0, version]]
        facts = {"scale": 1.0, "step": 0, "share": 1.0, "keep": [0], "drop": drop}
        return self.all("Apply", version=version, **facts)

    def pull(self, version):
        found = [np.empty(leaf.shape, np.float32) for leaf in LEAVES]
        for address, channel in self.channels.items():
            into = {
                (leaf, box): found[leaf][(*box.slices(), ...)]
                for leaf, array in enumerate(found)
                for block, _, box in pieces(LAYOUT, leaf, Box.whole(array.shape))
                if self.owners[block] == address
            }
            channel.pull(self.job, version, list(into), into, 30)
        return found

    def close(self):
        for channel in self.channels.values():
            channel.close()


@pytest.fixture
def group():
    processes = [ServerProcess(), ServerProcess()]
    made = Group([process.address for process in processes])
    yield made
    made.close()
    for process in processes:
        process.close()


def equal(one, other):
    return all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))


def test_push_commit_and_pull_on_two_servers(group, tmp_path):
    group.create()
    group.push(0, 0, values(0))
    assert equal(group.pull(0), values(0))
    group.push(0, 1, values(1))
    assert group.commit(1) == [{"version": 1}] * 2
    expected = [a - b for a, b in zip(values(0), values(1), strict=True)]
    assert equal(group.pull(1), expected) and equal(group.pull(0), values(0))
    assert all(part["version"] == 1 for part in group.all("Status"))
    paths = {path for part in group.all("Digest", version=1) for path in part["lanes"]}
    assert paths == {leaf.path for leaf in LEAVES}
    group.all("Save", folder=str(tmp_path), version=1)
    group.push(0, 2, values(2))
    group.commit(2)
    group.all("Load", folder=str(tmp_path), version=1)
    assert equal(group.pull(1), expected)


def test_two_jobs_do_not_meet(group):
    other = Group(list(group.channels), job="k")
    for each, seed in ((group, 0), (other, 1)):
        each.create()
        each.push(0, 0, values(seed))
    other.push(0, 1, values(2))
    other.commit(1)
    assert equal(group.pull(0), values(0)) and equal(other.pull(0), values(1))
    other.all("Forget")
    with pytest.raises(Refused, match=r"this server has no job 'k', but \['j'\]"):
        other.pull(0)
    assert equal(group.pull(0), values(0))
    other.close()


def test_dropped_contributions_are_gone(group):
    group.create()
    group.push(0, 0, values(0))
    group.push(1, 5, values(1))
    assert all(part["staged"] == [[1, 0, 5]] for part in group.all("Status"))
    group.all("Drop", contributions=[[1, 0, None]])
    assert all(part["staged"] == [] for part in group.all("Status"))


def test_a_damaged_piece_is_refused_and_can_be_sent_again(group, monkeypatch):
    group.create()
    address, channel = group.busiest()
    encode = tensors.encode

    def flipping(arrays):
        data = bytearray(b"".join(encode(arrays)))
        data[-5] ^= 1  # the last byte before the checksum
        return iter([bytes(data)])

    monkeypatch.setattr(tensors, "encode", flipping)
    with pytest.raises(Unavailable, match="is damaged: CRC32C"):
        channel.push("j", 0, 0, 0, group.rows(values(0), address), 30)
    assert channel.call("Status", {"job": "j"})["version"] is None
    monkeypatch.setattr(tensors, "encode", encode)
    group.push(0, 0, values(0))
    assert equal(group.pull(0), values(0))


def test_bad_messages_get_one_line(group):
    group.create()
    group.push(0, 0, values(0))
    address, channel = group.busiest()
    about = {"job": "j", "learner": 0, "incarnation": 0, "round": 1}
    held = next(block for block, owner in group.owners.items() if owner == address)
    # More memory than there is: it must be refused before the bytes are received.
    huge = {"block": held, "slab": 0, "start": [0, 0], "shape": [1 << 22, 1 << 22]}
    huge |= {"dtype": "float32", "nbytes": 1 << 46}
    if len(LAYOUT.blocks[held].slabs[0].box.shape) == 3:
        huge |= {"start": [0, 0, 0], "shape": [1, 1 << 22, 1 << 22]}
    header = json.dumps(huge).encode()
    header = len(header).to_bytes(4, "little") + header
    crc = google_crc32c.value(header).to_bytes(4, "little")
    too_large = [encode(about), header + crc]
    piece = np.ones((1, 40), np.float32)
    cases = [
        (lambda: channel.push("x", 0, 0, 1, []), "this server has no job 'x'"),
        (
            lambda: channel.push("j", 0, 0, 1, [(99, 0, (0, 0), piece)]),
            "block 99 is not",
        ),
        (lambda: channel.upload("Push", iter(too_large)), "outside of its slab"),
        (lambda: channel.upload("Push", iter([])), "expected a message with job"),
        (
            lambda: channel.upload("Push", iter([encode({"job": "j"})])),
            "without learner",
        ),
        (lambda: channel.pull("j", 7, [], {}), None),
        (lambda: channel.pull("j", 7, [(0, Box((0, 0), (1, 1)))], {}), "version 7"),
        (lambda: channel.call("Merge", {"job": "j"}), "without version, fragment"),
    ]
    for call, message in cases:
        if message is None:
            assert call() == 0
            continue
        with pytest.raises(Refused, match=message):
            call()


def test_another_layout_or_policy_under_the_same_name_is_refused():
    server = BlockServer()
    message = {"job": "j", "spec": SPEC, "blocks": [0, 1]}
    assert server.create(message) == {"version": None}
    assert server.create(message) == {"version": None}
    changed = {**SPEC, "policy": {**SPEC["policy"], "compensation": 1.0}}
    with pytest.raises(Refused, match="job 'j' is here with another policy"):
        server.create({**message, "spec": changed})
    layout = make_layout(LEAVES).to_json()
    with pytest.raises(Refused, match="job 'j' is here with another layout"):
        server.create({**message, "spec": {**SPEC, "layout": layout}})


def test_other_blocks_of_the_same_job_start_empty(caplog):
    server = BlockServer()
    server.create({"job": "j", "spec": SPEC, "blocks": []})
    assert server.status({"job": "j"})["version"] == 0
    server.create({"job": "j", "spec": SPEC, "blocks": [1]})
    assert server.status({"job": "j"})["version"] is None
    assert "starts empty" in caplog.text


def test_strangers_can_neither_push_nor_pull():
    process = ServerProcess(token="right")
    stranger = Channel(process.address, token="wrong")
    with pytest.raises(Refused, match="wrong or missing token"):
        stranger.push("j", 0, 0, 0, [])
    with pytest.raises(Refused, match="wrong or missing token"):
        stranger.pull("j", 0, [(0, Box((), ()))], {})
    stranger.close()
    process.close()


def wait_for(is_true, seconds=30.0):
    deadline = time.monotonic() + seconds
    while not is_true():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_server_registers_beats_and_registers_again(monkeypatch):
    monkeypatch.setattr(server_lib, "BEAT_SECONDS", 0.1)
    calls, known = [], set()

    def register(message):
        calls.append("RegisterServer")
        known.add(message["name"])
        assert message["address"].startswith("127.0.0.1:") and message["version"]
        return {}

    def beat(message):
        calls.append("Beat")
        if message["name"] not in known:
            raise Refused("unknown server")
        return {}

    coordinator = Server("127.0.0.1:0", {"RegisterServer": register, "Beat": beat})
    address = f"127.0.0.1:{coordinator.port}"
    process = ServerProcess(name="s0", coordinator=address)
    wait_for(lambda: calls.count("Beat") >= 2)
    assert calls.count("RegisterServer") == 1 and known == {"s0"}
    known.clear()  # as if the coordinator had been restarted
    wait_for(lambda: known == {"s0"})
    process.close()
    num = len(calls)
    time.sleep(0.3)
    assert len(calls) == num, "a closed server is silent"
    coordinator.close(0)


def test_no_coordinator_there():
    with pytest.raises(Unavailable, match="no answer to RegisterServer"):
        ServerProcess(coordinator="127.0.0.1:9")


CHILD = """
import sys, time
from meshloom.service.server.server import ServerProcess
process = ServerProcess()
print(process.address, flush=True)
time.sleep(60)
"""


@pytest.mark.processes
def test_a_killed_server_is_noticed_by_those_who_push_and_pull():
    command = [sys.executable, "-c", CHILD]
    env = {**os.environ, "JAX_PLATFORMS": "cpu"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env) as child:
        try:
            assert child.stdout is not None
            group = Group([child.stdout.readline().strip()])
            group.create()
            group.push(0, 0, values(0))

            def rows():
                for i, row in enumerate(group.rows(values(1), child_address)):
                    if i == 1:
                        os.kill(child.pid, signal.SIGKILL)
                    yield row

            (child_address,) = group.channels
            channel = group.channels[child_address]
            begin = time.monotonic()
            with pytest.raises(Unavailable, match="no answer to Push"):
                channel.push("j", 0, 0, 1, rows(), 30)
            with pytest.raises(Unavailable, match="no answer to Pull"):
                group.pull(0)
            assert time.monotonic() - begin < 20
            group.close()
        finally:
            child.kill()


def test_a_stream_that_is_cut_counts_what_was_complete(group):
    """The caller's deadline ends the stream; the pieces before stay, no other does."""
    group.create()
    address, channel = group.busiest()
    rows = list(group.rows(values(0), address))

    def slowly():
        yield from rows[:2]
        time.sleep(2)
        yield from rows[2:]

    with pytest.raises(Unavailable, match="in time"):
        channel.push("j", 0, 0, 0, slowly(), 0.5)
    assert channel.call("Status", {"job": "j"})["version"] is None
    group.push(0, 0, values(0))
    assert equal(group.pull(0), values(0))


def test_a_server_that_falls_silent_while_it_sends_blocks_is_given_up(monkeypatch):
    """Commits wait for the blocks, so not for as long as a large one may take."""
    may_end = threading.Event()

    def copy(message):
        yield encode({"version": 0, "dropped": []})
        may_end.wait(60)

    monkeypatch.setattr(copying, "SILENT_SECONDS", 0.5)
    source = Server("127.0.0.1:0", {}, {"Copy": Download(copy)})
    server = BlockServer(connect=Channel)
    about = {"job": "j", "term": 0}
    try:
        server.methods["Create"]({**about, "spec": SPEC, "blocks": [0]})
        order = {"source": f"127.0.0.1:{source.port}", "version": 0, "blocks": [0]}
        begin = time.monotonic()
        answer = server.methods["Fetch"]({**about, **order})
        assert answer["arrived"] == [] and "did not arrive" in answer["failed"]
        assert 0.5 <= time.monotonic() - begin < 20
    finally:
        may_end.set()
        source.close(0)
