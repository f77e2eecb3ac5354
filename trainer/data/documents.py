"""Finds the text files of a corpus, assigns them to splits, and reads them."""

import dataclasses
import hashlib
import os
import re
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import numpy as np

Split = Literal["train", "eval", "test"]
DEFAULT_HOLDOUT = 0.05
STDLIB = "stdlib"
# Left out of "stdlib": installed packages, the library's own tests, and files that a
# build of Python generates about its machine.
_NOT_STDLIB_FOLDERS = {
    "dist-packages",
    "idle_test",
    "site-packages",
    "test",
    "tests",
}
_NOT_STDLIB_FILES = re.compile(r"(.*/)?_sysconfigdata.*|config-[^/]*/.*")
_GLOB = {"**/": "(?:[^/]+/)*", "**": ".*", "*": "[^/]*", "?": "[^/]"}
_WILDCARDS = re.compile(r"[*?\[]")


@dataclasses.dataclass(frozen=True)
class Document:
    """A file of the corpus; `name` is its POSIX path relative to the corpus."""

    name: str
    path: str
    num_bytes: int
    mtime_ns: int


def split_key(name: str) -> int:
    """Returns a 64-bit hash of the document's name, which determines its split."""
    return int.from_bytes(hashlib.sha256(os.fsencode(name)).digest()[:8], "big")


def is_held_out(key: int, holdout: float) -> bool:
    """Returns whether a hash falls into the held-out fraction."""
    return key < holdout * 2**64


def listing_digest(documents: list[Document]) -> str:
    """Returns a digest of names and sizes, without reading the contents."""
    digest = hashlib.sha256()
    for document in documents:
        digest.update(os.fsencode(document.name))
        digest.update(b"\0%d\n" % document.num_bytes)
    return digest.hexdigest()


def find(path: str, pattern: str | None = None, *, what: str) -> list[Document]:
    """Returns the documents of a file, folder, glob or "stdlib", sorted by name.

    Skips hidden files and folders, `__pycache__`, symbolic links to folders, and empty
    files. A file that cannot be read is an error.

    Args:
      pattern: a glob relative to the folder; None means every file (or `**/*.py` for
        the standard library).
      what: prefix of error messages, for instance "Text(path='x')".
    """
    root, pattern = _root_and_pattern(path, pattern, what)
    skip_folders = _NOT_STDLIB_FOLDERS if path == STDLIB else set()
    matches = _matcher(pattern)
    documents = []
    num_empty = 0
    for name in _walk(root, skip_folders, what):
        if not matches(name) or (path == STDLIB and _NOT_STDLIB_FILES.match(name)):
            continue
        document = _document(root, name, what)
        if document.num_bytes:
            documents.append(document)
        else:
            num_empty += 1
    if not documents:
        empty = f" except {num_empty} empty files" if num_empty else ""
        raise ValueError(
            f"{what}: no file{empty} matches '{pattern}' in the folder '{root}'. Name "
            "a folder that contains files, or change the pattern."
        )
    # Bytes sort the same on every machine, whatever its locale.
    return sorted(documents, key=lambda document: os.fsencode(document.name))


def _root_and_pattern(path: str, pattern: str | None, what: str) -> tuple[Path, str]:
    """Returns the folder that names are relative to, and the glob below it."""
    if path == STDLIB:
        return Path(sysconfig.get_paths()["stdlib"]), pattern or "**/*.py"
    if Path(path).is_dir():
        return Path(path), pattern or "**/*"
    if pattern is not None and (_WILDCARDS.search(path) or Path(path).exists()):
        raise ValueError(
            f"{what}: pattern '{pattern}' needs a folder, but the path is not a "
            "folder. Put the entire glob into the path, or set path to a folder."
        )
    if Path(path).exists():
        return Path(path).parent, _escape(Path(path).name)
    parts = Path(path).parts
    fixed = next((i for i, p in enumerate(parts) if _WILDCARDS.search(p)), len(parts))
    root = Path(*parts[:fixed])
    if fixed == len(parts) or not root.is_dir():
        raise ValueError(
            f"{what}: no file or folder '{root}' (relative to '{os.getcwd()}'). "
            "Correct the path, or create the folder."
        )
    return root, "/".join(parts[fixed:])


def _escape(name: str) -> str:
    return re.sub(r"([*?\[])", r"[\1]", name)


def _matcher(pattern: str) -> Callable[[str], object]:
    """Returns a predicate on names; `**` matches any number of folders, even none."""
    # In fnmatch * and ? match a slash, so the wildcards are translated here.
    expression = ""
    for token in re.findall(r"\*\*/|\*\*|\*|\?|\[!?\]?[^\]/]*\]|.", pattern, re.DOTALL):
        if token in _GLOB:
            expression += _GLOB[token]
        elif len(token) > 1:
            inside = token[1:-1].replace("\\", r"\\").replace("[", r"\[")
            inside = "^/" + inside[1:] if inside.startswith("!") else inside
            expression += f"[{inside}]"
        else:
            expression += re.escape(token)
    return re.compile(expression, re.DOTALL).fullmatch


def _walk(root: Path, skip_folders: set[str], what: str):
    """Yields the names of all visible files below the root."""

    def unreadable(error: OSError):
        raise ValueError(
            f"{what}: the folder '{error.filename}' cannot be listed "
            f"({error.strerror}). Make it readable, or exclude it from the corpus."
        )

    for folder, subfolders, files in os.walk(root, onerror=unreadable):
        subfolders[:] = [
            name
            for name in subfolders
            if not name.startswith(".")
            and name != "__pycache__"
            and name not in skip_folders
        ]
        relative = Path(folder).relative_to(root)
        for name in files:
            if not name.startswith("."):
                yield (relative / name).as_posix()


def _document(root: Path, name: str, what: str) -> Document:
    path = root / name
    try:
        stat = path.stat()
        reason = None if os.access(path, os.R_OK) else "permission denied"
        if not path.is_file():
            reason = "not a regular file"
    except OSError as error:
        stat, reason = None, error.strerror
    if stat is None or reason:
        raise ValueError(
            f"{what}: the file '{path}' cannot be read ({reason}). Make it readable, "
            "or exclude it from the corpus."
        )
    return Document(name, str(path), stat.st_size, stat.st_mtime_ns)


class FileReader:
    """Reads byte ranges of files. A file that changed since it was listed is an error.

    Args:
      starts: offset in each file that counts as its byte 0.
    """

    def __init__(self, files: list[Document], starts: list[int]):
        self._files, self._starts = files, starts

    def __call__(self, i: int, start: int, stop: int) -> np.ndarray:
        listed = self._files[i]
        with open(listed.path, "rb", buffering=0) as file:
            now = os.fstat(file.fileno())
            file.seek(self._starts[i] + start)
            data = file.read(stop - start)
        actual = (now.st_size, now.st_mtime_ns, len(data))
        if actual != (listed.num_bytes, listed.mtime_ns, stop - start):
            raise ValueError(
                f"'{listed.path}' changed while it was in use ({now.st_size:,} bytes, "
                f"{listed.num_bytes:,} when it was opened). Restore the file that the "
                "run started with, and start it again: it compares the contents."
            )
        return np.frombuffer(data, np.uint8)


@dataclasses.dataclass(frozen=True)
class Span:
    """The tokens [start, stop) of the document with this index."""

    document: int
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start


@dataclasses.dataclass(frozen=True)
class Holdout:
    """The fractions of a corpus that are held out for the eval and test splits."""

    eval: float
    test: float

    def select(
        self, keys: list[int], lengths: np.ndarray, split: Split, what: str
    ) -> list[Span]:
        """Returns the spans of a split; an empty split is an error.

        With several documents, a hash of its name assigns each one to a split, so that
        adding files moves no others. A single document is split by position: its end
        is held out.

        Args:
          keys: `split_key` of each document.
          lengths: of each document.
        """
        if len(keys) == 1:
            spans = self._split_one(int(lengths[0]), split)
        else:
            spans = [
                Span(i, 0, int(lengths[i]))
                for i, key in enumerate(keys)
                if self.split_of(key) == split
            ]
        if not spans:
            raise ValueError(self._empty_message(len(keys), split, what))
        return spans

    def split_of(self, key: int) -> Split:
        """Returns the split that a hash belongs to."""
        if is_held_out(key, self.eval):
            return "eval"
        return "test" if is_held_out(key, self.eval + self.test) else "train"

    def _split_one(self, length: int, split: Split) -> list[Span]:
        """Splits one document into train, eval and test, in this order."""
        test = length - round(length * self.test)
        end = test - round(length * self.eval)
        start, stop = {
            "train": (0, end),
            "eval": (end, test),
            "test": (test, length),
        }[split]
        return [Span(0, start, stop)] if stop > start else []

    def _empty_message(self, num_documents: int, split: Split, what: str) -> str:
        count = "1 document" if num_documents == 1 else f"{num_documents} documents"
        if split == "train":
            settings = f"holdout={self.eval}"
            if self.test:
                settings += f" and test_holdout={self.test}"
            return (
                f"{what}: split 'train' is empty: {settings} of {count} leaves nothing "
                "to train on. Lower holdout, or add documents."
            )
        name = "holdout" if split == "eval" else "test_holdout"
        fraction = self.eval if split == "eval" else self.test
        return (
            f"{what}: split '{split}' is empty: {name}={fraction} of {count} selects "
            f"none. Set {split}_path to the files of this split, raise {name}, or add "
            "documents."
        )
