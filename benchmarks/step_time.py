"""Measures seconds per train step, ours and the same model in PyTorch if installed.

    python benchmarks/step_time.py [--steps 8] [--layers 6] [--width 384]

Each program runs in its own process, as users run them, and they alternate step by
step, so that other load on the machine hits both. Only the ratio is meaningful.
"""

import argparse
import importlib.util
import json
import statistics
import subprocess
import sys
import time


def ours(args):
    import jax
    from overhead import first_batch

    from meshloom.models import transformer
    from meshloom.trainer import data
    from meshloom.trainer.program import optimizers, schedules
    from meshloom.trainer.run import prepare, train

    model = transformer.Config(
        vocab_size=args.vocab,
        num_layers=args.layers,
        d_model=args.width,
        num_heads=args.width // 64,
        d_ff=4 * args.width,
        max_length=args.length,
        norm="layer",
        positions="learned",
        mlp="gelu",
        use_bias=True,
        tied_head=True,
        compute_dtype="float32",
        remat=args.remat,
    )
    config = train.Config(
        model=model,
        data=data.Synthetic(
            vocab_size=args.vocab, length=args.length, num_examples=args.batch
        ),
        optimizer=optimizers.AdamW(),
        schedule=schedules.Constant(value=3e-4),
        batch_size=args.batch,
        num_steps=1000,
        eval_batches=0,
    )
    prepared = prepare.prepare(config)
    state = prepared.layout.create(jax.random.key(0), prepared.mesh)
    step_fn = prepared.compile()
    batch = first_batch(prepared, args.batch)

    def step() -> float:
        nonlocal state
        state, metrics = step_fn(state, batch)
        return float(metrics["loss"])

    return step, model.model_flops(prepared.program.batch)


def pytorch(args):
    import numpy as np
    import torch_gpt

    step = torch_gpt.make_step(
        vocab=args.vocab,
        length=args.length,
        layers=args.layers,
        width=args.width,
        heads=args.width // 64,
    )
    tokens = np.random.default_rng(0).integers(
        0, args.vocab, (args.batch, args.length + 1)
    )
    inputs, targets = tokens[:, :-1].copy(), tokens[:, 1:].copy()
    return lambda: step(inputs, targets), 0.0


def work(args) -> None:
    """Runs one step for each line on standard input."""
    step, flops = {"ours": ours, "pytorch": pytorch}[args.worker](args)
    step(), step()
    print(flops, flush=True)
    for _ in sys.stdin:
        start = time.perf_counter()
        loss = step()
        assert loss == loss, "the loss is NaN"
        print(time.perf_counter() - start, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name, value in {
        "steps": 8,
        "layers": 6,
        "width": 384,
        "length": 256,
        "batch": 16,
        "vocab": 384,
    }.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--remat", default="save-named")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        work(args)
        return
    names = ["ours"]
    if importlib.util.find_spec("torch"):
        names.append("pytorch")
    else:
        print(
            "PyTorch is not installed, so there is no ratio: pip install torch",
            file=sys.stderr,
        )
    workers = {name: _start(name) for name in names}
    flops = {name: float(_read(worker)) for name, worker in workers.items()}["ours"]
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(args.steps):
        for name, worker in workers.items():
            worker.stdin.write("\n")
            worker.stdin.flush()
            seconds[name].append(float(_read(worker)))
    for worker in workers.values():
        worker.stdin.close()
        worker.wait(timeout=60)
    median = {name: statistics.median(values) for name, values in seconds.items()}
    result = {
        "steps": args.steps,
        "median_s": {name: round(value, 4) for name, value in median.items()},
        "min_s": {name: round(min(values), 4) for name, values in seconds.items()},
        "model_gflops_per_s": round(flops / median["ours"] / 1e9, 1),
    }
    if "pytorch" in median:
        pairs = zip(seconds["pytorch"], seconds["ours"], strict=True)
        ratios = [theirs / mine for theirs, mine in pairs]
        result["speed_against_pytorch"] = round(statistics.median(ratios), 3)
    print(json.dumps(result))


def _start(name: str) -> subprocess.Popen:
    command = [sys.executable, __file__, *sys.argv[1:], "--worker", name]
    return subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def _read(worker: subprocess.Popen) -> str:
    line = worker.stdout.readline()
    if not line:
        raise SystemExit(f"a worker exited with status {worker.wait(timeout=60)}")
    return line


if __name__ == "__main__":
    main()
