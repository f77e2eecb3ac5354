"""The files of a built corpus: names, writing and reading.

A build folder contains `plan.json` (what is being built), for each shard NUMBER the
files `shard-NUMBER.arrayrecord` (tokens), `shard-NUMBER.npy` (one row per document) and
`shard-NUMBER.json` (counts and digests), and at the end `manifest.json`. Each file is
written under a temporary name and renamed when complete, a shard's `.json` after its
other two. So a file that exists is complete, and a shard with a `.json` is done.

A document is stored as records of RECORD_TOKENS tokens (the last may be shorter), so
reading a window of a long document does not read all of it.
"""

import contextlib
import json
import os
from pathlib import Path
from typing import Any

import numpy as np

from ...launch import atomic_file
from .tokenizer import Bytes, HuggingFaceTokenizer, Tokenizer, file_digest

FORMAT = 1
RECORD_TOKENS = 8192
INDEX = np.dtype(
    [("tokens", "<i8"), ("bytes", "<i8"), ("key", "<u8"), ("digest", "u1", 32)]
)
PLAN = "plan.json"
MANIFEST = "manifest.json"
TOKENIZER = "tokenizer.json"
TEMPORARY = ".tmp"


def token_dtype(vocab_size: int) -> np.dtype:
    return np.dtype("<u2" if vocab_size <= 2**16 else "<u4")


def path(folder: Path, number: int, suffix: str) -> Path:
    return folder / f"shard-{number:05d}{suffix}"


def replacing(target: Path) -> contextlib.AbstractContextManager[Path]:
    """Yields the path of a draft, which becomes `target` when the block succeeds.

    Its name is fixed, so a build that goes on overwrites what a killed one left.
    """
    return atomic_file.replacing(target, draft_name=target.name + TEMPORARY)


def write_json(target: Path, value: dict[str, Any]) -> None:
    with replacing(target) as draft:
        draft.write_text(json.dumps(value, indent=1) + "\n")


def read_json(target: Path) -> dict[str, Any]:
    return json.loads(target.read_text())


class Corpus:
    """An opened, complete build: `manifest`, `index` (one row per document), tokens."""

    def __init__(self, folder: str, *, what: str):
        import grain

        self.manifest = load_manifest(folder, what=what)
        facts = self.manifest["shards"]
        self.index = np.concatenate(
            [_load_index(Path(folder), n, facts[n], what) for n in range(len(facts))]
        )
        self._dtype = np.dtype(self.manifest["dtype"]).newbyteorder("<")
        self._record_tokens = self.manifest["record_tokens"]
        num_records = -(-self.index["tokens"] // self._record_tokens)
        self._first_record = np.cumsum(num_records) - num_records
        names = [str(path(Path(folder), n, ".arrayrecord")) for n in range(len(facts))]
        self._records = grain.sources.ArrayRecordDataSource(names)

    def read(self, document: int, start: int, stop: int) -> np.ndarray:
        """Returns tokens [start, stop) of a document, reading only their records."""
        size = self._record_tokens
        base = int(self._first_record[document])
        first, last = start // size, -(-stop // size)
        records = [self._records[base + number] for number in range(first, last)]
        tokens = np.frombuffer(b"".join(records), self._dtype)
        return tokens[start - first * size : stop - first * size]


def _load_index(root: Path, number: int, facts: dict[str, Any], what: str):
    file = path(root, number, ".npy")
    if not file.exists() or file_digest(file) != facts["index_digest"]:
        raise ValueError(
            f"{what}: '{file}' is missing or was changed after the build. Delete the "
            "folder and build it again."
        )
    return np.load(file)


def load_manifest(folder: str, *, what: str) -> dict[str, Any]:
    """Returns the manifest of a complete build, and checks the sizes of its files."""
    root = Path(folder)
    if not root.is_dir():
        raise ValueError(
            f"{what}: no folder '{folder}' (relative to '{os.getcwd()}'). Build it "
            "with `meshloom data build`, or correct the path."
        )
    if not (root / MANIFEST).exists():
        if (root / PLAN).exists():
            raise ValueError(
                f"{what}: the build of this corpus is not complete. Run the same "
                "`meshloom data build` command again: it resumes where it stopped."
            )
        raise ValueError(
            f"{what}: the folder contains no {MANIFEST}. Build a corpus with `meshloom "
            "data build`, or read text files with the source Text."
        )
    manifest = read_json(root / MANIFEST)
    if manifest["format"] != FORMAT:
        raise ValueError(
            f"{what}: the corpus has format {manifest['format']}; this version reads "
            f"{FORMAT}. Build it again in a new folder."
        )
    for number, facts in enumerate(manifest["shards"]):
        file = path(root, number, ".arrayrecord")
        size = file.stat().st_size if file.exists() else 0
        if size != facts["file_bytes"]:
            raise ValueError(
                f"{what}: '{file}' has {size} bytes, but the manifest says "
                f"{facts['file_bytes']}. Delete the folder and build it again."
            )
    return manifest


def load_tokenizer(folder: str, *, what: str) -> Tokenizer:
    """Returns the tokenizer a corpus was built with."""
    manifest = load_manifest(folder, what=what)
    if manifest["tokenizer"]["kind"] == "bytes":
        return Bytes()
    end = manifest["tokenizer"]["end"]
    return HuggingFaceTokenizer(Path(folder) / TOKENIZER, end_token=end)
