"""The commands `meshloom import` and `meshloom export`: models of Hugging Face."""

import argparse
import logging
from pathlib import Path
from typing import Any

from .flags import command

DTYPES = ("float32", "bfloat16")


def add(commands) -> None:
    """Adds `import` and `export` to the commands."""
    help = "import a model of Hugging Face, to train or generate with"
    parser = command(_actions(commands, "import", help), "hf", _import, help)
    parser.add_argument(
        "path", type=Path, metavar="PATH", help="a folder with config.json"
    )
    parser.add_argument("--output", type=Path, required=True, metavar="RUN")
    parser.add_argument(
        "--dtype", choices=DTYPES, help="of the parameters; default: that of the files"
    )
    parser.add_argument(
        "--mesh",
        default="fsdp=-1",
        metavar="SIZES",
        help="how to shard the model over this machine's devices; default: fsdp=-1",
    )
    help = "export a trained model in the format of Hugging Face"
    parser = command(_actions(commands, "export", help), "hf", _export, help)
    parser.add_argument("run_folder", type=Path, metavar="RUN")
    parser.add_argument("--output", type=Path, required=True, metavar="FOLDER")
    parser.add_argument(
        "--step",
        default="newest",
        metavar="N",
        help="newest, best, or the number of a saved step; default: newest",
    )
    parser.add_argument(
        "--family", metavar="NAME", help="model_type; default: the first that fits"
    )
    parser.add_argument(
        "--dtype",
        choices=(*DTYPES, "float16"),
        help="of the tensors; default: that of the parameters",
    )
    parser.add_argument(
        "--tokenizer",
        type=Path,
        metavar="FOLDER",
        help="with tokenizer.json; default: that of the run or of its data",
    )
    parser.add_argument(
        "--base",
        metavar="NAME",
        help="of adapters: the model that PEFT adds them to; default: init_from",
    )
    parser.add_argument(
        "--file-mib",
        type=int,
        default=5 * 1024,
        metavar="N",
        help="size above which there are several files; default: 5120",
    )


def _actions(commands, name: str, help: str) -> Any:
    parser = commands.add_parser(name, help=help, description=help)
    return parser.add_subparsers(required=True, metavar="FORMAT")


def _import(args: argparse.Namespace) -> None:
    logging.getLogger("absl").setLevel(logging.ERROR)
    from ..hf.importing import import_model
    from ..run import trained

    mesh = trained.make_mesh(args.mesh)
    trained.refuse_pipe(mesh, "import")
    for line in import_model(args.path, args.output, mesh, dtype=args.dtype):
        print(line)


def _export(args: argparse.Namespace) -> None:
    # Orbax warns that a part of a checkpoint is not a checkpoint by itself.
    logging.getLogger("absl").setLevel(logging.ERROR)
    import jax

    jax.config.update("jax_platforms", "cpu")
    from ...models import lora, transformer
    from ..config import files as config_files
    from ..hf.exporting import export_model
    from ..hf.peft import export_adapter
    from ..record.run_folder import CONFIG_GIN
    from ..run import trained
    from ..run.train import Config

    if args.file_mib < 1:
        raise ValueError(f"--file-mib must be >= 1, got {args.file_mib}")
    stored = trained.find(args.run_folder, args.step)
    text = str(args.run_folder / CONFIG_GIN)
    config = config_files.load([text], root=Config).config
    if isinstance(config.model, lora.Config):
        base = args.base or config.init_from
        if base is None:
            raise ValueError(
                "the run trained adapters of a model that it does not name; pass its "
                "name or folder as --base"
            )
        options = {"base": base, "family": args.family, "dtype": args.dtype}
        lines = export_adapter(stored, config.model, args.output, **options)
        return print("\n".join(lines))
    if not isinstance(config.model, transformer.Config):
        raise ValueError(
            f"{args.run_folder}: {type(config.model).__module__} has no form "
            "in Hugging Face; only transformers and their adapters do"
        )
    if args.base is not None:
        raise ValueError("--base has no effect: the run did not train adapters")
    lines = export_model(
        stored,
        config.model,
        args.output,
        family=args.family,
        dtype=args.dtype,
        tokenizer=args.tokenizer or _tokenizer(args.run_folder, config.data),
        file_bytes=args.file_mib * 2**20,
    )
    print("\n".join(lines))


def _tokenizer(run: Path, data: Any) -> Path | None:
    """Returns the folder of the tokenizer of a run or of the corpus it trained on."""
    folders = [run, *(Path(p) for p in [getattr(data, "path", None)] if p)]
    return next((f for f in folders if (f / "tokenizer.json").is_file()), None)
