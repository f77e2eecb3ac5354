"""The search space of `meshloom tune`: which settings vary, and in what range.

A space is a gin file in which every value says what to try. A dict with `low` and
`high` is a range, a list is a choice:

    schedule.value = {"low": 1e-4, "high": 1e-1, "log": True}
    model.widths = [(8, 16), (16, 32)]
    optimizer = [@optimizers.AdamW(), @optimizers.Muon()]

The names and values are those of `--set`.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, Protocol

from ..config import files as config_files
from ..config.bindings import ConfigError, nearest


class Suggests(Protocol):
    """The part of an Optuna trial that picks values."""

    def suggest_int(
        self, name: str, low: int, high: int, *, step: int = 1, log: bool = False
    ) -> int: ...

    def suggest_float(
        self,
        name: str,
        low: float,
        high: float,
        *,
        step: float | None = None,
        log: bool = False,
    ) -> float: ...

    def suggest_categorical(self, name: str, choices: Sequence[str]) -> Any: ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class Range:
    """Numbers from `low` to `high`, both included; whole ones if all given are."""

    low: float
    high: float
    step: float | None = None
    log: bool = False

    def __post_init__(self):
        for name in ("low", "high", "step"):
            value = getattr(self, name)
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if not (name == "step" and value is None) and not (
                is_number and math.isfinite(value)
            ):
                raise ValueError(f"{name} is {value!r}, expected a number")
        if not self.low < self.high:
            raise ValueError(f"low is {self.low:g}, expected less than {self.high:g}")
        if not isinstance(self.log, bool):
            raise ValueError(f"log is {self.log!r}, expected True or False")
        if self.log and self.low <= 0:
            raise ValueError(f"low is {self.low:g}, expected > 0 for a log scale")
        if self.log and self.step is not None:
            raise ValueError("step and log exclude each other; remove one of them")
        if self.step is not None and not 0 < self.step <= self.high - self.low:
            raise ValueError(f"step is {self.step:g}, expected at most high - low")

    @property
    def is_whole(self) -> bool:
        given = (self.low, self.high, *((self.step,) if self.step is not None else ()))
        return all(isinstance(value, int) for value in given)

    def extremes(self) -> list[str]:
        return [repr(self.low), repr(self.high)]

    def suggest(self, trial: Suggests, name: str) -> str:
        """Returns a value as the text of a setting."""
        if not self.is_whole:
            value = trial.suggest_float(
                name, self.low, self.high, step=self.step, log=self.log
            )
            return repr(float(value))
        step = 1 if self.step is None else int(self.step)
        whole = trial.suggest_int(
            name, int(self.low), int(self.high), step=step, log=self.log
        )
        return repr(int(whole))


@dataclasses.dataclass(frozen=True)
class Choice:
    """One of these values, each as the text of a setting."""

    texts: tuple[str, ...]

    def extremes(self) -> list[str]:
        return list(self.texts)

    def suggest(self, trial: Suggests, name: str) -> str:
        return str(trial.suggest_categorical(name, self.texts))


@dataclasses.dataclass(frozen=True)
class Dimension:
    """One setting that varies; `where` is its place in the file."""

    name: str
    values: Range | Choice
    where: str


@dataclasses.dataclass(frozen=True)
class Space:
    """All settings that vary, in the order of the file."""

    dimensions: tuple[Dimension, ...]

    def suggest(self, trial: Suggests) -> dict[str, str]:
        """Returns {name: value as text} for a trial."""
        return {d.name: d.values.suggest(trial, d.name) for d in self.dimensions}

    def check(self, configs: Sequence[str], sets: Sequence[str], root: type) -> None:
        """Raises for a setting that the config does not take, before anything runs.

        Every choice and both ends of a range are tried, one setting at a time.
        """
        fixed = {text.partition("=")[0].strip(): text for text in sets}
        for dimension in self.dimensions:
            name, where = dimension.name, dimension.where
            if name in fixed:
                raise ConfigError(
                    f"{where}: --set {fixed[name]} fixes {name}, which the space "
                    "varies; remove one of them"
                )
            for text in dimension.values.extremes():
                try:
                    config_files.load(configs, [*sets, f"{name}={text}"], root=root)
                except ValueError as error:
                    raise ConfigError(f"{where}: {error}") from error


def read(path: str) -> Space:
    """Reads a space from a file."""
    dimensions: dict[str, Dimension] = {}
    for name, value, where in config_files.read_values(path):
        if name in dimensions:
            first = dimensions[name].where
            raise ConfigError(f"{where}: {name} is also set in {first}; remove one")
        dimensions[name] = Dimension(name, _values(name, value, where), where)
    if not dimensions:
        raise ConfigError(
            f"{path} sets nothing; expected lines such as "
            'schedule.value = {"low": 1e-4, "high": 1e-1, "log": True}'
        )
    return Space(tuple(dimensions.values()))


def _values(name: str, value: Any, where: str) -> Range | Choice:
    if isinstance(value, list | tuple):
        texts = tuple(dict.fromkeys(config_files.value_text(item) for item in value))
        if len(texts) < 2:
            raise ConfigError(
                f"{where}: {name} has {len(texts)} choices, expected at least 2; a "
                "fixed value belongs in the config or in --set"
            )
        return Choice(texts)
    if not isinstance(value, dict):
        raise ConfigError(
            f"{where}: {name} is {config_files.value_text(value)}, expected a list of "
            'choices or a range such as {"low": 1, "high": 8}'
        )
    fields = [field.name for field in dataclasses.fields(Range)]
    for key in value:
        if key not in fields:
            tail = nearest(str(key), fields)
            raise ConfigError(f"{where}: a range has no {key!r}; {tail}")
    if missing := [key for key in ("low", "high") if key not in value]:
        raise ConfigError(f"{where}: the range of {name} has no {missing[0]!r}; add it")
    try:
        return Range(**value)
    except ValueError as error:
        raise ConfigError(f"{where}: {name}: {error}") from error
