"""A new folder that appears at once, or not at all."""

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path

from .files import TOKENIZER_FILES


@contextlib.contextmanager
def appearing(output: Path) -> Iterator[Path]:
    """Yields a draft of a folder, which takes its place when all is written."""
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise ValueError(
            f"--output {output}: it exists and is not an empty folder; name a new one"
        )
    draft = output.absolute().with_name(f".{output.name}.draft")
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir(parents=True)
    try:
        yield draft
        draft.rename(output)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def copy_tokenizer(source: Path, target: Path) -> list[str]:
    """Copies the files of a tokenizer; returns their names."""
    names = [name for name in TOKENIZER_FILES if (source / name).is_file()]
    for name in names:
        shutil.copyfile(source / name, target / name)
    return names
