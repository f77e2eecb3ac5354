"""Measures push and pull of tensors against a bare gRPC stream of the same chunks.

    python benchmarks/wire.py [--mib 64] [--rounds 21]

A server in a process of its own, on loopback. Both sides alternate in one run. The bare
stream sends as many chunks of the same size, made beforehand, and does nothing with
them; ours addresses pieces, computes and compares CRC32C, and copies them to their
places. Shared memory is what two processes of one host could do instead: each copies
between its array and a file in memory, and computes CRC32C of every chunk.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable

import google_crc32c
import numpy as np
from rich.console import Console
from rich.table import Table

from meshloom.service.blocks.layout import Box, Layout, Leaf, make_layout
from meshloom.service.blocks.pieces import pieces
from meshloom.service.server.server import BlockServer
from meshloom.service.wire.calls import Channel, Download, Server, Upload
from meshloom.service.wire.tensors import CHUNK

OUTER = {"learning_rate": 1.0, "momentum": 0.0, "nesterov": False}


def serve() -> None:
    """Runs a server with two more streams, until its input is closed."""
    blocks = BlockServer()
    chunks: list[bytes] = []
    held: dict[int, np.ndarray] = {}

    def prepare(message):
        chunks.extend(bytes(CHUNK) for _ in range(message["num"]))
        return {}

    def take(message):
        shared = np.memmap(message["path"], np.uint8)
        return {"crc": copied(shared, own(shared.size))}

    def give(message):
        shared = np.memmap(message["path"], np.uint8)
        return {"crc": copied(own(shared.size), shared)}

    def own(size):
        return held.setdefault(size, np.zeros(size, np.uint8))

    def swallow(messages):
        return {"bytes": sum(map(len, messages))}

    def pour(message):
        return iter(chunks)

    bare = {"Swallow": Upload(swallow), "Pour": Download(pour)}
    methods = {**blocks.methods, "Prepare": prepare, "Take": take, "Give": give}
    server = Server("127.0.0.1:0", methods, {**blocks.streams, **bare})
    print(server.port, flush=True)
    sys.stdin.read()
    server.close(0)


def copied(source: np.ndarray, target: np.ndarray) -> int:
    """Copies bytes chunk by chunk; returns their CRC32C."""
    crc = 0
    for first in range(0, source.size, CHUNK):
        chunk = source[first : first + CHUNK]
        crc = google_crc32c.extend(crc, chunk)
        np.copyto(target[first : first + CHUNK], chunk)
    return crc


def measure(channel: Channel, layout: Layout, args: argparse.Namespace) -> dict:
    """Returns seconds of each round, by what was moved."""
    array = np.random.default_rng(0).normal(size=layout.leaves[0].shape)
    array = array.astype(np.float32)
    whole = Box.whole(array.shape)
    rows = [
        (block, slab, box.start, array[box.slices()])
        for block, slab, box in pieces(layout, 0, whole)
    ]
    into = {
        (0, box): np.empty(box.shape, np.float32)
        for _, _, box in pieces(layout, 0, whole)
    }
    num = array.nbytes // CHUNK
    flat = array.reshape(-1).view(np.uint8)
    chunks = [flat[i * CHUNK :][:CHUNK].tobytes() for i in range(num)]
    channel.call("Prepare", {"num": num})
    channel.push("wire", 0, 0, 0, rows)

    def push(n: int) -> None:
        channel.push("wire", 0, 0, n + 1, rows)

    def pull(n: int) -> None:
        channel.pull("wire", 0, list(into), into)

    def bare_push(n: int) -> None:
        channel.upload("Swallow", iter(chunks))

    def bare_pull(n: int) -> None:
        total = sum(map(len, channel.download("Pour", {})))
        assert total == array.nbytes

    file = tempfile.NamedTemporaryFile(dir="/dev/shm")
    file.truncate(array.nbytes)
    shared, back = np.memmap(file.name, np.uint8), np.empty(array.nbytes, np.uint8)

    def shared_push(n: int) -> None:
        crc = copied(flat, shared)
        assert channel.call("Take", {"path": file.name}) == {"crc": crc}

    def shared_pull(n: int) -> None:
        answer = channel.call("Give", {"path": file.name})
        assert answer == {"crc": copied(shared, back)}

    movers: dict[str, Callable[[int], None]] = {
        "push": push,
        "bare push": bare_push,
        "pull": pull,
        "bare pull": bare_pull,
        "shared push": shared_push,
        "shared pull": shared_pull,
    }
    seconds: dict[str, list[float]] = {name: [] for name in movers}
    for n in range(args.rounds + 1):  # the first is a warm-up
        for name, move in movers.items():
            begin = time.perf_counter()
            move(n)
            if n:
                seconds[name].append(time.perf_counter() - begin)
        # A contribution is dropped after its commit, and its buffers are used again.
        channel.call("Drop", {"job": "wire", "contributions": [[0, 0, n + 1]]})
    assert all(np.array_equal(into[0, box], array[box.slices()]) for _, box in into)
    return seconds


def summary(seconds: dict[str, list[float]], nbytes: int) -> dict:
    """Returns throughputs, and medians of the ratios of neighbouring rounds."""
    ours = [a + b for a, b in zip(seconds["push"], seconds["pull"], strict=True)]
    bare = [
        a + b for a, b in zip(seconds["bare push"], seconds["bare pull"], strict=True)
    ]
    found: dict = {
        f"{name.replace(' ', '_')}_gb_s": round(nbytes / 1e9 / statistics.median(s), 3)
        for name, s in seconds.items()
    }
    for name, one, other in (
        ("push_over_bare", seconds["push"], seconds["bare push"]),
        ("pull_over_bare", seconds["pull"], seconds["bare pull"]),
        ("both_over_bare", ours, bare),
        ("push_over_shared", seconds["push"], seconds["shared push"]),
        ("pull_over_shared", seconds["pull"], seconds["shared pull"]),
    ):
        ratios = [b / a for a, b in zip(one, other, strict=True)]
        found[name] = round(statistics.median(ratios), 3)
    return {"bytes": nbytes, "chunk": CHUNK, "rounds": len(ours), **found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        return serve()
    leaf = Leaf("w", (args.mib, 512, 512), "float32", ("layer", None, None))
    layout = make_layout([leaf])
    spec = {"job": "wire", "policy": {"outer": OUTER}, "update": {"kind": "outer"}}
    spec["layout"] = layout.to_json()
    command = [sys.executable, __file__, "--serve"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as child:
        assert child.stdout is not None
        channel = Channel(f"127.0.0.1:{int(child.stdout.readline())}")
        blocks = list(range(len(layout.blocks)))
        message = {"job": "wire", "spec": spec, "blocks": blocks}
        channel.call("Create", message)
        seconds = measure(channel, layout, args)
        channel.close()
        child.communicate()
    found = summary(seconds, leaf.nbytes)
    # Ratios are medians of the pairs of a round.
    table = Table("GB/s", "ours", "bare gRPC", "ratio", "shared memory", "ratio")
    for name in ("push", "pull"):
        row = f"{name}_gb_s", f"bare_{name}_gb_s", f"{name}_over_bare"
        row += f"shared_{name}_gb_s", f"{name}_over_shared"
        table.add_row(name, *(f"{found[key]}" for key in row))
    table.add_row("push + pull", "", "", f"{found['both_over_bare']}")
    Console(stderr=True).print(table)
    print(json.dumps({"wire": found}))


if __name__ == "__main__":
    main()
