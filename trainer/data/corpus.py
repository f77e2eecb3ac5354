"""Builds a corpus of tokens from text files: `meshloom data build`.

Which document goes into which shard is settled before the first shard is written, so
a build that was killed goes on where it stood. `corpus_files.py` describes the files.
"""

import contextlib
import dataclasses
import fcntl
import hashlib
import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from . import corpus_files, documents
from .tokenizer import Bytes, HuggingFaceTokenizer, Tokenizer, file_digest

SHARD_SIZE = 64 * 2**20
_SECONDS_BETWEEN_LINES = 5.0


@dataclasses.dataclass(frozen=True)
class Progress:
    """How far a build is; finished shards of an earlier start count as done."""

    documents: int
    num_documents: int
    bytes: int
    num_bytes: int
    shards: int
    num_shards: int


def build(
    path: str,
    output: str | Path,
    *,
    pattern: str | None = None,
    tokenizer: str | Path | None = None,
    end_token: str | None = None,
    shard_size: int = SHARD_SIZE,
    progress: Callable[[Progress], None] | None = None,
) -> dict[str, Any]:
    """Tokenizes the documents of `path` into the folder `output`; returns the manifest.

    Started again after a kill it continues with the first missing shard, and the
    result is the same to the byte. A folder built from something else is refused.

    Args:
        path: as in `sources.Text`: a folder, a file, a glob or "stdlib".
        tokenizer: a tokenizer.json file; None stores bytes.
        shard_size: bytes of text after which a shard is full.
    """
    output = Path(output)
    if shard_size < 1:
        raise ValueError(
            f"data build: shard size is {shard_size}; expected at least 1 byte."
        )
    encoder = HuggingFaceTokenizer(tokenizer, end_token) if tokenizer else Bytes()
    found = documents.find(path, pattern, what=f"data build: input '{path}'")
    found = [document for document in found if not _is_inside(document.path, output)]
    parts = _cut(found, shard_size)
    plan = {
        "format": corpus_files.FORMAT,
        "documents": len(found),
        "bytes": sum(document.num_bytes for document in found),
        "listing": documents.listing_digest(found),
        "shard_size": shard_size,
        "num_shards": len(parts),
        "tokenizer": _tokenizer_facts(encoder),
    }
    with _locked(output):
        _start(output, plan, tokenizer)
        if (output / corpus_files.MANIFEST).exists():
            return corpus_files.read_json(output / corpus_files.MANIFEST)
        tracker = _Tracker(plan, progress)
        for number, shard in enumerate(parts):
            if corpus_files.path(output, number, ".json").exists():
                tracker.add(*shard)
            else:
                _write_shard(output, number, shard, encoder, tracker)
            tracker.end_shard()
        return _write_manifest(output, plan)


def _is_inside(path: str, folder: Path) -> bool:
    """An output folder below the input must not become input when started again."""
    folder_path = os.path.abspath(folder)
    return os.path.commonpath([os.path.abspath(path), folder_path]) == folder_path


def _cut(found: list[documents.Document], shard_size: int):
    """Returns the documents of each shard; only the listing decides."""
    parts, size = [[]], 0
    for document in found:
        if size >= shard_size:
            parts.append([])
            size = 0
        parts[-1].append(document)
        size += document.num_bytes
    return parts


def _tokenizer_facts(tokenizer: Tokenizer) -> dict[str, Any]:
    facts = {"vocab_size": tokenizer.vocab_size, "end": tokenizer.end}
    if isinstance(tokenizer, HuggingFaceTokenizer):
        return {"kind": "tokenizer.json", "digest": tokenizer.digest} | facts
    return {"kind": "bytes"} | facts


@contextlib.contextmanager
def _locked(output: Path) -> Iterator[None]:
    """Keeps a second build out of the folder; the lock dies with the process."""
    try:
        output.mkdir(parents=True, exist_ok=True)
        folder = os.open(output, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise ValueError(
            f"data build: cannot write to the folder '{output}' ({error.strerror}). "
            "Name another one as output."
        ) from error
    try:
        try:
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ValueError(
                f"data build: another process is building in '{output}'. Wait for it, "
                "or name another output."
            ) from error
        yield
    finally:
        os.close(folder)


def _start(output: Path, plan: dict[str, Any], tokenizer: str | Path | None) -> None:
    """Writes the plan into an empty folder, or checks the one that is there."""
    plan_path = output / corpus_files.PLAN
    if plan_path.exists():
        _check_same(output, corpus_files.read_json(plan_path), plan)
    else:
        others = {file.name for file in output.iterdir()}
        if others - {corpus_files.PLAN + corpus_files.TEMPORARY}:
            raise ValueError(
                f"data build: '{output}' is not empty and holds no build. Name a new "
                "folder as output."
            )
        corpus_files.write_json(plan_path, plan)
    if tokenizer and not (output / corpus_files.TOKENIZER).exists():
        with corpus_files.replacing(output / corpus_files.TOKENIZER) as draft:
            shutil.copyfile(tokenizer, draft)


def _check_same(output: Path, there: dict[str, Any], plan: dict[str, Any]) -> None:
    different = [
        f"{key} is {there.get(key)} there and {plan.get(key)} now"
        for key in sorted(there.keys() | plan.keys())
        if there.get(key) != plan.get(key)
    ]
    if different:
        raise ValueError(
            f"data build: '{output}' holds a build of something else: "
            f"{'; '.join(different)}. Name another output, or delete the folder."
        )


def _write_shard(
    output: Path,
    number: int,
    shard: list[documents.Document],
    tokenizer: Tokenizer,
    tracker: "_Tracker",
) -> None:
    from array_record.python.array_record_module import ArrayRecordWriter

    dtype = corpus_files.token_dtype(tokenizer.vocab_size)
    index = np.zeros(len(shard), corpus_files.INDEX)
    num_records = 0
    data_path = corpus_files.path(output, number, ".arrayrecord")
    with corpus_files.replacing(data_path) as draft:
        # Grain reads single records fast only in groups of one.
        writer = ArrayRecordWriter(str(draft), "group_size:1")
        for row, document in zip(index, shard, strict=True):
            tokens = _encode(document, tokenizer).astype(dtype)
            for start in range(0, len(tokens), corpus_files.RECORD_TOKENS):
                writer.write(
                    tokens[start : start + corpus_files.RECORD_TOKENS].tobytes()
                )
                num_records += 1
            row["tokens"] = len(tokens)
            row["bytes"] = document.num_bytes
            row["key"] = documents.split_key(document.name)
            row["digest"] = _document_digest(document, tokens)
            tracker.add(document)
        writer.close()
        _check_written(draft, num_records)
    with corpus_files.replacing(corpus_files.path(output, number, ".npy")) as draft:
        with open(draft, "wb") as file:
            np.save(file, index)
    facts = {
        "documents": len(shard),
        "records": num_records,
        "tokens": int(index["tokens"].sum()),
        "bytes": int(index["bytes"].sum()),
        "file_bytes": data_path.stat().st_size,
        "digest": file_digest(data_path),
        "index_digest": file_digest(corpus_files.path(output, number, ".npy")),
    }
    corpus_files.write_json(corpus_files.path(output, number, ".json"), facts)


def _encode(document: documents.Document, tokenizer: Tokenizer) -> np.ndarray:
    data = Path(document.path).read_bytes()
    if len(data) != document.num_bytes:
        raise ValueError(
            f"data build: '{document.path}' changed during the build: "
            f"{document.num_bytes} bytes became {len(data)}. Start again with files "
            "that stay as they are, in a new output folder."
        )
    try:
        return tokenizer.encode(data)
    except UnicodeDecodeError as error:
        raise ValueError(
            f"data build: '{document.path}' is no UTF-8 text (byte {error.start}). "
            "Convert it, or leave it out of the input."
        ) from error


def _document_digest(document: documents.Document, tokens: np.ndarray) -> np.ndarray:
    digest = hashlib.sha256(os.fsencode(document.name) + b"\0" + tokens.tobytes())
    return np.frombuffer(digest.digest(), np.uint8)


def _check_written(path: Path, num_records: int) -> None:
    """The writer says nothing of a full disk, so what it wrote is opened again."""
    from array_record.python.array_record_module import ArrayRecordReader

    found = ArrayRecordReader(str(path)).num_records() if path.exists() else 0
    if found != num_records:
        raise ValueError(
            f"data build: '{path}' holds {found} records after writing {num_records}. "
            "Look for a full disk, then run the same command again."
        )


def _write_manifest(output: Path, plan: dict[str, Any]) -> dict[str, Any]:
    numbers = range(plan["num_shards"])
    facts = [
        corpus_files.read_json(corpus_files.path(output, n, ".json")) for n in numbers
    ]
    digest = hashlib.sha256()
    for number in numbers:
        index = np.load(corpus_files.path(output, number, ".npy"))
        digest.update(index["digest"].tobytes())
    manifest = {
        "format": corpus_files.FORMAT,
        "documents": plan["documents"],
        "tokens": sum(shard["tokens"] for shard in facts),
        "bytes": plan["bytes"],
        "vocab_size": plan["tokenizer"]["vocab_size"],
        "end": plan["tokenizer"]["end"],
        "dtype": corpus_files.token_dtype(plan["tokenizer"]["vocab_size"]).name,
        "record_tokens": corpus_files.RECORD_TOKENS,
        "tokenizer": plan["tokenizer"],
        # Of names and tokens in order: the same however the shards are cut.
        "digest": digest.hexdigest(),
        "shards": facts,
    }
    corpus_files.write_json(output / corpus_files.MANIFEST, manifest)
    return manifest


class _Tracker:
    """Counts what is done and tells the progress callback."""

    def __init__(self, plan: dict[str, Any], callback):
        self._callback = callback
        self._now = Progress(
            0, plan["documents"], 0, plan["bytes"], 0, plan["num_shards"]
        )

    def add(self, *added: documents.Document) -> None:
        self._tell(
            documents=self._now.documents + len(added),
            bytes=self._now.bytes + sum(document.num_bytes for document in added),
        )

    def end_shard(self) -> None:
        self._tell(shards=self._now.shards + 1)

    def _tell(self, **changes: int) -> None:
        self._now = dataclasses.replace(self._now, **changes)
        if self._callback:
            self._callback(self._now)


def build_with_progress(
    path: str, output: str | Path, **settings: Any
) -> dict[str, Any]:
    """`build` with a progress bar, or with plain lines where there is no terminal."""
    from rich.console import Console

    console = Console()
    if console.is_terminal:
        manifest = _build_with_bar(console, path, output, settings)
    else:
        manifest = build(path, output, progress=_Lines(), **settings)
    print(
        f"{output}: {manifest['documents']} documents, {manifest['tokens']} tokens, "
        f"{manifest['bytes']} bytes of text in {len(manifest['shards'])} shards, "
        f"digest {manifest['digest'][:16]}"
    )
    return manifest


def _build_with_bar(console: Any, path: str, output: str | Path, settings: Any):
    from rich import progress as bars

    columns = (
        bars.TextColumn("{task.description}"),
        bars.BarColumn(),
        bars.DownloadColumn(),
        bars.TransferSpeedColumn(),
        bars.TimeRemainingColumn(),
    )
    with bars.Progress(*columns, console=console) as bar:
        task = bar.add_task("listing files", total=None)

        def show(now: Progress) -> None:
            text = f"shard {now.shards}/{now.num_shards}"
            bar.update(task, description=text, completed=now.bytes, total=now.num_bytes)

        return build(path, output, progress=show, **settings)


class _Lines:
    """Prints a line of progress every few seconds."""

    def __init__(self):
        self._last = time.monotonic()

    def __call__(self, now: Progress) -> None:
        if time.monotonic() - self._last < _SECONDS_BETWEEN_LINES:
            return
        self._last = time.monotonic()
        print(
            f"{now.bytes / now.num_bytes:.0%}: {now.documents} of {now.num_documents} "
            f"documents, {now.shards} of {now.num_shards} shards done",
            flush=True,
        )
