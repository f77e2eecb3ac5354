"""Flags that several commands share, and the config they describe."""

import argparse
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..config.files import Loaded

DEFAULT_CONFIG = "default"


def command(
    commands, name: str, run: Callable[..., int | None], help: str
) -> argparse.ArgumentParser:
    """Adds a command and returns its parser; `run` takes the parsed arguments."""
    parser = commands.add_parser(name, help=help, description=help)
    parser.set_defaults(run=run)
    return parser


def add_config_flags(
    parser: argparse.ArgumentParser, default: str | None, *, mesh: bool = True
) -> None:
    """Adds --config and --set, and --mesh unless the command has its own."""
    shown = f"; default: {default}" if default else ""
    parser.add_argument(
        "--config",
        action="append",
        metavar="NAME_OR_FILE",
        help=f"a shipped config or a gin file; may be repeated, later ones win{shown}",
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="override one value, such as --set model.num_layers=4; may be repeated",
    )
    if mesh:
        parser.add_argument(
            "--mesh",
            metavar="SIZES",
            help="override the mesh of the config, such as data=2,fsdp=2,tensor=2",
        )


def config_names(args: argparse.Namespace) -> list[str]:
    return args.config or [DEFAULT_CONFIG]


def check_early(args: argparse.Namespace):
    """Checks the flags that need no heavy import; returns the mesh of --mesh, if any.

    The other checks need the classes of the config, which take a second to import.
    """
    from ..config import files as config_files

    config_files.check_syntax(config_names(args), args.set)
    if args.mesh is None:
        return None
    from ...sharding import MeshSpec

    return MeshSpec.parse(args.mesh)


def load(args: argparse.Namespace) -> "Loaded":
    """Loads the config of --config, --set and --mesh."""
    spec = check_early(args)
    from ..config import files as config_files
    from ..run.train import Config

    loaded = config_files.load(config_names(args), args.set, root=Config)
    for note in (*loaded.notes, *loaded.dropped):
        print(f"note: {note}", file=sys.stderr)
    if spec is not None:
        loaded = config_files.override(loaded, "mesh", spec, "--mesh")
    return loaded
