"""The record of a search: Optuna's study, and what it was started with.

Optuna's storage holds every trial: its values, its evaluations, how it ended. What a
killed search had started is found there as running, and is continued.
"""

import dataclasses
import json
from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
import optuna

from .space import Space

STUDY = "meshloom"
SAMPLERS = ("tpe", "random", "gp", "cmaes")
PRUNERS = ("median", "hyperband", "none")
# Trials that end without being stopped early, before others are compared with them.
FIRST_TRIALS = 5
SETTINGS = "settings"  # of a trial: {name: value as text}
REASON = "reason"  # why a trial ended early or failed
SECONDS = "seconds"  # that a trial ran, over all attempts
DEFINITION = "definition"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Definition:
    """What a search optimizes; the same for all of its trials.

    Attributes:
      config: digest of the config that the trials start from.
      space: {setting: what is tried}.
      metric: the held-out metric, as named in eval.jsonl.
      direction: minimize or maximize.
    """

    config: str
    space: Mapping[str, str]
    metric: str
    direction: Literal["minimize", "maximize"]
    sampler: str
    pruner: str
    seed: int

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def open_study(storage: str, definition: Definition) -> optuna.Study:
    """Creates the study in a database, or continues it.

    Raises:
      ValueError: The study there was started with another definition.
    """
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    try:
        study = optuna.create_study(
            storage=storage,
            study_name=STUDY,
            direction=definition.direction,
            pruner=_pruner(definition.pruner),
            load_if_exists=True,
        )
    except Exception as error:
        if not type(error).__module__.startswith(("sqlalchemy", "optuna")):
            raise
        line = str(error).splitlines()[0]
        raise ValueError(f"--storage {storage} cannot be opened: {line}") from error
    now, before = definition.to_json(), study.user_attrs.get(DEFINITION)
    if before is None:
        study.set_user_attr(DEFINITION, now)
    else:
        names = {"config": "the config", "space": "the search space"}
        for name, value in now.items():
            if before.get(name) != value:
                what = names.get(name, f"--{name}")
                old, new = _short(before.get(name)), _short(value)
                raise ValueError(
                    f"{storage} was started with another value of {what} ({old}, now "
                    f"{new}); its trials cannot be compared with new ones. Choose "
                    "another --workdir"
                )
    return study


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def next_trial(
    study: optuna.Study, space: Space, definition: Definition
) -> optuna.Trial:
    """Starts a trial; its values follow from the seed, its number and the history."""
    number = len(study.get_trials(deepcopy=False))
    study.sampler = _sampler(definition, number)
    return _with_settings(study.ask(), space)


def running(
    study: optuna.Study, space: Space, definition: Definition
) -> list[optuna.Trial]:
    """Returns the trials that an ended search left running, with all their values."""
    found = []
    for frozen in study.get_trials(deepcopy=False):
        if frozen.state == optuna.trial.TrialState.RUNNING:
            # If it was killed between two values, the rest are picked now.
            study.sampler = _sampler(definition, frozen.number)
            found.append(_with_settings(_reopened(study, frozen), space))
    return found


def _reopened(study: optuna.Study, frozen: optuna.trial.FrozenTrial) -> optuna.Trial:
    """Returns a running trial that another process has started.

    Optuna has no public name for its id; a test of ours fails if that changes.
    """
    return optuna.Trial(study, frozen._trial_id)


def _with_settings(trial: optuna.Trial, space: Space) -> optuna.Trial:
    settings = space.suggest(trial)
    if SETTINGS not in trial.user_attrs:
        trial.set_user_attr(SETTINGS, settings)
    return trial


def _sampler(definition: Definition, number: int) -> optuna.samplers.BaseSampler:
    seed = int(np.random.SeedSequence([definition.seed, number]).generate_state(1)[0])
    if definition.sampler == "random":
        return optuna.samplers.RandomSampler(seed=seed)
    if definition.sampler == "gp":
        return optuna.samplers.GPSampler(seed=seed)
    if definition.sampler == "cmaes":
        return optuna.samplers.CmaEsSampler(seed=seed)
    return optuna.samplers.TPESampler(seed=seed)


def _pruner(name: str) -> optuna.pruners.BasePruner:
    if name == "none":
        return optuna.pruners.NopPruner()
    if name == "hyperband":
        return optuna.pruners.HyperbandPruner()
    return optuna.pruners.MedianPruner(n_startup_trials=FIRST_TRIALS)


def best(study: optuna.Study) -> optuna.trial.FrozenTrial | None:
    """Returns the best finished trial, None if there is none."""
    done = study.get_trials(states=(optuna.trial.TrialState.COMPLETE,))
    return study.best_trial if done else None
