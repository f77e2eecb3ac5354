"""Finds the documents of a corpus: files in a fixed order, split by their names."""

import dataclasses
import hashlib
import os
import re
import sysconfig
from collections.abc import Callable
from pathlib import Path

STDLIB = "stdlib"
# What an installation adds to the standard library, its tests, and what a build of
# Python writes about its own machine.
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
    """Returns 64 bits of the document's name, which alone decide its split."""
    return int.from_bytes(hashlib.sha256(os.fsencode(name)).digest()[:8], "big")


def is_held_out(key: int, holdout: float) -> bool:
    """Whether a document belongs to the eval split; other documents play no part."""
    return key < holdout * 2**64


def listing_digest(documents: list[Document]) -> str:
    """Returns a digest of the names and sizes; the contents are not read."""
    digest = hashlib.sha256()
    for document in documents:
        digest.update(os.fsencode(document.name))
        digest.update(b"\0%d\n" % document.num_bytes)
    return digest.hexdigest()


def find(path: str, pattern: str | None = None, *, what: str) -> list[Document]:
    """Returns the documents of a file, folder, glob or "stdlib", sorted by name.

    Hidden files and folders, `__pycache__`, folders behind symbolic links and empty
    files are no part of a corpus. A file that cannot be read is an error.

    Args:
        pattern: a glob relative to the folder; None means every file (and `**/*.py`
            for the standard library).
        what: the object that error messages speak of, for instance "Text(path='x')".
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
        empty = f" but {num_empty} empty files" if num_empty else ""
        raise ValueError(
            f"{what}: no file{empty} matches '{pattern}' in the folder '{root}'. Name "
            "a folder that holds text files, or change the pattern."
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
            f"{what}: pattern '{pattern}' needs a folder, but the path is no folder. "
            "Put the whole glob into the path, or give folder and pattern."
        )
    if Path(path).exists():
        return Path(path).parent, _escape(Path(path).name)
    parts = Path(path).parts
    fixed = next((i for i, p in enumerate(parts) if _WILDCARDS.search(p)), len(parts))
    root = Path(*parts[:fixed])
    if fixed == len(parts) or not root.is_dir():
        raise ValueError(
            f"{what}: no file or folder '{root}' (looked from '{os.getcwd()}'). "
            "Correct the path, or create the folder."
        )
    return root, "/".join(parts[fixed:])


def _escape(name: str) -> str:
    return re.sub(r"([*?\[])", r"[\1]", name)


def _matcher(pattern: str) -> Callable[[str], object]:
    """Returns a test for names; `**` stands for any number of folders, also none."""
    # fnmatch would let * and ? cross a slash, so the wildcards are read here.
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
            f"({error.strerror}). Make it readable, or leave it out of the corpus."
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
        found = path.stat()
        reason = None if os.access(path, os.R_OK) else "permission denied"
        if not path.is_file():
            reason = "not a regular file"
    except OSError as error:
        found, reason = None, error.strerror
    if found is None or reason:
        raise ValueError(
            f"{what}: the file '{path}' cannot be read ({reason}). Make it readable, "
            "or leave it out of the corpus."
        )
    return Document(name, str(path), found.st_size, found.st_mtime_ns)
