"""The command `meshloom config`: shows a complete config, or compares two."""

import argparse

from .flags import add_config_flags, command, load


def add(commands) -> None:
    """Adds `config` to the commands."""
    parser = commands.add_parser(
        "config", help="show a complete config, or compare two"
    )
    actions = parser.add_subparsers(required=True, metavar="ACTION")
    show = command(actions, "show", _show, "print every value and where it came from")
    add_config_flags(show, "default")
    diff = command(actions, "diff", _diff, "compare two configs or run folders")
    diff.add_argument("a", metavar="A", help="config name, gin file or run folder")
    diff.add_argument("b", metavar="B")


def _show(args: argparse.Namespace) -> None:
    from ..config import tree as config_tree

    loaded = load(args)
    print(config_tree.show(loaded.config, loaded.origins))


def _diff(args: argparse.Namespace) -> None:
    from ..config import files as config_files
    from ..config import tree as config_tree
    from ..run.train import Config

    a, b = (config_files.flat_values(x, root=Config) for x in (args.a, args.b))
    print(config_tree.format_diff(config_tree.diff(a, b)) or "No difference.")
