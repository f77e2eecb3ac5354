"""`meshloom certify`: proof that a run continues exactly on other meshes.

A reference run trains without interruption and saves a checkpoint on the way. For each
mesh, a copy of its folder as of that checkpoint is resumed and trained to the end. All
runs are real `meshloom train` processes, and are judged by what they leave on disk.
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
from ...launch.atomic_file import replace_text
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
from .certify_meshes import Machine, ProcessMesh, find_machine

FILE = "certificate.json"
# Switches off what only costs time here, and keeps the checkpoint to resume from.
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
    """The reference run did not finish, so there is nothing to compare with."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Certify:
    """A certification: the config, the meshes and the tolerances.

    Attributes:
      configs: the values of --config, as for `meshloom train`.
      sets: the values of --set, as for `meshloom train`.
      meshes: the meshes to certify; the reference is trained on the first.
      workdir: a new folder for the runs.
      steps: the number of steps of every run.
      save_at: the step to resume from.
      drift: the largest relative difference allowed in a loss on another mesh.
      seconds: the time limit of a run; it is killed after that.
      log: receives one line of progress at a time.
    """

    configs: tuple[str, ...]
    sets: tuple[str, ...]
    meshes: tuple[ProcessMesh, ...]
    workdir: Path
    steps: int = 20
    save_at: int = 10
    drift: float = 1e-5
    seconds: float = 1800.0
    log: Callable[[str], None] = print

    def __post_init__(self):
        if not 1 <= self.save_at < self.steps:
            raise ValueError(
                f"--save-at {self.save_at} must be >= 1 and < --steps {self.steps}"
            )
        if not self.drift >= 0:
            raise ValueError(f"--drift must be >= 0, got {self.drift}")
        if not self.seconds > 0:
            raise ValueError(f"--run-seconds must be > 0, got {self.seconds}")
        keys = [mesh.key for mesh in self.meshes]
        for mesh in self.meshes:
            if keys.count(mesh.key) > 1:
                raise ValueError(f"mesh {mesh.text!r} is given twice; remove one")
        if self.workdir.exists() and any(self.workdir.iterdir()):
            raise ValueError(
                f"{self.workdir} is not empty. Remove it, or pass another --workdir."
            )

    @property
    def settings(self) -> tuple[str, ...]:
        """The settings that certification adds to the user's."""
        return (*SETTINGS, f"save_every={self.save_at}")

    @functools.cached_property
    def machine(self) -> Machine:
        platforms = os.environ.get("JAX_PLATFORMS", "")
        return find_machine(self.meshes, self.log, platforms)

    @property
    def reference(self) -> Path:
        return self.workdir / "reference"

    def check(self) -> Config:
        """Checks the config on every mesh, as `train --dry-run` does, and returns it.

        This process needs as many devices as the largest mesh.
        """
        sets = (*self.sets, *self.settings)
        loaded = config_files.load(self.configs, sets, root=Config)
        loaded = config_files.override(loaded, "num_steps", self.steps, "--steps")
        for mesh in self.meshes:
            # Slices are separate processes here, and this is a single process.
            spec = dataclasses.replace(mesh.spec, dcn=None)
            config = config_files.override(loaded, "mesh", spec, "--meshes").config
            try:
                prepare(config, jax.devices()[: mesh.devices])
            except ValueError as error:
                raise ValueError(f"mesh {mesh.text!r}: {error}") from error
        return loaded.config

    def run(self) -> dict[str, Any]:
        """Trains, resumes and judges; writes the certificate and returns it."""
        config = self.check()
        dtype = getattr(config.model, "compute_dtype", "float32")
        self.log(f"All runs use --set {' --set '.join(self.settings)}")
        if dtype != "float32":
            self.log(
                f"note: the model computes in {dtype}; a drift of {self.drift:g} is "
                "only guaranteed for float32"
            )
        first = self.meshes[0]
        self.log(f"reference: {first.text}, steps 1 to {self.steps} ...")
        outcome = self._train(first, self.reference)
        if outcome.reason:
            raise RunFailed(f"reference run on {first.text}: {outcome.reason}")
        if self.save_at not in committed_steps(RunFolder(self.reference).checkpoints):
            raise RunFailed(
                f"the reference run saved no checkpoint at step {self.save_at}; see "
                f"{self.reference / 'logs'}"
            )
        for row in Ledger(self.reference, is_writer=False).read():
            if row["event"] in ("restore", "rewind"):
                raise RunFailed(
                    f"the reference run went back to step {row['step']} "
                    f"({row['event']}), so it was not uninterrupted. Choose --steps "
                    "or a config for which no step fails."
                )
        results = []
        for number, mesh in enumerate(self.meshes, start=1):
            where = f"mesh {number} of {len(self.meshes)}: {mesh.text}"
            self.log(f"{where}, from step {self.save_at} to {self.steps} ...")
            name = re.sub(r"\W+", "-", mesh.text)
            folder = self.workdir / f"{number}-{name}"
            copy_at(self.reference, folder, self.save_at)
            results.append(self.resume(mesh, folder))
        document = self._document(results, config, dtype, outcome.seconds)
        replace_text(self.workdir / FILE, json.dumps(document, indent=1) + "\n")
        self.log(certificate.table(results))
        return document

    def resume(self, mesh: ProcessMesh, folder: Path) -> certificate.MeshResult:
        """Resumes the copy of the reference in `folder` on a mesh, and judges it."""
        outcome = self._train(mesh, folder)
        if outcome.reason:
            levels = certificate.failed(f"{outcome.reason} ({folder / 'logs'})")
        else:
            is_same = mesh.key == self.meshes[0].key
            levels = certificate.judge(
                self.reference,
                folder,
                save_at=self.save_at,
                steps=self.steps,
                drift=None if is_same else self.drift,
            )
        counts = (mesh.devices, mesh.processes)
        return certificate.MeshResult(mesh.text, *counts, outcome.seconds, levels)

    def _train(self, mesh: ProcessMesh, folder: Path) -> once.Outcome:
        sets = (*self.sets, *self.settings)
        command = [
            *(sys.executable, "-P", "-m", "meshloom.trainer.cli", "train"),
            *(f"--config={name}" for name in self.configs),
            *(f"--set={text}" for text in sets),
            f"--mesh={mesh.spec if mesh.devices > 1 else 'data=1'}",
            f"--steps={self.steps}",
            f"--workdir={folder}",
        ]
        envs = self.machine.environments(mesh, free_port(set()))
        outcome = once.run(command, envs, folder / "logs", seconds=self.seconds)
        if outcome.is_bad_input:
            raise ValueError(f"mesh {mesh.text!r}: {outcome.reason}")
        return outcome

    def _document(
        self,
        results: Sequence[certificate.MeshResult],
        config: Config,
        dtype: str,
        seconds: float,
    ) -> dict[str, Any]:
        ran_on = json.loads((self.reference / "environment.json").read_text())
        kept = (*PACKAGES, "meshloom", "python", "platform", "device_kind", "xla_flags")
        first = self.meshes[0]
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
            "meshes": [result.to_json() for result in results],
            "passed": all(result.passed for result in results),
        }


def copy_at(reference: Path, folder: Path, step: int) -> None:
    """Copies a run folder as of the checkpoint of `step`, without anything later.

    The run must not have gone back to an earlier step.
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
        # A step's row may follow events of later steps, so select by step, not order.
        if row.get("step", 0) <= step and row["event"] != "done"
    ]
    (folder / LEDGER).write_text("".join(kept))
