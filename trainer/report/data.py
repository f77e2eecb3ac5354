"""Reads the files of a run folder for its report."""

import dataclasses
import json
import numbers
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..record import metrics
from .learners import LearnerFiles, read_learners
from .timeline_data import Timeline, read_timeline

RATE = "_per_s"  # the suffix of throughput metrics, such as tokens_per_s
# The root fields of a config that may give the length of a run.
_TOTAL_KEYS = ("num_steps", "steps")
# The keys of pipeline.json that the report needs.
_PIPELINE_KEYS = frozenset(
    """start derived name num_stages num_chunks num_microbatches bubble ratio slots
    remat gather ideal""".split()
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunFiles:
    """The contents of a run folder; None or empty where a file is missing.

    Attributes:
      learners: of a training between learners, whose steps are commits.
      is_final: whether such a training is done.
    """

    name: str
    train: list[dict[str, Any]]
    evals: list[dict[str, Any]]
    tests: list[dict[str, Any]]
    config: dict[str, Any] | None
    gin: str | None
    environment: dict[str, Any] | None
    sharding: dict[str, Any] | None
    pipeline: dict[str, Any] | None
    forecast: dict[str, Any] | None
    sample: str | None
    mistakes: dict[str, Any] | None = None
    stopped: str | None = None  # why the run ended before its last step
    learners: tuple[LearnerFiles, ...] = ()
    is_final: bool = False
    timeline: Timeline | None = None

    @property
    def last_step(self) -> int:
        return max((row["step"] for row in self.train), default=0)

    @property
    def total_steps(self) -> int | None:
        if self.learners:
            return self.last_step if self.is_final else None
        for key in _TOTAL_KEYS:
            value = self.config_value(key)
            if isinstance(value, int):
                return value
        return None

    def config_value(self, path: str) -> Any:
        """Returns a value of the config, or None if the config has no such field."""
        values = (self.config or {}).get("values", {})
        return values.get(path, {}).get("value")

    @property
    def missing(self) -> list[str]:
        """Descriptions of the files that the folder does not contain."""
        parts = {
            "evaluation (eval.jsonl)": self.evals,
            "sample (sample.txt)": self.sample,
            "configuration (config.json)": self.config,
            "sharding (sharding.json)": self.sharding,
            "environment (environment.json)": self.environment,
            "forecast (forecast.json)": self.forecast,
        }
        if self.learners:  # each has its own, in its folder
            del parts["sharding (sharding.json)"], parts["forecast (forecast.json)"]
            del parts["sample (sample.txt)"]
        return [name for name, content in parts.items() if not content]

    @property
    def is_complete(self) -> bool:
        if self.stopped is not None:
            return True
        return self.total_steps is not None and self.last_step >= self.total_steps


def read_run(folder: Path) -> RunFiles:
    """Reads a run folder; only metrics.jsonl is required."""
    folder = Path(folder)
    if not folder.is_dir():
        raise ValueError(
            f"run folder {folder} does not exist; pass the --workdir of a "
            "`meshloom train` run"
        )
    path = folder / metrics.FILES["train"]
    if not path.is_file():
        raise ValueError(
            f"run folder {folder} has no {path.name}, so no step was recorded; "
            f"train first: meshloom train --workdir {folder}"
        )
    learners = read_learners(folder)
    # All learners have the config of the first, but for their place.
    first = folder / "learners" / learners[0].name if learners else folder
    others = {kind: folder / metrics.FILES[kind] for kind in ("eval", "test")}
    scores = {k: _rows(file) if file.is_file() else [] for k, file in others.items()}
    return RunFiles(
        name=folder.resolve().name,
        train=_rows(path),
        evals=scores["eval"],
        tests=scores["test"],
        config=_read_json(first / "config.json"),
        gin=_read_text(first / "config.gin"),
        environment=_read_json(first / "environment.json"),
        sharding=_read_json(folder / "sharding.json"),
        pipeline=_read_pipeline(folder / "pipeline.json"),
        forecast=_read_forecast(folder / "forecast.json"),
        sample=_read_text(folder / "sample.txt"),
        mistakes=_read_mistakes(folder / "mistakes.json"),
        stopped=_stopped(folder),
        learners=learners,
        is_final=(folder / "final.json").is_file(),
        timeline=read_timeline(folder, [learner.name for learner in learners]),
    )


def _stopped(folder: Path) -> str | None:
    """Returns why the run ended early; None if it did not, or has continued since."""
    if (final := _read_json(folder / "final.json")) is not None:
        return final.get("stopped")  # of a training between learners
    path = folder / "ledger.jsonl"
    rows = metrics.read(path) if path.is_file() else []
    told = (row for row in reversed(rows) if row["event"] in ("step", "stopped"))
    return next(told, {}).get("reason")


def columns(
    rows: Sequence[dict[str, Any]],
) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Returns (steps, values) of each numeric metric, in order of appearance."""
    found: dict[str, tuple[list[int], list[float]]] = {}
    for row in rows:
        for name, value in row.items():
            if name in ("step", "time") or isinstance(value, bool):
                continue
            if isinstance(value, numbers.Real):
                steps, values = found.setdefault(name, ([], []))
                steps.append(row["step"])
                values.append(float(value))
    return {name: (np.array(s), np.array(v)) for name, (s, v) in found.items()}


def training_seconds(rows: Sequence[dict[str, Any]]) -> float | None:
    """Returns the time from the first to the last row, excluding interruptions.

    A gap counts as an interruption if it is longer than a minute and than twenty
    times the median gap: the run was stopped and resumed later.
    """
    times = np.array([row["time"] for row in rows if "time" in row], dtype=float)
    waits = np.diff(times)
    waits = waits[waits > 0]
    if len(waits) == 0:
        return None
    limit = max(60.0, 20 * float(np.median(waits)))
    return float(waits[waits <= limit].sum())


def _rows(path: Path) -> list[dict[str, Any]]:
    rows = metrics.read(path)
    for number, row in enumerate(rows, start=1):
        if not isinstance(row.get("step"), int):
            raise ValueError(
                f"{path}:{number}: `step` is missing or not an integer; "
                "fix or remove the line"
            )
    return rows


def _read_pipeline(path: Path) -> dict[str, Any] | None:
    content = _read_json(path)
    if content is not None and (missing := _PIPELINE_KEYS - content.keys()):
        raise ValueError(
            f"{path}: missing {', '.join(sorted(missing))}; restore or remove the file"
        )
    return content


def _read_forecast(path: Path) -> dict[str, Any] | None:
    content = _read_json(path)
    wanted = {"start", "reason"}
    if content is not None and "reason" not in content:
        wanted = {"start", "plan", "seconds"}
    if content is not None and (missing := wanted - content.keys()):
        raise ValueError(
            f"{path}: missing {', '.join(sorted(missing))}; restore or remove the file"
        )
    return content


def _read_mistakes(path: Path) -> dict[str, Any] | None:
    content = _read_json(path)
    wanted = {"split", "step", "examples", "mistakes", "worst"}
    if content is not None and (missing := wanted - content.keys()):
        raise ValueError(
            f"{path}: missing {', '.join(sorted(missing))}; restore or remove the file"
        )
    return content


def _read_text(path: Path) -> str | None:
    return path.read_text("utf-8", errors="replace") if path.is_file() else None


def _read_json(path: Path) -> dict[str, Any] | None:
    if not path.is_file():
        return None
    try:
        content = json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise ValueError(
            f"{path}: invalid JSON ({error}); restore or remove the file"
        ) from error
    if not isinstance(content, dict):
        raise ValueError(
            f"{path}: expected a JSON object, got {type(content).__name__}; "
            "restore or remove the file"
        )
    return content
