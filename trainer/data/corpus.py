"""Builds a corpus of tokens from text files: `meshloom data build`.

Documents are assigned to shards before the first shard is written, so a build that was
killed resumes where it stopped. `corpus_files.py` describes the files.
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
_PRINT_SECONDS = 5.0


@dataclasses.dataclass(frozen=True)
class Progress:
    """Progress of a build; shards finished by an earlier attempt count as done."""

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

    A build that was killed and is started again resumes at the first missing shard, and
    the result is identical byte for byte. A folder built from other input is an error.

    Args:
      path: a folder, a file, a glob or "stdlib", as in `sources.Text`.
      tokenizer: a tokenizer.json file; None stores bytes.
      shard_size: bytes of text after which a new shard starts.
    """
    output = Path(output)
    if shard_size < 1:
        raise ValueError(
            f"data build: shard size is {shard_size}; it must be >= 1 byte."
        )
    encoder = HuggingFaceTokenizer(tokenizer, end_token) if tokenizer else Bytes()
    inputs = documents.find(path, pattern, what=f"data build: input '{path}'")
    inputs = [document for document in inputs if not _is_inside(document.path, output)]
    shards = _assign_to_shards(inputs, shard_size)
    plan = {
        "format": corpus_files.FORMAT,
        "documents": len(inputs),
        "bytes": sum(document.num_bytes for document in inputs),
        "listing": documents.listing_digest(inputs),
        "shard_size": shard_size,
        "num_shards": len(shards),
        "tokenizer": _tokenizer_facts(encoder),
    }
    with _locked(output):
        _start(output, plan, tokenizer)
        if (output / corpus_files.MANIFEST).exists():
            return corpus_files.read_json(output / corpus_files.MANIFEST)
        tracker = _Tracker(plan, progress)
        for number, shard in enumerate(shards):
            if corpus_files.path(output, number, ".json").exists():
                tracker.add(*shard)
            else:
                _write_shard(output, number, shard, encoder, tracker)
            tracker.end_shard()
        return _write_manifest(output, plan)


def _is_inside(path: str, folder: Path) -> bool:
    """Returns whether a file is in `folder`: the output must never become input."""
    folder_path = os.path.abspath(folder)
    return os.path.commonpath([os.path.abspath(path), folder_path]) == folder_path


def _assign_to_shards(
    inputs: list[documents.Document], shard_size: int
) -> list[list[documents.Document]]:
    """Returns the documents of each shard, which depend on names and sizes alone."""
    shards, size = [[]], 0
    for document in inputs:
        if size >= shard_size:
            shards.append([])
            size = 0
        shards[-1].append(document)
        size += document.num_bytes
    return shards


def _tokenizer_facts(tokenizer: Tokenizer) -> dict[str, Any]:
    facts = {"vocab_size": tokenizer.vocab_size, "end": tokenizer.end}
    if isinstance(tokenizer, HuggingFaceTokenizer):
        return {"kind": "tokenizer.json", "digest": tokenizer.digest} | facts
    return {"kind": "bytes"} | facts


@contextlib.contextmanager
def _locked(output: Path) -> Iterator[None]:
    """Locks the folder against a second build; the lock is released on exit."""
    try:
        output.mkdir(parents=True, exist_ok=True)
        folder = os.open(output, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise ValueError(
            f"data build: cannot write to the folder '{output}' ({error.strerror}). "
            "Choose another --output."
        ) from error
    try:
        try:
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ValueError(
                f"data build: another process is building in '{output}'. Wait for it, "
                "or choose another --output."
            ) from error
        yield
    finally:
        os.close(folder)


def _start(output: Path, plan: dict[str, Any], tokenizer: str | Path | None) -> None:
    """Writes the build plan to an empty folder, or checks the existing one."""
    plan_path = output / corpus_files.PLAN
    if plan_path.exists():
        _check_same(output, corpus_files.read_json(plan_path), plan)
    else:
        others = {file.name for file in output.iterdir()}
        if others - {corpus_files.PLAN + corpus_files.TEMPORARY}:
            raise ValueError(
                f"data build: '{output}' is not empty and contains no build. Choose a "
                "new folder as --output."
            )
        corpus_files.write_json(plan_path, plan)
    if tokenizer and not (output / corpus_files.TOKENIZER).exists():
        with corpus_files.replacing(output / corpus_files.TOKENIZER) as draft:
            shutil.copyfile(tokenizer, draft)


def _check_same(output: Path, old: dict[str, Any], new: dict[str, Any]) -> None:
    differences = [
        f"{key} is {old.get(key)} there and {new.get(key)} now"
        for key in sorted(old.keys() | new.keys())
        if old.get(key) != new.get(key)
    ]
    if differences:
        raise ValueError(
            f"data build: '{output}' contains a different build: "
            f"{'; '.join(differences)}. Choose another --output, or delete the folder."
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
        # Grain reads single records fast only if each is a group of its own.
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
            f"{document.num_bytes} bytes became {len(data)}. Start again in a new "
            "--output folder, with files that nothing modifies."
        )
    try:
        return tokenizer.encode(data)
    except UnicodeDecodeError as error:
        raise ValueError(
            f"data build: '{document.path}' is not UTF-8 text (byte {error.start}). "
            "Convert it, or exclude it from the input."
        ) from error


def _document_digest(document: documents.Document, tokens: np.ndarray) -> np.ndarray:
    digest = hashlib.sha256(os.fsencode(document.name) + b"\0" + tokens.tobytes())
    return np.frombuffer(digest.digest(), np.uint8)


def _check_written(path: Path, num_records: int) -> None:
    """Reads the file back, because the writer does not report a full disk."""
    from array_record.python.array_record_module import ArrayRecordReader

    actual = ArrayRecordReader(str(path)).num_records() if path.exists() else 0
    if actual != num_records:
        raise ValueError(
            f"data build: '{path}' has {actual} records after writing {num_records}. "
            "Check whether the disk is full, then run the same command again."
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
        # Of names and tokens in order, so it does not depend on the shard size.
        "digest": digest.hexdigest(),
        "shards": facts,
    }
    corpus_files.write_json(output / corpus_files.MANIFEST, manifest)
    return manifest


class _Tracker:
    """Counts what is done and calls the progress callback."""

    def __init__(self, plan: dict[str, Any], callback):
        self._callback = callback
        self._now = Progress(
            0, plan["documents"], 0, plan["bytes"], 0, plan["num_shards"]
        )

    def add(self, *added: documents.Document) -> None:
        self._report(
            documents=self._now.documents + len(added),
            bytes=self._now.bytes + sum(document.num_bytes for document in added),
        )

    def end_shard(self) -> None:
        self._report(shards=self._now.shards + 1)

    def _report(self, **changes: int) -> None:
        self._now = dataclasses.replace(self._now, **changes)
        if self._callback:
            self._callback(self._now)


def build_with_progress(
    path: str, output: str | Path, **settings: Any
) -> dict[str, Any]:
    """Runs `build` with a progress bar, or with plain lines if not on a terminal."""
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
    """Prints a progress line every few seconds."""

    def __init__(self):
        self._last = time.monotonic()

    def __call__(self, now: Progress) -> None:
        if time.monotonic() - self._last < _PRINT_SECONDS:
            return
        self._last = time.monotonic()
        print(
            f"{now.bytes / now.num_bytes:.0%}: {now.documents} of {now.num_documents} "
            f"documents, {now.shards} of {now.num_shards} shards done",
            flush=True,
        )
