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
        "--html", type=Path, metavar="FILE", help="write the plan as a page too"
    )
    parser.add_argument(
        "--explain",
        action="store_true",
        help="list the arrays that make up the peak, and what differs between stages",
    )
    parser.add_argument(
        "--compile",
        action="store_true",
        help="compile the step for the target too, and compare "
        "(needs meshloom[tpu] or meshloom[cuda-compile])",
    )
    parser.add_argument(
        "--keep-hlo", type=Path, metavar="FILE", help="keep the compiled program's text"
    )
    _add_search(parser)
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


def _add_search(parser: argparse.ArgumentParser) -> None:
    """Flags of looking for a plan instead of showing one; see docs/search.md."""
    parser.add_argument(
        "--search",
        action="store_true",
        help="find the best mesh, schedule, remat and microbatches for the target",
    )
    parser.add_argument(
        "--top", type=int, metavar="N", help="how many --search shows; default: 5"
    )
    parser.add_argument(
        "--write", type=Path, metavar="FILE.gin", help="write the best as a config"
    )
    parser.add_argument(
        "--pick", type=int, metavar="N", help="write this one of the best; default: 1"
    )
    parser.add_argument(
        "--smallest",
        action="store_true",
        help="find the fewest devices of the target's kind on which the config trains",
    )
    parser.add_argument(
        "--scale",
        nargs="?",
        const="both",
        choices=("strong", "weak", "both"),
        help="the best plans from 8 to 4096 devices: the same batch on all (strong), "
        "the same for each device (weak), or both",
    )
    parser.add_argument(
        "--svg",
        type=Path,
        metavar="FILE",
        help="write the picture of --scale to a file",
    )


# What each flag goes with; it is refused without.
NEEDS = {
    "top": ("search",),
    "write": ("search",),
    "pick": ("write",),
    "svg": ("scale",),
    "keep_hlo": ("compile",),
}


def _check(args: argparse.Namespace) -> None:
    for name, needed in NEEDS.items():
        if getattr(args, name) is not None and not any(
            getattr(args, n) for n in needed
        ):
            flags = " or ".join(f"--{n}" for n in needed)
            flag = name.replace("_", "-")
            raise ValueError(f"--{flag} is of no use without {flags}")
    modes = [name for name in ("search", "smallest", "scale") if getattr(args, name)]
    if len(modes) > 1:
        raise ValueError(f"--{' and --'.join(modes)} are different questions; ask one")
    if modes and args.mesh is not None:
        raise ValueError(f"--{modes[0]} chooses the mesh itself; leave out --mesh")
    if modes and modes != ["search"] and args.compile:
        raise ValueError(
            f"--{modes[0]} compiles nothing; leave out --compile, or ask with --search"
        )
    if args.search and args.keep_hlo is not None:
        raise ValueError(
            "--keep-hlo keeps one program, and --search compiles several; compile the "
            "one that you want with --mesh"
        )
    for name in ("top", "pick"):
        if getattr(args, name) is not None and getattr(args, name) < 1:
            raise ValueError(f"--{name} must be at least 1, got {getattr(args, name)}")


def _plan(args: argparse.Namespace) -> int | None:
    if args.target is None:
        raise ValueError(
            "plan: --target is missing. Name the devices to plan for, such as "
            "--target v5p-128; or draw a pipeline with plan schedule."
        )
    _check(args)
    if args.scale:
        from ..plan.searching import scaling_show

        return scaling_show.show(args)
    if args.search or args.smallest:
        from ..plan.searching import show as search_show

        return search_show.show(args)
    from ..plan import show

    return show.show(args)


def _schedule(args: argparse.Namespace) -> None:
    from ..plan import schedule

    schedule.show(args)
