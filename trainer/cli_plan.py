"""The flags of `meshloom plan` and `meshloom plan schedule`."""

import argparse
from pathlib import Path


def add(commands, command, add_config_flags) -> None:
    parser = command(
        commands,
        "plan",
        _plan,
        "say what a run costs on devices that need not be here, before it starts",
    )
    add_config_flags(parser, "default")
    parser.add_argument(
        "--target",
        metavar="DEVICES",
        help="such as v5p-128, v5e:4x4, 2xv5p-128 or h100:8x8 (nodes x GPUs)",
    )
    parser.add_argument(
        "--batch", type=int, metavar="N", help="examples of an update, over all devices"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument(
        "--compile",
        action="store_true",
        help="compile the step for the target too, and compare "
        "(needs meshloom[tpu] or meshloom[cuda-compile])",
    )
    parser.add_argument(
        "--keep-hlo", type=Path, metavar="FILE", help="keep the compiled program's text"
    )
    actions = parser.add_subparsers(metavar="ACTION")
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
        help="of a stage in float32, before fsdp cuts them, such as 4GiB",
    )
    schedule.add_argument(
        "--fsdp", type=int, metavar="N", help="parts that weights are cut into"
    )
    schedule.add_argument(
        "--svg", type=Path, metavar="FILE", help="write the picture to a file"
    )
    schedule.add_argument("--json", action="store_true", help="print JSON")


def _plan(args: argparse.Namespace) -> int | None:
    if args.target is None:
        raise ValueError(
            "plan: --target is missing. Name the devices to plan for, such as "
            "--target v5p-128; or draw a pipeline with plan schedule."
        )
    if args.keep_hlo is not None and not args.compile:
        raise ValueError("--keep-hlo is of no use without --compile")
    from .plan import show

    return show.show(args)


def _schedule(args: argparse.Namespace) -> None:
    from .plan import schedule

    schedule.show(args)
