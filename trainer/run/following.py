"""Runs that follow data that grows: which files they have, and waiting for more.

When a run has used all available data, all processes wait together. Process 0 looks
for files that were added; all open them, and they become the next part of the data.
`data.json` lists the parts with their files, and is replaced before the first of their
examples is read, so a run that is killed continues with the same order.
"""

import dataclasses
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...sharding.text import counted
from ..data import Dataset, Source
from ..data.documents import Document, Split
from ..data.growth import GrowingSource, Part, growing
from ..data.split_files import some
from ..job.group import Report
from ..job.preemption import Preempted
from ..job.watchdog import ALLOW_SECONDS
from ..record import file_digests
from . import data_identity
from .held_out import with_weights
from .publishing import Arrival

if TYPE_CHECKING:
    from ..checkpoint.restore import Position
    from .run import Run
    from .train import Config

# How long process 0 looks before the processes meet again, and how often it looks.
ROUND_SECONDS, LOOK_SECONDS = 1.0, 0.1
# A file counts as complete when its size and time have not changed for so long.
SETTLE_SECONDS = 0.5
# How long another host may take to see a file that process 0 sees.
VISIBLE_SECONDS = 60.0


def check(config: "Config") -> None:
    """Raises if the settings for following and publishing cannot work."""
    if not config.follow_seconds >= 0 or not config.publish_seconds >= 0:
        raise ValueError(
            "follow_seconds and publish_seconds must be >= 0, got "
            f"{config.follow_seconds} and {config.publish_seconds}"
        )
    if config.follow and config.stop_patience:
        raise ValueError(
            f"stop_patience={config.stop_patience} would end a run that follows its "
            "data; set it to 0, or leave out --follow"
        )
    if config.follow and config.exchange.is_on:
        raise ValueError(
            "a learner cannot follow its data: the service leases it. Leave out "
            "--follow, or --exchange"
        )
    publishes = config.follow or config.publish_every or config.publish_seconds
    if publishes and config.keep_checkpoints == 1:
        raise ValueError(
            "keep_checkpoints=1 would remove published weights before newer ones are "
            "published; set it to 2 or more"
        )


class Followed:
    """A source with the files that a run has recorded, in the order they came."""

    def __init__(self, source: GrowingSource, known: dict[str, list[str]]):
        self._source, self._known = source, known

    def open(self, split: Split) -> Dataset:
        files = self._source.documents(split)
        if split in self._known:
            files = _chosen(files, self._known[split])
        return self._source.open_documents(split, files)


def _check_effect(config: "Config") -> None:
    """Raises if settings need `follow`, which the command line may set last."""
    if config.follow:
        return
    for name, default in (("follow_passes", 1), ("follow_seconds", 0.0)):
        if (value := getattr(config, name)) != default:
            raise ValueError(
                f"{name}={value} has no effect without follow; pass --follow, or "
                f"leave it at {default:g}"
            )


def source_of(config: "Config", folder: Path) -> Source:
    """Returns the source of a run, with the files that it has recorded, if any."""
    _check_effect(config)
    document = data_identity.recorded(folder)
    if not config.follow and "parts" not in document:
        return config.data
    known = {name: list(x["files"]) for name, x in document.get("splits", {}).items()}
    source = growing(config.data)
    if not config.follow:
        _check_nothing_added(source, folder, known["train"])
    return Followed(source, known)


def _check_nothing_added(
    source: GrowingSource, folder: Path, known: Sequence[str]
) -> None:
    names = {each.name for each in source.documents("train")} - set(known)
    if names:
        count = counted(len(names), "file")
        raise ValueError(
            f"the data of run folder {folder} has grown by {count}, added: "
            f"{some(sorted(names))}. Pass --follow to train on them, or remove them."
        )


def parts_of(config: "Config", folder: Path, data: Dataset) -> list[dict[str, Any]]:
    """Returns the recorded parts of the train split; [] for data that does not grow."""
    size = len(data)
    document = data_identity.recorded(folder)
    if "parts" in document:
        if (last := document["parts"][-1]["part"][2]) != size:
            raise ValueError(
                f"the data of run folder {folder} has grown to {last:,} examples, but "
                f"its files now have {size:,}. Restore them, or choose another "
                "--workdir."
            )
        return document["parts"]
    if not config.follow:
        return []
    return [{"part": [0, 0, size], "files": list(data.files())}]  # type: ignore


def _chosen(files: Sequence[Document], names: Sequence[str]) -> list[Document]:
    by_name = {each.name: each for each in files}
    if missing := [name for name in names if name not in by_name]:
        raise ValueError(
            f"follow: '{missing[0]}', which this run has been trained on, is gone. "
            "Restore it, or choose another --workdir."
        )
    return [by_name[name] for name in names]


def last_step(run: "Run", position: "Position") -> int:
    """Returns the last step that the data of a run is enough for."""
    config, part = run.prepared.config, run.prepared.parts[-1]
    end = part.start + config.follow_passes * len(part)
    last = end // config.batch_size - position.batches_ahead
    return min(config.num_steps, max(last, position.step))


def wait(run: "Run", position: "Position") -> "Run | None":
    """Waits for new data; returns the run with it, or None if it should end.

    Every process must call this, after the run has read all its data.
    """
    config, watch = run.prepared.config, _Watch(run)
    if position.step >= config.num_steps:
        return None
    path = config.data.path  # type: ignore
    line = f"step {position.step}  waiting for new data in {path}"
    run.console.print(line, markup=False)
    began, rounds = time.monotonic(), 0
    while True:
        run.watchdog.beat(allow=ALLOW_SECONDS)

        def look() -> Report:
            if not run.group.is_first:
                return {}
            found = watch.look(ROUND_SECONDS)
            waited = time.monotonic() - began
            is_over = bool(config.follow_seconds) and waited >= config.follow_seconds
            return {"files": [[x.name, x.num_bytes] for x in found], "is_over": is_over}

        answer = run.group.exchange("new data", look, lambda reports: reports[0])
        rounds += 1
        # Signals are agreed on by step, so each round counts as one.
        asked = run.should_stop is not None and run.should_stop(position.step + rounds)
        if answer["files"] and not asked:
            if run.should_stop is not None:
                run.should_stop(position.step)  # from now on by step again
            return _take_up(run, position, dict(answer["files"]))
        if asked:
            run.checkpoints.wait()
            run.ledger.event("preempted", step=position.step)
            raise Preempted(position.step)
        if answer["is_over"]:
            reason = f"no new data for {config.follow_seconds:g} s"
            run.console.print(f"Stopped at step {position.step}: {reason}")
            run.ledger.event("stopped", step=position.step, reason=reason)
            return None


class _Watch:
    """Looks for files that were added and are complete."""

    def __init__(self, run: "Run"):
        self._source = growing(run.prepared.config.data)
        self._known = [name for x in run.prepared.identity_parts for name in x["files"]]
        self._size = len(run.prepared.train_data)
        self._seen: dict[str, tuple[int, int, float]] = {}
        self._too_small: list[Document] = []

    def look(self, seconds: float) -> list[Document]:
        """Returns new files with new examples; [] if there are none for so long."""
        end = time.monotonic() + seconds
        while True:
            begin = time.monotonic()
            files = self._source.documents("train")
            found = self._settled(files)
            if found and found != self._too_small and self._adds(files, found):
                return found
            now = time.monotonic()
            if now >= end:
                return []
            # Listing a large folder must not keep the machine busy.
            time.sleep(max(LOOK_SECONDS, 4 * (now - begin)))

    def _settled(self, files: Sequence[Document]) -> list[Document]:
        known, now, seen = set(self._known), time.monotonic(), {}
        for each in files:
            if each.name not in known:
                state = each.num_bytes, each.mtime_ns
                before = self._seen.get(each.name)
                since = before[2] if before and before[:2] == state else now
                seen[each.name] = (*state, since)
        self._seen = seen
        return [
            each
            for each in files
            if each.name in seen and now - seen[each.name][2] >= SETTLE_SECONDS
        ]

    def _adds(self, files: Sequence[Document], found: list[Document]) -> bool:
        all_files = [*_chosen(files, self._known), *found]
        adds = len(self._source.open_documents("train", all_files)) > self._size
        self._too_small = [] if adds else found
        return adds


def _take_up(run: "Run", position: "Position", sizes: dict[str, int]) -> "Run":
    """Returns the run with new files as the next part of its data."""
    prepared, config = run.prepared, run.prepared.config
    assert prepared.identity is not None
    source = growing(config.data)
    known = [name for part in prepared.identity_parts for name in part["files"]]
    opened: list[Any] = []

    def open_and_read() -> Report:
        files = _visible(source, known, sizes)
        data = with_weights(config, source.open_documents("train", files))
        new = {x.name: x.path for x in files if x.name in sizes}
        stamps = file_digests.read(new, {}, lambda text: run.console.print(text))
        opened.append((data, new, stamps))
        data[len(data) - 1]  # of the form of all others, or an error
        digests = {name: stamp.digest for name, stamp in stamps.items()}
        return {"digests": digests, "examples": len(data)}

    def agree(reports: list[Report]) -> Report:
        differs = [i for i, each in enumerate(reports) if each != reports[0]]
        return {"differs": differs}

    answer = run.group.exchange("grown", open_and_read, agree)
    if answer["differs"]:
        who = run.group.describe(answer["differs"][0])
        raise ValueError(
            f"follow: {who} reads other contents of the new files than process 0. "
            "Share the folder between all hosts, and do not modify files."
        )
    ((data, new, stamps),) = opened
    last = prepared.parts[-1]
    reached = (position.step + position.batches_ahead) * config.batch_size
    start = max(last.start + config.follow_passes * len(last), reached)
    part = Part(start, len(prepared.train_data), len(data))
    identity = prepared.identity.grown(
        stamps, [part.start, part.first, part.stop], len(data), run.group
    )
    identity.write(run.folder.path, run.group.index)
    run.ledger.event(
        "grown",
        part=dataclasses.astuple(part),
        files=len(new),
        digest=identity.splits["train"].digest,
    )
    first_step = start // config.batch_size + 1 - position.batches_ahead
    came = min(os.stat(path).st_ctime for path in new.values())
    run.publisher.arrived(Arrival(len(new), came, first_step))
    run.console.print(
        f"step {position.step}  {counted(len(new), 'new file')} with {len(part):,} "
        f"examples: {some(list(new))}",
        markup=False,
    )
    grown = dataclasses.replace(
        prepared, train_data=data, identity=identity, parts=(*prepared.parts, part)
    )
    return dataclasses.replace(run, prepared=grown)


def _visible(
    source: GrowingSource,
    known: Sequence[str],
    sizes: dict[str, int],
    clock: Callable[[], float] = time.monotonic,
) -> list[Document]:
    """Returns all files in order, once this host sees the new ones too."""
    end = clock() + VISIBLE_SECONDS
    while True:
        files = source.documents("train")
        seen = {each.name: each.num_bytes for each in files}
        if all(seen.get(name) == size for name, size in sizes.items()):
            return _chosen(files, [*known, *sizes])
        if clock() >= end:
            missing = next(k for k, size in sizes.items() if seen.get(k) != size)
            raise ValueError(
                f"follow: '{missing}' is not as process 0 sees it, for "
                f"{VISIBLE_SECONDS:g} s. Share the folder between all hosts, and "
                "rename files into it when they are complete."
            )
        time.sleep(LOOK_SECONDS)
