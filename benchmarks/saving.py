"""Measures the cost of checkpoints: the training loop with and without, and a restore.

    python benchmarks/saving.py [--config default] [--rounds 6] [--steps 20]
        [--every 10] [--restore-mib 1024]

Loops with and without saves alternate in one process. The verified restore of a random
state is compared with plain reads of the files of the same checkpoint, both from the
page cache.
"""

import argparse
import json
import shutil
import statistics
import tempfile
import time
from pathlib import Path

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from overhead import ours

from meshloom.sharding import MeshSpec
from meshloom.trainer.checkpoint import manifest
from meshloom.trainer.checkpoint.manager import Checkpoints
from meshloom.trainer.config import files as config_files
from meshloom.trainer.program.state import State
from meshloom.trainer.run import prepare, train
from meshloom.trainer.run.hooks import Save

CHUNK = 16 << 20


def saving(args: argparse.Namespace, folder: Path) -> dict:
    """Measures the training loop with and without saves."""
    config = config_files.load([args.config], args.set, root=train.Config).config
    prepared = prepare.prepare(config)
    step_fn = prepared.compile()
    state = prepared.layout.create(jax.random.key(0), prepared.mesh)
    stalls: list[float] = []

    def on_event(kind, **facts):
        if kind == "save":
            stalls.append(facts["stall_s"])

    checkpoints = Checkpoints(folder / "checkpoints", keep=2, event=on_event)

    def with_saves(progress, failed):
        return [Save(args.every, checkpoints, prepared, progress, failed)]

    seconds: dict[str, list[float]] = {"without": [], "with": []}
    start = 0
    for i in range(args.rounds + 1):  # the first is a warm-up
        for name in seconds:
            hooks = (with_saves,) if name == "with" else ()
            begin = time.perf_counter()
            state = ours(prepared, step_fn, state, start, args.steps, folder, *hooks)
            if name == "with":
                checkpoints.wait()  # includes background writes
            if i:
                seconds[name].append(time.perf_counter() - begin)
            start += args.steps
    checkpoints.close()
    warm = stalls[len(stalls) // (args.rounds + 1) :]
    pairs = zip(seconds["without"], seconds["with"], strict=True)
    return {
        "config": args.config,
        "bytes": sum(x.nbytes for x in jax.tree.leaves(state)),
        "save_every": args.every,
        "step_s": round(statistics.median(seconds["without"]) / args.steps, 4),
        "stall_s": round(statistics.median(warm), 4),
        "time_with_saves_over_without": round(
            statistics.median(b / a for a, b in pairs), 4
        ),
    }


class Arrays:
    """The part of a layout that a restore needs: 16 arrays sharded over all devices."""

    def __init__(self, mib: int):
        self._shape = (4 * mib, 4096)

    def placed(self, mesh) -> State:
        sharding = NamedSharding(mesh, P("fsdp"))
        array = jax.ShapeDtypeStruct(self._shape, jnp.float32, sharding=sharding)
        params = {f"w{i}": array for i in range(16)}
        step = jax.ShapeDtypeStruct((), jnp.int32, sharding=NamedSharding(mesh, P()))
        return State(step, params, ())


def restoring(mib: int, rounds: int, folder: Path) -> dict:
    """Measures a verified restore against plain reads of the same files."""
    mesh = MeshSpec(fsdp=-1).make()
    layout = Arrays(mib)
    shapes = layout.placed(mesh)
    keys = jax.random.split(jax.random.key(0), len(shapes.params))
    params = {
        name: jax.jit(
            lambda key, x=x: jax.random.normal(key, x.shape), out_shardings=x.sharding
        )(key)
        for key, (name, x) in zip(keys, shapes.params.items(), strict=True)
    }
    step = jax.device_put(jnp.int32(1), shapes.step.sharding)
    checkpoints = Checkpoints(folder / "large", keep=1)
    checkpoints.save(1, State(step, params, ()))
    checkpoints.wait()
    seconds: dict[str, list[float]] = {"restore": [], "read": []}
    for i in range(rounds + 1):  # the first is a warm-up
        begin = time.perf_counter()
        jax.block_until_ready(checkpoints.restore(1, layout, mesh)[0])  # type: ignore
        middle = time.perf_counter()
        size = read(folder / "large" / "1")
        if i:
            seconds["restore"].append(middle - begin)
            seconds["read"].append(time.perf_counter() - middle)
    checkpoints.close()
    assert manifest.read(folder / "large", 1)["step"] == 1
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    return {
        "bytes": sum(x.nbytes for x in params.values()),
        "bytes_on_disk": size,
        "restore_s": round(medians["restore"], 3),
        "read_s": round(medians["read"], 3),
        "restore_over_read": round(medians["restore"] / medians["read"], 2),
    }


def read(folder: Path) -> int:
    """Reads all files and returns their total size."""
    size = 0
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            with open(path, "rb") as file:
                while chunk := file.read(CHUNK):
                    size += len(chunk)
    return size


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", default="default")
    parser.add_argument("--set", action="append", default=[])
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--every", type=int, default=10)
    parser.add_argument("--restore-mib", type=int, default=1024)
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp())
    try:
        print(json.dumps({"saving": saving(args, folder)}), flush=True)
        found = restoring(args.restore_mib, min(args.rounds, 3), folder)
        print(json.dumps({"restoring": found}))
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
