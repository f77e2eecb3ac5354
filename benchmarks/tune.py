"""A search that is killed twice, with and without stopping early, and what it finds.

    python benchmarks/tune.py [--trials 20] [--parallel 2] [--seeds 3] [--folder DIR]

`meshloom tune` searches settings of the digits classifier. The search is killed with
SIGKILL twice and started again each time: no trial may be lost or repeated. The same
trials without stopping early take longer. Then the config that was found and the
default are trained with other seeds and compared on the test split, which the search
has not seen.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

from meshloom.sharding.text import align
from meshloom.trainer.record import metrics

SPACE = Path(__file__).parents[1] / "examples" / "digits_space.gin"
PROGRAM = (sys.executable, "-P", "-m", "meshloom.trainer.cli")


def search(folder: Path, pruner: str, args, kill_after: list[int]) -> tuple[float, int]:
    """Returns the seconds of a search, and how often it was killed.

    Args:
      kill_after: numbers of trials that have begun, at which it is killed.
    """
    command = [*PROGRAM, "tune", "--config", "digits", "--space", str(SPACE)]
    command += ["--trials", str(args.trials), "--parallel", str(args.parallel)]
    command += ["--cpu-devices", "1", "--pruner", pruner, "--workdir", str(folder)]
    begin, kills = time.monotonic(), 0
    while True:
        process = subprocess.Popen(command, start_new_session=True)
        try:
            while process.poll() is None:
                begun = len(list(folder.glob("trials/*/metrics.jsonl")))
                if kill_after and begun >= kill_after[0]:
                    kill_after.pop(0)
                    os.kill(process.pid, signal.SIGKILL)
                    kills += 1
                    break
                time.sleep(0.2)
            status = process.wait()
        finally:
            if process.poll() is None:
                os.kill(process.pid, signal.SIGKILL)
        if status == 0:
            return time.monotonic() - begin, kills
        assert status == -signal.SIGKILL, status


def check(folder: Path, num_trials: int) -> dict:
    """Returns the results; raises if a trial is missing, double or not ended."""
    results = json.loads((folder / "tune.json").read_text())
    trials = results["trials"]
    assert [trial["number"] for trial in trials] == list(range(num_trials))
    assert not [trial for trial in trials if trial["state"] == "running"]
    settings = [json.dumps(trial["settings"]) for trial in trials]
    assert len(set(settings)) == num_trials, "some settings were tried twice"
    for trial in trials:
        path = folder / trial["folder"] / "eval.jsonl"
        steps = [row["step"] for row in metrics.read(path)] if path.exists() else []
        assert steps == sorted(set(steps)), f"{path}: {steps}"
    return results


def train(config: str, folder: Path, seed: int) -> dict[str, float]:
    """Returns the metrics on the test split of one run."""
    command = [*PROGRAM, "train", "--config", config, "--set", f"seed={seed}"]
    command += ["--cpu-devices", "1", "--workdir", str(folder)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return metrics.read(folder / "test.jsonl")[-1]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--trials", type=int, default=20)
    parser.add_argument("--parallel", type=int, default=2)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--folder", type=Path, default=Path("runs", "tune-benchmark"))
    args = parser.parse_args()
    folder = args.folder
    kills = [args.trials // 4, args.trials // 2]
    seconds, killed = search(folder / "search", "median", args, kills)
    found = check(folder / "search", args.trials)
    states = [trial["state"] for trial in found["trials"]]
    print(f"{args.trials} trials, killed {killed} times: {seconds:.0f} s")
    print({state: states.count(state) for state in sorted(set(states))})
    full, _ = search(folder / "full", "none", args, [])
    check(folder / "full", args.trials)
    print(f"without stopping early: {full:.0f} s")
    rows = [["config", "test loss", "over seeds", "test accuracy", "over seeds"]]
    for name, config in (
        ("default", "digits"),
        ("found", str(folder / "search" / "best.gin")),
    ):
        runs = [
            train(config, folder / f"{name}-{seed}", seed)
            for seed in range(100, 100 + args.seeds)
        ]
        row = [name]
        for metric in ("loss", "accuracy"):
            values = np.array([run[metric] for run in runs])
            row += [f"{values.mean():.4f}", f"{values.min():.4f} to {values.max():.4f}"]
        rows.append(row)
    print(align(rows))


if __name__ == "__main__":
    main()
