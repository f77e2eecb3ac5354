"""Measures a service whose servers come, leave and die while learners push and pull.

    python benchmarks/servers.py [--servers 4] [--learners 2] [--params 4e6]

Coordinator and servers are processes on this machine, and each block has two copies.
Learners have no model: they push a contribution of all parameters and pull the next
version, without a pause. A server is added, another one is asked to leave (SIGTERM),
and one is killed (kill -9), each after --rounds rounds.

*moved* is the share of all copies of blocks that were copied to another server, and
*ideal* that of a placement that moves nothing else than what it must: 1/n, with n the
servers of which one is new or gone. *settled* is the time until every block has two
copies again. A learner's *wait* is the time from the beginning of a push to the
parameters of the next round. *no commit* is the longest time without one, from the
event on.
Figures are printed as JSON and written to --folder.
"""

import argparse
import contextlib
import dataclasses
import json
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

from playing import Player
from rich.console import Console
from rich.table import Table

from meshloom.launch.atomic_file import replace_text
from meshloom.service.blocks.layout import Leaf, make_layout
from meshloom.service.rounds.policy import Outer, Policy
from meshloom.service.wire.codecs import PLAIN
from meshloom.trainer.record import metrics

PROGRAM = (sys.executable, "-P", "-m", "meshloom.trainer.cli", "serve")
LIMIT_SECONDS = 600.0
MOVED = re.compile(r"moved (\d+) of (\d+) copies of blocks")
JOB = "bench"


class Over(Exception):
    """The measurement is over: learners stop."""


@dataclasses.dataclass(frozen=True)
class Event:
    """What happened when a server came or went."""

    name: str
    moved: float
    ideal: float
    settled_s: float
    longest_wait_s: float
    usual_wait_s: float
    no_commit_s: float


class Service:
    """A coordinator and servers, each a process; all end with the block."""

    def __init__(self, folder: Path, num_servers: int):
        self.folder = folder
        self.servers: list[subprocess.Popen] = []
        self._all: list[subprocess.Popen] = []
        folder.mkdir(parents=True)
        flags = ["--role", "coordinator", "--servers", str(num_servers)]
        self._start("coordinator", *flags)
        address = folder / "coordinator" / "address"
        wait_for(address.exists)
        self.address = address.read_text().strip()
        for _ in range(num_servers):
            self.add()

    def add(self) -> None:
        name = f"server-{len(self._all)}"
        where = ["--role", "server", "--coordinator", self.address]
        self.servers.append(self._start(name, *where))

    def _start(self, name: str, *flags: str) -> subprocess.Popen:
        with open(self.folder / f"{name}.log", "wb") as output:
            process = subprocess.Popen(
                [*PROGRAM, "--folder", str(self.folder / name), *flags],
                env={**os.environ, "JAX_PLATFORMS": "cpu"},
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        self._all.append(process)
        return process

    def moves(self) -> list[tuple[int, int]]:
        """Returns (copies of blocks moved, copies in all) of each change so far."""
        text = (self.folder / "coordinator.log").read_text()
        return [(int(a), int(b)) for a, b in MOVED.findall(text)]

    def commits(self) -> list[float]:
        """Returns the times of all commits, as the coordinator's clock says."""
        rows = metrics.read(self.folder / "coordinator" / JOB / "metrics.jsonl")
        return [row["time"] for row in rows]

    def close(self) -> None:
        for process in self._all:
            process.kill()
            process.wait()


def wait_for(is_so, seconds: float = LIMIT_SECONDS) -> None:
    deadline = time.monotonic() + seconds
    while not is_so():
        if time.monotonic() > deadline:
            raise TimeoutError(f"nothing happened for {seconds:g} s; see the logs")
        time.sleep(0.02)


def make_spec(num_params: int, block_bytes: int, learners: int) -> dict[str, Any]:
    leaf = Leaf("w", (num_params // 256, 256), "float32", (None, None))
    policy = Policy(
        local_steps=2, outer=Outer(learning_rate=0.7, momentum=0.9), quorum=1.0
    )
    return {
        **{"job": JOB, "policy": policy.to_json(), "num_learners": learners},
        **{"num_rounds": 10**6, "update": {"kind": "outer"}, "copies": 2},
        **{"layout": make_layout([leaf], block_bytes=block_bytes).to_json()},
        **{"max_grad_norm": None, "skip_grad_norm": None, "stop": None, "data": {}},
        **{"compression": {"push": str(PLAIN)}, "config_digest": "benchmark"},
        "version": metadata.version("meshloom"),
    }


@contextlib.contextmanager
def playing(service: Service, spec: dict[str, Any]) -> Iterator[list[Player]]:
    is_over = False

    def pause(round: int) -> None:
        if is_over:
            raise Over

    count = spec["num_learners"]
    players = [Player(service.address, spec, i, pause).start() for i in range(count)]
    try:
        yield players
    finally:
        is_over = True
        for player in players:
            with contextlib.suppress(Over):
                player.finish(LIMIT_SECONDS)


def measure(
    service: Service, players: list[Player], rounds: int, name: str, act, num: int
) -> Event:
    """Lets something happen under load.

    Args:
      num: of servers of which one is new or gone.
    """
    play(players, rounds)
    before = [x for player in players for x in player.waits[-rounds:]]
    counts, moves = [len(player.waits) for player in players], len(service.moves())
    began, clock = time.monotonic(), time.time()
    act()
    wait_for(lambda: len(service.moves()) > moves)
    settled = time.monotonic() - began
    play(players, 2)
    waits = [x for p, n in zip(players, counts, strict=True) for x in p.waits[n:]]
    moved, total = service.moves()[-1]
    times = [clock, *(t for t in service.commits() if t > clock)]
    gaps = [b - a for a, b in zip(times, times[1:], strict=False)]
    return Event(
        name=name,
        moved=round(moved / total, 4),
        ideal=round(1 / num, 4),
        settled_s=round(settled, 2),
        longest_wait_s=round(max(waits), 2),
        usual_wait_s=round(statistics.median(before), 2),
        no_commit_s=round(max(gaps), 2),
    )


def play(players: list[Player], rounds: int) -> None:
    """Waits until each learner has done some more rounds."""
    goals = [len(player.waits) + rounds for player in players]
    alive = lambda: all(player.failure is None for player in players)  # noqa: E731
    pairs = list(zip(players, goals, strict=True))
    wait_for(lambda: not alive() or all(len(p.waits) >= n for p, n in pairs))
    for player in players:
        if player.failure is not None:
            raise player.failure


def run(args: argparse.Namespace, folder: Path) -> list[Event]:
    service = Service(folder, args.servers)
    spec = make_spec(int(args.params), args.block_bytes, args.learners)
    n = args.servers

    def leave() -> None:
        service.servers[1].send_signal(signal.SIGTERM)

    try:
        with playing(service, spec) as players:
            steps = [
                ("added", service.add, n + 1),
                ("asked to leave", leave, n + 1),
                ("killed", lambda: service.servers[0].kill(), n),
            ]
            return [
                measure(service, players, args.rounds, name, act, num)
                for name, act, num in steps
            ]
    finally:
        service.close()


def show(events: list[Event], console: Console) -> None:
    table = Table(box=None)
    heads = ("a server is", "moved", "ideal", "settled", "longest wait", "usual wait")
    for head in (*heads, "no commit"):
        table.add_column(head, justify="right" if head != heads[0] else "left")
    for event in events:
        waits = (event.settled_s, event.longest_wait_s, event.usual_wait_s)
        shares = (f"{event.moved:.1%}", f"{event.ideal:.1%}")
        seconds = (f"{x:.2f} s" for x in (*waits, event.no_commit_s))
        table.add_row(event.name, *shares, *seconds)
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--servers", type=int, default=4)
    parser.add_argument("--learners", type=int, default=2)
    parser.add_argument("--params", type=float, default=4e6)
    parser.add_argument("--block-bytes", type=int, default=1 << 16)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--folder", type=Path, default=Path("build/servers"))
    args = parser.parse_args()
    if args.servers < 3:
        raise SystemExit("--servers must be >= 3, so that copies have where to go")
    shutil.rmtree(args.folder, ignore_errors=True)
    load = os.getloadavg()[0]
    events = run(args, args.folder)
    result = {
        "servers": args.servers,
        "learners": args.learners,
        "params": int(args.params),
        "cores": os.cpu_count(),
        "load": [round(load, 1), round(os.getloadavg()[0], 1)],
        "events": [dataclasses.asdict(event) for event in events],
    }
    replace_text(args.folder / "result.json", json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))
    show(events, Console(width=120))


if __name__ == "__main__":
    main()
