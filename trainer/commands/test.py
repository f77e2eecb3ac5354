"""The command `meshloom test`: every metric of a trained model on held-out data."""

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

from .devices import use_compilation_cache
from .flags import command

if TYPE_CHECKING:
    from ..run.testing import Tested


def add(commands) -> None:
    """Adds `test` to the commands."""
    parser = command(
        commands, "test", _test, "evaluate a trained model on data it has not seen"
    )
    parser.add_argument("run_folder", type=Path, metavar="RUN")
    parser.add_argument(
        "--split",
        choices=("test", "eval"),
        default="test",
        help="the split to evaluate on; default: test",
    )
    add_trained_flags(parser)
    parser.add_argument(
        "--no-overlap-check",
        action="store_true",
        help="do not look for the data in the training split",
    )
    parser.add_argument(
        "--output",
        type=Path,
        metavar="FILE",
        help="a JSON file, and a page beside it; default: RUN/test/SPLIT-STEP.json",
    )


def add_trained_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags that select a checkpoint, its devices and other data."""
    parser.add_argument(
        "--step",
        default="newest",
        metavar="STEP",
        help="newest, best (the lowest held-out loss) or a number; default: newest",
    )
    parser.add_argument(
        "--mesh",
        default="fsdp=-1",
        metavar="SIZES",
        help="how to shard the model over this machine's devices; default: fsdp=-1",
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="data.NAME=VALUE",
        help="override a setting of the data; may be repeated",
    )


def check_sets(sets: list[str]) -> None:
    """Raises ValueError unless all --set flags are about the data."""
    for text in sets:
        name = text.partition("=")[0].strip()
        if name != "data" and not name.startswith("data."):
            raise ValueError(
                f"--set {name}: only the data may differ from the run's config, "
                "because the checkpoint belongs to its model. Set data.NAME=VALUE."
            )


def _test(args: argparse.Namespace) -> None:
    from ...launch.atomic_file import replace_text
    from ...sharding import MeshSpec
    from ..config import files as config_files
    from ..record.counting import counting
    from ..record.run_folder import CONFIG_GIN
    from ..report.tested import tested_page
    from ..run import testing, trained
    from ..run.train import Config

    check_sets(args.set)
    MeshSpec.parse(args.mesh)  # early, before anything slow
    _check_output(args.output)
    stored = trained.find(args.run_folder, args.step)
    text = str(args.run_folder / CONFIG_GIN)
    config = config_files.load([text], root=Config).config
    changed = config_files.load([text], args.set, root=Config).config
    use_compilation_cache()
    with counting("batches") as progress:
        tested = testing.run_test(
            config,
            changed,
            args.run_folder,
            stored,
            split=args.split,
            mesh=trained.make_mesh(args.mesh),
            check_overlap=not args.no_overlap_check,
            log=print,
            progress=progress,
        )
    print(_table(tested))
    output = args.output
    if output is None:
        output = args.run_folder / "test" / f"{tested.split}-{tested.step}.json"
        output.parent.mkdir(exist_ok=True)
    replace_text(output, json.dumps(tested.to_json(), indent=1, allow_nan=False) + "\n")
    html = output.with_suffix(".html")
    replace_text(html, tested_page(tested))
    print(f"{output}\n{html}")


def _check_output(output: Path | None) -> None:
    if output is None:
        return
    if output.suffix != ".json":
        raise ValueError(
            f"--output {output}: expected a name that ends with .json; the page gets "
            "the same name with .html"
        )
    if not output.parent.is_dir():
        raise ValueError(
            f"--output {output}: folder {output.parent} does not exist; create it first"
        )


def _table(tested: "Tested") -> str:
    from ...sharding.text import align

    rows = []
    for name, value in tested.metrics.items():
        interval = tested.intervals.get(name)
        ends = "" if interval is None else f"{interval[0]:.4f} to {interval[1]:.4f}"
        rows.append((name.replace("_", " "), f"{value:.4f}", ends))
    lines = [tested.title(), align(rows, right=(1,)), tested.describe_intervals()]
    return "\n".join([*lines, tested.describe_overlap()])
