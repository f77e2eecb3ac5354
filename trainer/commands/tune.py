"""The command `meshloom tune`."""

import argparse
import os
import shlex
import sys
from pathlib import Path

from .flags import add_config_flags, check_early, command, config_names, load

# Optuna and jax are imported late.
SAMPLERS = ("tpe", "random", "gp", "cmaes")
PRUNERS = ("median", "hyperband", "none")


def add(commands) -> None:
    """Adds `tune` to the commands."""
    parser = command(
        commands, "tune", run, "search for better settings, with many short runs"
    )
    add_config_flags(parser, "default")
    parser.add_argument(
        "--space",
        required=True,
        metavar="FILE",
        help="a gin file with what to try for each setting; see docs/tune.md",
    )
    parser.add_argument(
        "--trials", type=int, default=20, metavar="N", help="default: 20"
    )
    parser.add_argument(
        "--parallel",
        type=int,
        default=1,
        metavar="N",
        help="trials that run at the same time; they share the GPUs; default: 1",
    )
    parser.add_argument(
        "--workdir",
        type=Path,
        metavar="DIR",
        help="the folder of the search; one that was interrupted continues; default: "
        "runs/CONFIG-tune",
    )
    parser.add_argument(
        "--steps", type=int, metavar="N", help="the number of updates of a trial"
    )
    parser.add_argument(
        "--metric",
        default="loss",
        metavar="NAME",
        help="the held-out metric to optimize, as in eval.jsonl; default: loss",
    )
    parser.add_argument(
        "--maximize", action="store_true", help="larger values are better"
    )
    parser.add_argument(
        "--sampler", choices=SAMPLERS, default="tpe", help="of Optuna; default: tpe"
    )
    parser.add_argument(
        "--pruner",
        choices=PRUNERS,
        default="median",
        help="which trials to stop early: those worse than the median at the same "
        "step, by hyperband, or none; default: median",
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="of the sampler; default: 0"
    )
    parser.add_argument(
        "--cpu-devices", type=int, metavar="N", help="train on the CPU, as N devices"
    )
    parser.add_argument(
        "--launch",
        metavar="'TARGET FLAGS'",
        help="run each trial through `meshloom launch`, such as 'local --processes 2'",
    )
    parser.add_argument(
        "--storage",
        metavar="URL",
        help="a database that Optuna knows; default: SQLite in the folder",
    )


def run(args: argparse.Namespace) -> int:
    check_early(args)
    _check_installed()
    from ..config import tree as config_tree
    from ..run.train import Config
    from ..tune import page, space
    from ..tune.study import Definition
    from ..tune.tuning import Tuning

    searched = space.read(args.space)
    config = load(args).config
    if config.eval_batches == 0:
        raise ValueError(
            "eval_batches is 0, so trials have no held-out loss to compare; set it"
        )
    searched.check(config_names(args), args.set, Config)
    direction = "maximize" if args.maximize else "minimize"
    tuning = Tuning(
        folder=args.workdir
        or Path("runs") / f"{Path(config_names(args)[-1]).stem}-tune",
        definition=Definition(
            config=config_tree.digest(config) + f" --steps {args.steps}",
            space={d.name: str(d.values) for d in searched.dimensions},
            metric=args.metric,
            direction=direction,
            sampler=args.sampler,
            pruner=args.pruner,
            seed=args.seed,
        ),
        space=searched,
        trials=args.trials,
        parallel=args.parallel,
        command=lambda folder, settings: _command(args, folder, settings),
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
        storage=args.storage,
        log=lambda line: print(line, flush=True),
    )
    status = tuning.run()
    for line in page.write(tuning):
        print(line)
    return status


def _check_installed() -> None:
    try:
        import optuna  # noqa: F401
    except ModuleNotFoundError as error:
        if error.name != "optuna":
            raise
        raise ValueError(
            "meshloom tune needs the package optuna, which is not installed; install "
            "it with: pip install 'meshloom[tune]'"
        ) from error


def _command(
    args: argparse.Namespace, folder: Path, settings: dict[str, str]
) -> list[str]:
    """Returns the command line of a trial."""
    program = [sys.executable, "-P", "-m", "meshloom.trainer.cli"]
    train = ["train", f"--workdir={folder}"]
    train += [f"--config={name}" for name in config_names(args)]
    train += [f"--set={text}" for text in args.set]
    train += [f"--set={name}={text}" for name, text in settings.items()]
    for flag in ("mesh", "steps", "cpu_devices"):
        if (value := getattr(args, flag)) is not None:
            train.append(f"--{flag.replace('_', '-')}={value}")
    if args.launch is None:
        return [*program, *train]
    return [*program, "launch", *shlex.split(args.launch), "--", *train]
