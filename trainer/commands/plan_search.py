"""`meshloom plan --search`, `--smallest` and `--scale`; see docs/search.md."""

import argparse
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..plan import Search
    from ..run.train import Config


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of searching for a layout instead of forecasting one."""
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
        help="the best from 8 to 4096 devices: the same batch on all (strong), "
        "the same for each device (weak), or both",
    )
    parser.add_argument(
        "--svg",
        type=Path,
        metavar="FILE",
        help="write the picture of --scale to a file",
    )


def search(args: argparse.Namespace, config: "Config", names: Sequence[str]) -> bool:
    """Shows the best candidates and writes one if asked to; False if nothing fits.

    Args:
      names: the configs that `config` was loaded from.
    """
    from ..plan import parse_target
    from ..plan.searching import show

    found = show.show(
        config,
        parse_target(args.target),
        top=args.top or show.TOP,
        compiles=args.compile,
        as_json=args.json,
    )
    if found.best is None:
        return False
    if args.write is not None:
        _write(args.write, found, args.pick or 1, names)
    return True


def smallest(args: argparse.Namespace, config: "Config") -> bool:
    """Shows the fewest devices on which the config trains; False if none will do."""
    from ..plan import parse_target
    from ..plan.searching import show

    target = parse_target(args.target)
    return show.show_smallest(config, target, as_json=args.json) is not None


def scale(args: argparse.Namespace, config: "Config", names: Sequence[str]) -> bool:
    """Shows how the best candidate scales, and draws it; False if nothing fits.

    Args:
      names: the configs that `config` was loaded from.
    """
    from ..plan import parse_target
    from ..plan.searching import scaling_picture, show
    from ..plan.searching.searching import KINDS

    target = parse_target(args.target)
    kinds = KINDS if args.scale == "both" else (args.scale,)
    found = show.show_scaling(config, target, kinds, as_json=args.json)
    if args.svg is not None:
        title = f"{names[-1]} on {target.device.name}"
        args.svg.write_text(scaling_picture.svg(found, title))
        print(f"Wrote {args.svg}", file=sys.stderr)
    return any(point.best for points in found.values() for point in points)


def _write(path: Path, found: "Search", number: int, names: Sequence[str]) -> None:
    """Writes one of the best candidates as a config; the first is number 1."""
    from ...sharding.text import seconds_text
    from ..plan.searching import chosen_config

    chosen = found.finalists(number)
    if number > len(chosen):
        raise ValueError(
            f"--pick {number}: the config fits on {len(chosen)} meshes only"
        )
    candidate = chosen[-1]
    best = found.forecast(candidate)
    words = shlex.join(["--config", names[0], "--target", found.target.name])
    share = best.memory.peak / best.target.device.usable
    about = (
        f"Number {number} of meshloom plan {words} --search: a step of "
        f"{seconds_text(best.roofline.step)},\n{share:.0%} of the memory of "
        f"{found.target.num_devices} devices.\n"
        f"  meshloom train --config {path}"
    )
    chosen_config.write(path, candidate.choice.of(found.config), names, about)
    print(f"Wrote {path}", file=sys.stderr)
