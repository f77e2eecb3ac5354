"""`meshloom certify`: proof that a run continues exactly on other meshes.

A reference is trained without interruption and saves on its way. For each mesh a copy
of its folder, as it stood at that save, is continued to the end. All runs are real
processes of `meshloom train`; the verdicts are taken from what they leave on disk.
"""

import dataclasses
import functools
import json
import os
import re
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax

from ...launch import once
from ...launch.target import free_port
from ..checkpoint.manager import committed_steps
from ..config import files as config_files
from ..config import tree as config_tree
from ..record import metrics
from ..record.ledger import FILE as LEDGER
from ..record.ledger import Ledger
from ..record.run_folder import CONFIG_GIN, CONFIG_JSON, PACKAGES, RunFolder
from ..run.prepare import prepare
from ..run.train import Config
from . import certificate
from .certify_meshes import Machine, Target, find_machine

FILE = "certificate.json"
# What only costs time here; the checkpoint to continue from must be kept.
SETTINGS = (
    "eval_batches=0",
    "sample_prompt=None",
    "writers=()",
    "keep_checkpoints=None",
    "checkpoint_folder=None",
    "keep_every=0",
    "keep_best=0",
)


class RunFailed(Exception):
    """The reference came to no end, so nothing can be compared with it."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Certify:
    """What is to be certified, and how.

    Attributes:
      configs, sets: as --config and --set of `meshloom train`.
      targets: the reference is trained on the first.
      drift: largest relative difference of a loss on another mesh.
      seconds: after which a run is killed.
    """

    configs: tuple[str, ...]
    sets: tuple[str, ...]
    targets: tuple[Target, ...]
    workdir: Path
    steps: int = 20
    save_at: int = 10
    drift: float = 1e-5
    seconds: float = 1800.0
    say: Callable[[str], None] = print

    def __post_init__(self):
        if not 1 <= self.save_at < self.steps:
            raise ValueError(
                f"--save-at {self.save_at} must be at least 1 and less than --steps "
                f"{self.steps}, so that steps follow"
            )
        if not self.drift >= 0:
            raise ValueError(f"--drift must not be negative, got {self.drift}")
        if not self.seconds > 0:
            raise ValueError(f"--run-seconds must be positive, got {self.seconds}")
        keys = [target.key for target in self.targets]
        for target in self.targets:
            if keys.count(target.key) > 1:
                raise ValueError(f"mesh {target.text!r} is given twice; leave one out")
        if self.workdir.exists() and any(self.workdir.iterdir()):
            raise ValueError(
                f"{self.workdir} is not empty. Remove it, or choose another --workdir."
            )

    @property
    def settings(self) -> tuple[str, ...]:
        """Our own, beside the user's."""
        return (*SETTINGS, f"save_every={self.save_at}")

    @functools.cached_property
    def machine(self) -> Machine:
        platforms = os.environ.get("JAX_PLATFORMS", "")
        return find_machine(self.targets, self.say, platforms)

    @property
    def reference(self) -> Path:
        return self.workdir / "reference"

    def check(self) -> Config:
        """The config, checked on every mesh as `train --dry-run` does.

        Needs as many devices in this process as the largest mesh.
        """
        sets = (*self.sets, *self.settings)
        loaded = config_files.load(self.configs, sets, root=Config)
        loaded = config_files.override(loaded, "num_steps", self.steps, "--steps")
        for target in self.targets:
            # Slices are processes here, which this process has no others of.
            spec = dataclasses.replace(target.spec, dcn=None)
            config = config_files.override(loaded, "mesh", spec, "--meshes").config
            try:
                prepare(config, jax.devices()[: target.devices])
            except ValueError as error:
                raise ValueError(f"mesh {target.text!r}: {error}") from error
        return loaded.config

    def run(self) -> dict[str, Any]:
        """Trains, resumes and judges; the certificate, which is written too."""
        config = self.check()
        dtype = getattr(config.model, "compute_dtype", "float32")
        self.say(f"All runs with --set {' --set '.join(self.settings)}")
        if dtype != "float32":
            self.say(
                f"note: the model computes in {dtype}; a drift of {self.drift:g} is "
                "promised for float32 only"
            )
        first = self.targets[0]
        self.say(f"reference: {first.text}, steps 1 to {self.steps} ...")
        outcome = self._train(first, self.reference)
        if outcome.reason:
            raise RunFailed(f"the reference on {first.text}: {outcome.reason}")
        if self.save_at not in committed_steps(RunFolder(self.reference).checkpoints):
            raise RunFailed(
                f"the reference saved nothing at step {self.save_at}; its log is in "
                f"{self.reference / 'logs'}"
            )
        for row in Ledger(self.reference, is_writer=False).read():
            if row["event"] in ("restore", "rewind"):
                raise RunFailed(
                    f"the reference went back to step {row['step']} ({row['event']}), "
                    "so it is not one without interruption. Choose --steps or a "
                    "config with which no step fails."
                )
        rows = []
        for number, target in enumerate(self.targets, start=1):
            where = f"mesh {number} of {len(self.targets)}: {target.text}"
            self.say(f"{where}, from step {self.save_at} to {self.steps} ...")
            name = re.sub(r"\W+", "-", target.text)
            folder = self.workdir / f"{number}-{name}"
            copy_at(self.reference, folder, self.save_at)
            rows.append(self.resume(target, folder))
        document = self._document(rows, config, dtype, outcome.seconds)
        metrics.replace_text(self.workdir / FILE, json.dumps(document, indent=1) + "\n")
        self.say(certificate.table(rows))
        return document

    def resume(self, target: Target, folder: Path) -> certificate.Row:
        """Continues the copy of the reference in `folder` to the end, and judges it."""
        outcome = self._train(target, folder)
        if outcome.reason:
            levels = certificate.failed(f"{outcome.reason} ({folder / 'logs'})")
        else:
            is_same = target.key == self.targets[0].key
            levels = certificate.judge(
                self.reference,
                folder,
                save_at=self.save_at,
                steps=self.steps,
                drift=None if is_same else self.drift,
            )
        counts = (target.devices, target.processes)
        return certificate.Row(target.text, *counts, outcome.seconds, levels)

    def _train(self, target: Target, folder: Path) -> once.Outcome:
        sets = (*self.sets, *self.settings)
        command = [
            *(sys.executable, "-P", "-m", "meshloom.trainer.cli", "train"),
            *(f"--config={name}" for name in self.configs),
            *(f"--set={text}" for text in sets),
            f"--mesh={target.spec if target.devices > 1 else 'data=1'}",
            f"--steps={self.steps}",
            f"--workdir={folder}",
        ]
        envs = self.machine.environments(target, free_port(set()))
        outcome = once.run(command, envs, folder / "logs", seconds=self.seconds)
        if outcome.is_bad_input:
            raise ValueError(f"mesh {target.text!r}: {outcome.reason}")
        return outcome

    def _document(
        self,
        rows: Sequence[certificate.Row],
        config: Config,
        dtype: str,
        seconds: float,
    ) -> dict[str, Any]:
        ran_on = json.loads((self.reference / "environment.json").read_text())
        kept = (*PACKAGES, "meshloom", "python", "platform", "device_kind", "xla_flags")
        first = self.targets[0]
        return {
            "format": 1,
            "time": time.time(),
            "versions": {name: ran_on[name] for name in kept},
            "configs": list(self.configs),
            "settings": [*self.sets, *self.settings],
            "config_digest": config_tree.digest(config),
            "compute_dtype": dtype,
            "steps": self.steps,
            "save_at": self.save_at,
            "drift": self.drift,
            "reference": {
                "mesh": first.text,
                "devices": first.devices,
                "processes": first.processes,
                "seconds": round(seconds, 1),
                "saved_state": certificate.state_at(self.reference, self.save_at),
                "final_state": certificate.state_at(self.reference, self.steps),
            },
            "meshes": [row.to_json() for row in rows],
            "passed": all(row.passed for row in rows),
        }


def copy_at(reference: Path, folder: Path, step: int) -> None:
    """A copy of a run folder as it stood when `step` was saved: nothing later.

    The run must have gone through without going back.
    """
    (folder / "checkpoints").mkdir(parents=True)
    for name in (CONFIG_JSON, CONFIG_GIN, "metrics.jsonl"):
        shutil.copy(reference / name, folder)
    metrics.FileWriter(folder).truncate_after(step)
    number = str(step)
    shutil.copytree(reference / "checkpoints" / number, folder / "checkpoints" / number)
    kept = [
        json.dumps(row) + "\n"
        for row in metrics.read(reference / LEDGER)
        # Rows of steps come later than events of the same steps, so order is no guide.
        if row.get("step", 0) <= step and row["event"] != "done"
    ]
    (folder / LEDGER).write_text("".join(kept))
