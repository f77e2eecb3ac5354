"""The command `meshloom scale`."""

import argparse
import os
import sys
from pathlib import Path

from .flags import add_config_flags, command, config_names

DIFFERENT = 1  # exit status if the meshes do not train the same, or one did not end


def add(commands) -> None:
    """Adds `scale` to the commands."""
    parser = command(
        commands,
        "scale",
        _scale,
        "measure the same training on several meshes, in turns; status 1 if they do "
        "not train the same",
    )
    add_config_flags(parser, "default", mesh=False)
    parser.add_argument(
        "--meshes",
        nargs="+",
        required=True,
        metavar="SIZES",
        help="for instance data=1 data=2 fsdp=4 data=4@2, where @2 means in two "
        "processes; the others are compared with the first",
    )
    parser.add_argument(
        "--processes",
        nargs="+",
        type=int,
        default=[1],
        metavar="N",
        help="numbers of processes for each mesh without @; default: 1",
    )
    parser.add_argument(
        "--weak",
        action="store_true",
        help="a batch that grows with the devices; default: the same batch on all",
    )
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="default: 5")
    parser.add_argument(
        "--steps", type=int, default=4, metavar="N", help="in each round; default: 4"
    )
    parser.add_argument(
        "--straggler",
        type=float,
        default=1.5,
        metavar="FACTOR",
        help="how many times as long one process takes, to measure its cost; "
        "default: 1.5",
    )
    parser.add_argument(
        "--drift",
        type=float,
        default=1e-5,
        metavar="SHARE",
        help="largest relative difference of a loss that counts as the same; "
        "default: 1e-5",
    )
    parser.add_argument(
        "--workdir",
        type=Path,
        default=Path("runs/scale"),
        metavar="DIR",
        help="a new folder for scale.json and scale.svg; default: runs/scale",
    )


def _scale(args: argparse.Namespace) -> int:
    from ..config import files as config_files

    config_files.check_syntax(config_names(args), args.set)
    from ..run.train import Config
    from ..verify import scale
    from ..verify.scale_jobs import JobFailed

    loaded = config_files.load(config_names(args), args.set, root=Config)
    measured = scale.Scale(
        configs=tuple(config_names(args)),
        sets=tuple(args.set),
        batch_size=loaded.config.batch_size,
        meshes=tuple(scale.parse_meshes(args.meshes, args.processes)),
        workdir=args.workdir,
        kind="weak" if args.weak else "strong",
        rounds=args.rounds,
        steps=args.steps,
        straggler=args.straggler,
        drift=args.drift,
        platforms=os.environ.get("JAX_PLATFORMS", ""),
    )
    try:
        result = measured.run()
    except JobFailed as error:
        print(f"meshloom: {error}", file=sys.stderr)
        return DIFFERENT
    print(result.table())
    print("\n".join(result.answers()))
    print(f"{args.workdir / scale.FILE}\n{args.workdir / scale.PICTURE}")
    return DIFFERENT if result.is_same is False else 0
