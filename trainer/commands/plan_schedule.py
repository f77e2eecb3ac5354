"""The command `meshloom plan schedule`."""

import argparse
import dataclasses
import re
from pathlib import Path
from typing import TYPE_CHECKING

from .flags import command

if TYPE_CHECKING:
    from ...sharding.pipeline.simulate import Sizes

UNITS = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
# What each flag goes with; it is refused without.
NEEDS = {
    "fsdp": ["weights"],
    "weights": ["fsdp", "layers"],
    "residual": ["layers", "activation"],
}


def add(actions) -> None:
    """Adds `schedule` to the actions of `plan`."""
    schedule = command(
        actions,
        "schedule",
        _schedule,
        "draw a pipeline's schedule, and compare the bubble and memory of all",
    )
    for flag in ("--stages", "--microbatches"):
        schedule.add_argument(flag, type=int, required=True, metavar="N")
    schedule.add_argument(
        "--schedule",
        default="1f1b",
        metavar="NAME",
        help="gpipe, 1f1b or interleaved; default: 1f1b",
    )
    schedule.add_argument(
        "--chunks",
        type=int,
        metavar="N",
        help="chunks of layers a stage has in interleaved; default: 2",
    )
    schedule.add_argument(
        "--remat",
        default="save-named",
        metavar="POLICY",
        help="none, save-named, save-dots or full; default: save-named",
    )
    schedule.add_argument(
        "--activation",
        metavar="BYTES",
        help="of one microbatch between two layers on one device, such as 64MiB",
    )
    schedule.add_argument(
        "--residual",
        action="append",
        default=[],
        metavar="POLICY=BYTES",
        help="what a layer keeps of a microbatch under none, save-named or save-dots; "
        "may be repeated",
    )
    schedule.add_argument("--layers", type=int, metavar="N", help="layers of a stage")
    schedule.add_argument(
        "--weights",
        metavar="BYTES",
        help="of a stage in float32, before fsdp shards them, such as 4GiB",
    )
    schedule.add_argument("--fsdp", type=int, metavar="N", help="shards of the weights")
    schedule.add_argument(
        "--svg", type=Path, metavar="FILE", help="write the picture to a file"
    )
    schedule.add_argument("--json", action="store_true", help="print JSON")


def _schedule(args: argparse.Namespace) -> None:
    from ...sharding.pipeline import picture
    from ...sharding.pipeline.schedule import make
    from ..plan import schedule as schedule_lib

    chunks = args.chunks if args.schedule == schedule_lib.INTERLEAVED else None
    schedule = make(args.schedule, args.stages, args.microbatches, chunks)
    found = schedule_lib.compare_choices(
        schedule, args.chunks, remat=args.remat, sizes=_sizes(args)
    )
    if args.svg is not None:
        args.svg.write_text(picture.svg(schedule), encoding="utf-8")
        notes = (*found.notes, f"The picture is in {args.svg}.")
        found = dataclasses.replace(found, notes=notes)
    schedule_lib.show(found, as_json=args.json)


def _sizes(args: argparse.Namespace) -> "Sizes":
    from ...sharding.pipeline.simulate import Sizes

    for flag, needs in NEEDS.items():
        missing = [f"--{name}" for name in needs if getattr(args, name) is None]
        if getattr(args, flag) and missing:
            raise ValueError(f"--{flag} needs {' and '.join(missing)}")
    for flag in ("layers", "fsdp"):
        value = getattr(args, flag)
        if value is not None and value < 1:
            raise ValueError(f"--{flag} must be at least 1, got {value}")
    residuals = {}
    for words in args.residual:
        policy, equals, size = words.partition("=")
        if not equals:
            raise ValueError(f"--residual {words!r}: expected POLICY=BYTES")
        residuals[policy] = _bytes(f"--residual {policy}", size)
    return Sizes(
        activation_bytes=_bytes("--activation", args.activation),
        layers_per_stage=args.layers,
        weight_bytes=_bytes("--weights", args.weights),
        residual_bytes=residuals,
        fsdp=args.fsdp or 1,
    )


def _bytes(flag: str, words: str | None) -> int | None:
    """Returns the size that a flag gives: 67108864 for 64MiB."""
    if words is None:
        return None
    found = re.fullmatch(rf"(\d+(?:\.\d+)?) ?({'|'.join(UNITS)})?", words)
    count = round(float(found[1]) * UNITS[found[2] or "B"]) if found else 0
    if count < 1:
        raise ValueError(
            f"{flag}: {words!r} is not a size; expected a number above 0, alone or "
            f"with {', '.join(UNITS)}, such as 64MiB"
        )
    return count
