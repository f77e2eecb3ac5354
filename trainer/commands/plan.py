"""The command `meshloom plan`: flags, and the forecast of one config on one mesh."""

import argparse
import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

from . import plan_schedule, plan_search
from .flags import add_config_flags, command, load

if TYPE_CHECKING:
    from ..run.train import Config

DOES_NOT_FIT = 1  # exit status
# What each flag goes with; it is refused without.
NEEDS = {
    "top": ("search",),
    "write": ("search",),
    "pick": ("write",),
    "svg": ("scale",),
    "keep_hlo": ("compile",),
}


def add(commands) -> None:
    """Adds `plan` to the commands."""
    parser = command(
        commands,
        "plan",
        _plan,
        "forecast what a run costs, on devices that need not be here",
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
        "--html", type=Path, metavar="FILE", help="also write the forecast as a page"
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
    plan_search.add_flags(parser)
    plan_schedule.add(parser.add_subparsers(metavar="ACTION"))


def _plan(args: argparse.Namespace) -> int | None:
    if args.target is None:
        raise ValueError(
            "plan: --target is missing. Name the devices, such as --target v5p-128; or "
            "draw a pipeline with plan schedule."
        )
    _check(args)
    config, names = _load(args), args.config or ["default"]
    if args.scale:
        fits = plan_search.scale(args, config, names)
    elif args.search:
        fits = plan_search.search(args, config, names)
    elif args.smallest:
        fits = plan_search.smallest(args, config)
    else:
        fits = _show(args, config, " + ".join(names))
    return None if fits else DOES_NOT_FIT


def _check(args: argparse.Namespace) -> None:
    for name, needed in NEEDS.items():
        if getattr(args, name) is not None and not any(
            getattr(args, n) for n in needed
        ):
            flags = " or ".join(f"--{n}" for n in needed)
            flag = name.replace("_", "-")
            raise ValueError(f"--{flag} needs {flags}")
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


def _load(args: argparse.Namespace) -> "Config":
    import jax

    # Shapes need no accelerator; taking one here would keep a training from it.
    jax.config.update("jax_platforms", "cpu")
    config = load(args).config
    if args.batch is None:
        return config
    return dataclasses.replace(config, batch_size=args.batch)


def _show(args: argparse.Namespace, config: "Config", name: str) -> bool:
    """Prints the forecast of a config and writes its page; returns whether it fits."""
    from ..plan import predict, show

    found = predict.forecast(config, args.target)
    compiled = None
    if args.compile:
        from ..plan.compile import compiled as compiled_lib

        compiled = compiled_lib.compile_step(found, keep=args.keep_hlo)
    if args.html is not None:
        from ..report.plan import write_forecast

        write_forecast(found.to_json(), f"{name} on {found.target.name}", args.html)
    show.show(found, compiled, as_json=args.json, with_arrays=args.explain)
    return found.fits
