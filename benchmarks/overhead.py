"""Measures the overhead of the training loop against a bare loop of the same step.

    python benchmarks/overhead.py [--config default] [--rounds 6] [--steps 20]

Both run the same compiled step in one process and alternate. The training loop reads
data, fetches and writes metrics and shows progress; the bare loop feeds one batch that
is already on the device and only blocks at the end.
"""

import argparse
import io
import json
import statistics
import tempfile
import time
from pathlib import Path

import jax
from rich.console import Console

from meshloom.trainer import data
from meshloom.trainer.config import files as config_files
from meshloom.trainer.data.batches import device_batches
from meshloom.trainer.record import metrics
from meshloom.trainer.record.ledger import Ledger
from meshloom.trainer.record.progress import Progress
from meshloom.trainer.run import loop, train
from meshloom.trainer.run.failed_steps import FailedSteps
from meshloom.trainer.run.hooks import Recorder
from meshloom.trainer.run.prepare import Prepared, prepare


def bare(step_fn, state, batch, num_steps: int):
    """Runs steps on one batch, without data, metrics or progress."""
    for _ in range(num_steps):
        state, figures = step_fn(state, batch)
    return jax.block_until_ready(state)


def ours(
    prepared: Prepared,
    step_fn,
    state,
    start: int,
    num_steps: int,
    out: Path,
    make_hooks=lambda progress, failed: [],
):
    """Trains as a run does; `make_hooks` gets its progress and failed steps."""
    config = prepared.config
    unit, count = data.throughput_unit(prepared.train_data)
    units = (unit, count * config.batch_size)
    # A terminal without a screen, so that the live bar is really drawn.
    console = Console(file=io.StringIO(), force_terminal=True, width=100)
    flops = config.model.model_flops(prepared.program.batch)
    progress = Progress(start + num_steps, start, units, flops, None, console)
    failed = FailedSteps(config.rewind_after, progress.message)
    writers = [metrics.FileWriter(out)]
    batches = device_batches(
        prepared.train_data,
        data.Order(len(prepared.train_data), config.seed),
        batch_size=config.batch_size,
        shardings=prepared.program.batch_shardings,
        start=start,
        stop=start + num_steps,
    )
    with progress, batches:
        state = loop.run(
            step_fn,
            state,
            batches,
            start=start,
            num_steps=start + num_steps,
            record=Recorder(progress, writers, *units, failed, Ledger(out)),
            record_every=config.log_every,
            hooks=make_hooks(progress, failed),
        )
    return jax.block_until_ready(state)


def first_batch(prepared: Prepared, batch_size: int) -> dict[str, jax.Array]:
    """Returns the first training batch, on the devices."""
    with device_batches(
        prepared.train_data,
        data.Order(len(prepared.train_data)),
        batch_size=batch_size,
        shardings=prepared.program.batch_shardings,
        start=0,
        stop=1,
    ) as batches:
        return next(batches)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", default="default")
    parser.add_argument("--set", action="append", default=[])
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--steps", type=int, default=20)
    args = parser.parse_args()
    config = config_files.load([args.config], args.set, root=train.Config).config
    prepared = prepare(config)
    step_fn = prepared.compile()
    state = prepared.layout.create(jax.random.key(0), prepared.mesh)
    batch = first_batch(prepared, config.batch_size)
    state = bare(step_fn, state, batch, 2)
    seconds: dict[str, list[float]] = {"bare": [], "ours": []}
    with tempfile.TemporaryDirectory() as folder:
        for i in range(args.rounds):
            begin = time.perf_counter()
            state = bare(step_fn, state, batch, args.steps)
            middle = time.perf_counter()
            start = i * args.steps
            state = ours(prepared, step_fn, state, start, args.steps, Path(folder))
            seconds["bare"].append(middle - begin)
            seconds["ours"].append(time.perf_counter() - middle)
    pairs = zip(seconds["bare"], seconds["ours"], strict=True)
    _, each = data.throughput_unit(prepared.train_data)
    tokens = each * config.batch_size * args.steps
    result = {
        "config": args.config,
        "devices": jax.device_count(),
        "rounds": args.rounds,
        "steps_a_round": args.steps,
        "tokens_per_s": {
            name: round(tokens / statistics.median(values))
            for name, values in seconds.items()
        },
        "share_of_bare_speed": round(
            statistics.median(theirs / mine for theirs, mine in pairs), 4
        ),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
