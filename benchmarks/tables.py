"""Rows of tables on a server against a dense table on one device.

  python benchmarks/tables.py
  python benchmarks/tables.py --rows 100000 1000000 --dense 100000 --steps 20

A step reads 4096 random rows of 32 numbers over loopback, and sends a gradient for
each; the server merges and applies it. The dense step is the same in one process:
AdaGrad of optax on a jax array. Times are those of the whole step, wall-clock and of
all CPUs, and memory is the peak of the learner's process. There is no coordinator, and
no model.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from typing import Any

import numpy as np

from meshloom.service.blocks.layout import Leaf, make_layout
from meshloom.service.blocks.tables import Table
from meshloom.service.learner.rows import TableRows
from meshloom.service.rounds.policy import make_policy
from meshloom.service.server.server import ServerProcess
from meshloom.service.wire.calls import Channel

WIDTH, BATCH, WARMUP, RATE = 32, 4096, 3, 0.1
LAYOUT = make_layout([Leaf("bias", (1,), "float32", (None,))])
LIMIT = 600.0


def table_of(rows: int) -> Table:
    return Table(name="items", rows=rows, width=WIDTH, learning_rate=RATE)


def serve(rows: int) -> None:
    """Holds a table; prints its address, and then its CPU time for each line read."""
    server, table = ServerProcess(), table_of(rows)
    spec = {
        **{"job": "bench", "policy": make_policy("local-sgd").to_json()},
        **{"layout": LAYOUT.to_json(), "update": {"kind": "outer"}},
        "tables": [table.to_json()],
    }
    tables = {"items": list(range(len(table.layout.blocks)))}
    about = {"job": "bench", "spec": spec, "blocks": [0], "tables": tables}
    server.blocks.create(about)
    channel = Channel(server.address)
    channel.push("bench", 0, 0, 0, [(0, 0, (0,), np.zeros(1, np.float32))])
    channel.close()
    print(server.address, flush=True)
    for _ in sys.stdin:
        print(json.dumps({"cpu_s": time.process_time(), **memory()}), flush=True)
    server.close()


def learn(address: str, rows: int, steps: int) -> dict[str, Any]:
    """Takes steps as the only learner, and orders the commits."""
    tables = TableRows("bench", [table_of(rows)], Channel)
    tables.use({address: address})
    channel, random = Channel(address), np.random.default_rng(0)
    ids = [np.unique(random.integers(0, rows, BATCH)) for _ in range(steps + WARMUP)]
    moved, seconds, cpu = 0, 0.0, 0.0
    for n, own in enumerate(ids):
        began, before = time.perf_counter(), time.process_time()
        values = tables.read(n, {"items": own})["items"]
        if n + 1 < len(ids):
            tables.read_ahead(n, {"items": ids[n + 1]})
        tables.push({"items": (own, values)}, 0, 1, n + 1)
        pieces = [(0, 0, (0,), np.zeros(1, np.float32))]
        channel.push("bench", 0, 1, n + 1, pieces)
        key = {"learner": 0, "incarnation": 1, "round": n + 1}
        part = {**key, "base": n, "weight": 1.0, "coefficient": 1.0}
        about = {"job": "bench", "term": 0, "version": n + 1}
        merge = {"fragment": 0, "contributions": [part], "divisor": 1.0}
        channel.call("Merge", {**about, **merge}, LIMIT)
        apply = {"scale": 1.0, "step": n, "share": 1.0}
        apply |= {"keep": [n], "drop": [[0, 1, n + 1]]}
        channel.call("Apply", {**about, **apply}, LIMIT)
        if n >= WARMUP:
            seconds += time.perf_counter() - began
            cpu += time.process_time() - before
            moved += own.size
    tables.close()
    channel.close()
    return {"rows_read": moved, "seconds": seconds, "cpu_s": cpu, **memory()}


def dense(rows: int, steps: int) -> dict[str, Any]:
    """Takes the same steps with the whole table on one device."""
    import jax
    import jax.numpy as jnp
    import optax

    tx = optax.adagrad(RATE, 0.0)

    def loss(table, ids):
        return 0.5 * jnp.square(table[ids]).sum()

    def step(table, state, ids):
        updates, state = tx.update(jax.grad(loss)(table, ids), state, table)
        return optax.apply_updates(table, updates), state

    step_fn = jax.jit(step, donate_argnums=(0, 1))
    table = jax.random.uniform(jax.random.key(0), (rows, WIDTH))
    state, random = tx.init(table), np.random.default_rng(0)
    moved, seconds, cpu = 0, 0.0, 0.0
    for n in range(steps + WARMUP):
        ids = random.integers(0, rows, BATCH)
        began, before = time.perf_counter(), time.process_time()
        table, state = jax.block_until_ready(step_fn(table, state, ids))
        if n >= WARMUP:
            seconds += time.perf_counter() - began
            cpu += time.process_time() - before
            moved += np.unique(ids).size
    return {"rows_read": moved, "seconds": seconds, "cpu_s": cpu, **memory()}


def memory() -> dict[str, int]:
    """Returns the peak of this process, in MB."""
    kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {"peak_mb": round(kib / 1000)}


def child(*argv: str) -> dict[str, Any]:
    command = [sys.executable, __file__, *argv]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT)
    if done.returncode:
        raise SystemExit(done.stderr)
    return json.loads(done.stdout)


def measure_table(rows: int, steps: int) -> dict[str, Any]:
    server = subprocess.Popen(
        [sys.executable, __file__, "--serve", str(rows)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert server.stdin is not None and server.stdout is not None
    try:
        address = server.stdout.readline().strip()
        before = asked(server)
        found = child("--learn", address, str(rows), str(steps))
        after = asked(server)
        cpu = found["cpu_s"] + after["cpu_s"] - before["cpu_s"]
        return {**found, "cpu_s": cpu, "server_peak_mb": after["peak_mb"]}
    finally:
        server.kill()
        server.wait()
        server.stdin.close()
        server.stdout.close()


def asked(server: subprocess.Popen) -> dict[str, Any]:
    """Returns what a server says of its CPU time and memory."""
    assert server.stdin is not None and server.stdout is not None
    server.stdin.write("\n")
    server.stdin.flush()
    return json.loads(server.stdout.readline())


def report(name: str, rows: int, steps: int, found: dict[str, Any]) -> None:
    about = {
        "name": name,
        "rows": rows,
        "ms_per_step": round(1000 * found["seconds"] / steps, 1),
        "cpu_ms_per_step": round(1000 * found["cpu_s"] / steps, 1),
        "rows_per_s": round(found["rows_read"] / found["seconds"]),
        "rows_per_cpu_s": round(found["rows_read"] / found["cpu_s"]),
        "learner_peak_mb": found["peak_mb"],
        "server_peak_mb": found.get("server_peak_mb"),
        "load": [round(x, 1) for x in os.getloadavg()[:2]],
    }
    print(json.dumps(about), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    sizes = [100_000, 1_000_000, 10_000_000]
    parser.add_argument("--rows", type=int, nargs="*", default=sizes)
    parser.add_argument("--dense", type=int, nargs="*", default=sizes[:2])
    parser.add_argument("--steps", type=int, default=20)
    for flag, num in (("--serve", 1), ("--learn", 3), ("--one-dense", 2)):
        parser.add_argument(flag, nargs=num, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        serve(int(args.serve[0]))
    elif args.learn:
        address, rows, steps = args.learn
        print(json.dumps(learn(address, int(rows), int(steps))))
    elif args.one_dense:
        print(json.dumps(dense(*map(int, args.one_dense))))
    else:
        for rows in args.rows:
            report("table", rows, args.steps, measure_table(rows, args.steps))
        for rows in args.dense:
            found = child("--one-dense", str(rows), str(args.steps))
            report("dense", rows, args.steps, found)


if __name__ == "__main__":
    main()
