"""The command `meshloom data`: prepares a corpus."""

import argparse
from pathlib import Path

from .flags import command


def add(commands) -> None:
    """Adds `data` to the commands."""
    parser = commands.add_parser("data", help="prepare a corpus")
    actions = parser.add_subparsers(required=True, metavar="ACTION")
    build = command(
        actions,
        "build",
        _build,
        "tokenize text files into ArrayRecord shards; resumes if it was interrupted",
    )
    build.add_argument(
        "--input", required=True, metavar="GLOB_OR_FOLDER", help="the text files"
    )
    build.add_argument("--output", required=True, type=Path, metavar="DIR")
    build.add_argument(
        "--tokenizer",
        type=Path,
        metavar="FILE",
        help="a tokenizer.json; default: bytes",
    )
    build.add_argument(
        "--shard-size", type=int, metavar="BYTES", help="bytes of text per shard"
    )


def _build(args: argparse.Namespace) -> None:
    from ..data import corpus

    settings = {} if args.shard_size is None else {"shard_size": args.shard_size}
    corpus.build_with_progress(
        args.input, args.output, tokenizer=args.tokenizer, **settings
    )
