"""The command `meshloom predict`: predictions of a trained model, to a file."""

import argparse
from pathlib import Path

from .devices import use_compilation_cache
from .flags import command
from .test import add_trained_flags, check_sets


def add(commands) -> None:
    """Adds `predict` to the commands."""
    parser = command(
        commands, "predict", _predict, "write a trained model's predictions to a file"
    )
    parser.add_argument("run_folder", type=Path, metavar="RUN")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument(
        "--input",
        type=Path,
        metavar="PATH",
        help="a file or folder: text, or npz files with the model's arrays",
    )
    what.add_argument(
        "--split",
        choices=("test", "eval", "train"),
        help="a split of the run's data instead of files",
    )
    parser.add_argument(
        "--output",
        type=Path,
        required=True,
        metavar="FILE",
        help="a file .jsonl or .npz, which appears when it is complete",
    )
    add_trained_flags(parser)
    parser.add_argument(
        "--batch-size", type=int, metavar="N", help="rows; default: as in the run"
    )


def _predict(args: argparse.Namespace) -> None:
    from ...sharding import MeshSpec
    from ..config import files as config_files
    from ..record import prediction_files
    from ..record.counting import counting
    from ..record.run_folder import CONFIG_GIN
    from ..run import inputs as inputs_lib
    from ..run import predicting, trained
    from ..run.train import Config

    check_sets(args.set)
    MeshSpec.parse(args.mesh)  # early, before anything slow
    if args.batch_size is not None and args.batch_size < 1:
        raise ValueError(f"--batch-size must be >= 1, got {args.batch_size}")
    prediction_files.check(args.output)
    stored = trained.find(args.run_folder, args.step)
    text = str(args.run_folder / CONFIG_GIN)
    config = config_files.load([text], args.set, root=Config).config
    use_compilation_cache()
    if args.split is not None:
        inputs = inputs_lib.of_split(config, args.split)
    else:
        inputs = inputs_lib.of_path(config, args.input)
    mesh = trained.make_mesh(args.mesh)
    found = predicting.predictions(
        config, stored, inputs, mesh, batch_size=args.batch_size
    )
    done = 0
    with counting("examples") as show, prediction_files.writing(args.output) as write:
        for rows in found:
            count = len(next(iter(rows.values())))
            numbers = range(done, done + count)
            write([{"example": i, **inputs.about(i)} for i in numbers], rows)
            done += count
            show(done, len(inputs))
    print(f"{done:,} predictions of {args.run_folder}, step {stored.step}")
    print(args.output)
