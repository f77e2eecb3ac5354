"""The identity of the data a run is trained on: a digest of the contents of each split.

A dataset made of files lists them (`files`), and their contents are read once; a resume
reads only the files whose size or time differs from those in the run folder. A dataset
that knows its own digest returns it in `describe`. For any other the examples
themselves are read, at most MAX_EXAMPLES of each split, evenly spaced.

A run continues with the data it was started with, unless the user insists.
"""

import dataclasses
import hashlib
import json
import socket
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from etils import epath

from ...launch.atomic_file import replace_text
from ..checkpoint import manifest
from ..checkpoint.manager import committed_steps
from ..data.sources import Dataset
from ..job.group import Group, Report
from ..record import file_digests
from ..record.failures import CorruptCheckpoint
from ..record.file_digests import Stamp

FILE = "data.json"
FORMAT = 1
MAX_EXAMPLES = 65536
# How many files of a change are named; the rest is counted.
MAX_NAMES = 4
# How long the others wait for the slowest host to read its data once.
READ_SECONDS = 12 * 3600.0


@dataclasses.dataclass(frozen=True)
class Split:
    """A split in its present state.

    Attributes:
      digest: of its contents.
      examples: how many it has.
      files: {name: stamp}; empty if it does not list its files, and in processes that
        left the reading to another one.
    """

    digest: str
    examples: int
    files: Mapping[str, Stamp] = dataclasses.field(default_factory=dict)

    def facts(self) -> dict[str, Any]:
        return {"digest": self.digest, "examples": self.examples}


@dataclasses.dataclass(frozen=True)
class Identity:
    """The data of a run by split, and how it differs from what the run had before.

    Attributes:
      changes: one entry for each split that changed.
      is_reader: whether this process has read the files for its host.
      parts: of data that grows (data/growth.py), each with the names of its files and a
        digest of their contents.
    """

    splits: Mapping[str, Split]
    changes: tuple[dict[str, Any], ...] = ()
    is_reader: bool = True
    parts: tuple[Mapping[str, Any], ...] = ()

    @property
    def train_digest(self) -> str:
        """The digest of the data that a run began with, which its ledger has."""
        return self.parts[0]["digest"] if self.parts else self.splits["train"].digest

    def with_parts(self, parts: Sequence[Mapping[str, Any]]) -> "Identity":
        """Returns it with parts; a new first one is the split as it is."""
        digest = {"digest": self.splits["train"].digest}
        return dataclasses.replace(self, parts=tuple(digest | {**x} for x in parts))

    def grown(
        self,
        stamps: Mapping[str, Stamp],
        part: Sequence[int],
        examples: int,
        group: Group,
    ) -> "Identity":
        """Returns it with another part of the train split; all processes must call it.

        Args:
          stamps: of the files of the part.
          examples: of the split, with those of the part.
        """
        old = self.splits["train"]
        files = {**old.files, **stamps} if group.is_first else {}
        digest = group.consult(
            "digest of grown data",
            {"digest": _digest_of("".join(s.digest for s in files.values()))},
            lambda reports: reports[0],
        )["digest"]
        new = {
            "part": list(part),
            "files": list(stamps),
            "digest": _digest_of("".join(s.digest for s in stamps.values())),
        }
        splits = {**self.splits, "train": Split(digest, examples, files)}
        is_reader = group.is_first
        return Identity(splits, (), is_reader, (*self.parts, new))

    def facts(self) -> dict[str, dict[str, Any]]:
        return {name: split.facts() for name, split in self.splits.items()}

    def describe_changes(self) -> str:
        return "\n".join(map(_describe, self.changes))

    def write(self, folder: Path, process: int) -> None:
        """Writes it to the run folder: process 0 for the run, others for their host."""
        if not self.is_reader:
            return
        path = Path(folder) / (FILE if process == 0 else f"data-{process}.json")
        before = _read(path) or {"splits": {}}
        splits = {
            name: split.facts()
            | {"files": {k: dataclasses.astuple(v) for k, v in split.files.items()}}
            for name, split in self.splits.items()
        }
        # A split that is not used now keeps its entry.
        document = {"format": FORMAT, "splits": before["splits"] | splits}
        if self.parts:
            document["parts"] = list(self.parts)
        replace_text(path, json.dumps(document) + "\n")


def recorded(folder: Path) -> dict[str, Any]:
    """Returns what the run folder says about its data; {} if nothing."""
    return _read(Path(folder) / FILE) or {}


def view(datasets: Mapping[str, Dataset]) -> Report:
    """Returns which files this process sees, for `readers`."""
    files = _digest_of(json.dumps(_listing(datasets)))
    return {"host": socket.gethostname(), "files": files}


def readers(views: Sequence[Report]) -> Report:
    """Picks for each process the first one on its host that sees the same files."""
    first: dict[tuple[str, str], int] = {}
    keys = [(report["host"], report["files"]) for report in views]
    for process, key in enumerate(keys):
        first.setdefault(key, process)
    return {"readers": [first[key] for key in keys]}


def establish(
    datasets: Mapping[str, Dataset],
    group: Group,
    readers: Sequence[int],
    folder: Path,
    checkpoints: epath.Path,
    *,
    insist: bool,
    log: Callable[[str], None],
) -> Identity:
    """Reads the data where needed and compares it with what the run had before.

    Every process must call this. Process 0 compares, and all raise ValueError if the
    data has changed; the preflight checks that all hosts have the same data. Writes
    nothing.

    Args:
      readers: for each process, the one that reads for it.
      insist: accept changed data.
    """
    reader = readers[group.index]
    splits: dict[str, Split] = {}
    before: dict[str, Any] = {}

    def read() -> Report:
        if group.is_first:
            before.update(_before(folder, checkpoints, log))
        if reader == group.index:
            splits.update(_splits(datasets, _known_stamps(folder), log))
        return {name: split.facts() for name, split in splits.items()}

    def judge(reports: list[Report]) -> Report:
        changes = _changes(before, splits)
        refusal = _refusal(folder, changes) if changes and not insist else ""
        read = {str(process): reports[process] for process in set(readers)}
        return {"refusal": refusal, "changes": changes, "splits": read}

    answer = group.exchange("data", read, judge, READ_SECONDS)
    if answer["refusal"]:
        raise ValueError(answer["refusal"])
    if reader != group.index:
        read_by_another = answer["splits"][str(reader)]
        splits = {name: Split(**facts) for name, facts in read_by_another.items()}
    return Identity(splits, tuple(answer["changes"]), reader == group.index)


def _listing(datasets: Mapping[str, Dataset]) -> list[Any]:
    """Returns the paths, sizes and times of all files."""
    return [
        [name, path, *file_digests.stat(path)]
        for name, data in datasets.items()
        for path in _files(data).values()
    ]


def _files(data: Dataset) -> Mapping[str, str]:
    if parts := getattr(data, "parts", None):
        return {
            f"{part}/{name}": path
            for part, dataset in parts.items()
            for name, path in _files(dataset).items()
        }
    files = getattr(data, "files", None)
    return files() if files is not None else {}


def _splits(
    datasets: Mapping[str, Dataset],
    known: Mapping[str, list[Stamp]],
    log: Callable[[str], None],
) -> dict[str, Split]:
    splits = {}
    for name, data in datasets.items():
        stamps = file_digests.read(_files(data), known, log)
        known = {**known, **{k: [v, *known.get(k, [])] for k, v in stamps.items()}}
        splits[name] = Split(_digest(name, data, stamps, log), len(data), stamps)
    return splits


def _digest(
    name: str, data: Dataset, stamps: Mapping[str, Stamp], log: Callable[[str], None]
) -> str:
    """Returns the digest of a dataset's contents, given the stamps of its files."""
    if parts := getattr(data, "parts", None):
        digests = []
        for part, dataset in parts.items():
            own = {k: stamps[f"{part}/{k}"] for k in _files(dataset)}
            digests.append(_digest(f"{name} of {part}", dataset, own, log))
        return _digest_of("".join(digests))
    if stamps:
        return _digest_of("".join(stamp.digest for stamp in stamps.values()))
    if (own := data.describe().get("digest")) is not None:
        return str(own)
    return _digest_of_examples(name, data, log)


def _digest_of(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _digest_of_examples(name: str, data: Dataset, log: Callable[[str], None]) -> str:
    size = len(data)
    numbers = range(size)
    if size > MAX_EXAMPLES:
        numbers = np.linspace(0, size - 1, MAX_EXAMPLES).astype(np.int64).tolist()
        log(
            f"The digest of split {name!r} covers {MAX_EXAMPLES:,} of its {size:,} "
            "examples, evenly spaced. Give the dataset a method `files` or a digest in "
            "`describe` to cover all of them (docs/data.md)."
        )
    digest = hashlib.sha256(f"{size}\n".encode())
    for i in numbers:
        example = data[i]
        for key in sorted(example):
            array = np.asarray(example[key])
            digest.update(f"{key} {array.dtype.str} {array.shape}\n".encode())
            digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()


def _read(path: Path) -> dict[str, Any] | None:
    if not path.exists():
        return None
    try:
        document = json.loads(path.read_text())
        if document["format"] == FORMAT:
            return document
        reason = f"format {document['format']!r} instead of {FORMAT}"
    except (ValueError, KeyError, TypeError) as error:
        reason = f"{type(error).__name__}: {error}"
    raise ValueError(
        f"{path} is not a record of a run's data ({reason}). Remove it if you are sure "
        "that the data of this run has not changed."
    )


def _known_stamps(folder: Path) -> dict[str, list[Stamp]]:
    """Returns the stamps that earlier attempts have written, on every host."""
    stamps: dict[str, list[Stamp]] = {}
    for path in [Path(folder) / FILE, *sorted(Path(folder).glob("data-*.json"))]:
        for split in (_read(path) or {"splits": {}})["splits"].values():
            for name, stamp in split["files"].items():
                stamps.setdefault(name, []).append(Stamp(*stamp))
    return stamps


def _before(
    folder: Path, checkpoints: epath.Path, log: Callable[[str], None]
) -> dict[str, Any]:
    """Returns the splits as the run last had them; {} if they are not recorded.

    Without the file of the run folder, as the newest intact checkpoint has them, which
    is the one that will be restored.
    """
    if (document := _read(Path(folder) / FILE)) is not None:
        return document["splits"]
    steps = committed_steps(checkpoints)
    for step in reversed(steps):
        try:
            return manifest.read(checkpoints, step)["data"].get("splits", {})
        except CorruptCheckpoint:
            continue  # the restore reports it and takes another one
    if steps:
        log(
            "Whether the data is that of the run so far was not checked: the run "
            f"folder has no {FILE}, and no checkpoint in {checkpoints} is intact."
        )
    return {}


def _changes(
    before: Mapping[str, Any], now: Mapping[str, Split]
) -> list[dict[str, Any]]:
    """Returns how the splits that are in both differ."""
    changes = []
    for name, split in now.items():
        old = before.get(name)
        if old is None or old["digest"] == split.digest:
            continue
        change: dict[str, Any] = {
            "split": name,
            "digest": [old["digest"][:16], split.digest[:16]],
            "examples": [old["examples"], split.examples],
        }
        if (files := old.get("files")) and split.files:
            change["files"] = {
                "added": [k for k in split.files if k not in files],
                "removed": [k for k in files if k not in split.files],
                "changed": [
                    k
                    for k, stamp in split.files.items()
                    if k in files and Stamp(*files[k]).digest != stamp.digest
                ],
            }
        changes.append(change)
    return changes


def _describe(change: Mapping[str, Any]) -> str:
    old, new = change["examples"]
    count = (
        f"{new:,} examples, as before" if old == new else f"{old:,} -> {new:,} examples"
    )
    parts = [count]
    for what, names in change.get("files", {}).items():
        if names:
            parts.append(f"{what}: {_some(names)}")
    before, now = change["digest"]
    parts.append(f"digest of the contents {before} -> {now}")
    return f"split {change['split']!r}: {'; '.join(parts)}"


def _some(names: Iterable[str]) -> str:
    names = list(names)
    rest = len(names) - MAX_NAMES
    more = f" and {rest:,} more" if rest > 0 else ""
    return ", ".join(names[:MAX_NAMES]) + more


def _refusal(folder: Path, changes: Sequence[Mapping[str, Any]]) -> str:
    lines = "\n".join(map(_describe, changes))
    return (
        f"the data is not what run folder {folder} was trained on. Restore it, choose "
        "another --workdir, or pass --insist to continue with the data as it is "
        f"now:\n{lines}"
    )
