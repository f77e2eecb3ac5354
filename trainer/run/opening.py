"""Opens a run: its folder, its data and its program, in all processes or in none."""

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from etils import epath

from ..checkpoint import init_from
from ..checkpoint.manager import latest_step
from ..job import preflight
from ..job.group import Group, Report
from ..job.preflight_folders import FolderProbe
from ..program.computation import Choose
from ..record import metrics, storage
from ..record.invocation import Invocation
from ..record.run_folder import RunFolder, environment
from . import continuing, data_identity
from .prepare import Prepared, prepare

if TYPE_CHECKING:
    from .train import Config


@dataclasses.dataclass(frozen=True)
class Opened:
    """A run folder that fits the config, held by this process.

    Attributes:
      saved: the folder of its checkpoints.
      differences: how the config differs from the one it was started with, in lines.
    """

    prepared: Prepared
    folder: RunFolder
    saved: epath.Path
    differences: Sequence[str]


def open_run(
    config: "Config",
    folder: RunFolder,
    group: Group,
    invocation: Invocation,
    record: preflight.Record,
    held: contextlib.ExitStack,
    *,
    choose: Choose,
    insist: bool,
    say: Callable[[str], None],
) -> tuple[Opened, preflight.Record]:
    """Prepares the run and checks it against its folder, its data and other processes.

    All processes succeed, or all fail alike.
    """
    opened: list[Opened] = []

    def prepare_and_claim() -> Report:
        metrics.check_installed(config.writers)
        storage.check_installed(config.checkpoint_folder)
        prepared = prepare(config, choose=choose)
        saved = storage.checkpoints_of(folder.path, config.checkpoint_folder)
        differences = continuing.check(config, folder, saved, insist=insist)
        init_from.check(config.init_from, prepared.program, saved)
        if config.checkpoint_folder is not None and not insist:
            _check_owner(folder, saved)
        held.enter_context(folder.claim())
        if group.is_first and group.size > 1:
            probe.leave()
        opened.append(Opened(prepared, folder, saved, differences))
        return data_identity.view(prepared.datasets)

    with FolderProbe(_shared_folders(folder, config), group, record.mark) as probe:
        answer = group.exchange("ready", prepare_and_claim, data_identity.readers)
        (found,) = opened
        prepared = found.prepared
        identity = data_identity.establish(
            prepared.datasets,
            group,
            answer["readers"],
            folder.path,
            found.saved,
            insist=insist,
            say=say,
        )
        sizes = prepared.layout.params.mesh
        prepared = dataclasses.replace(
            prepared,
            identity=identity,
            environment=environment(sizes, group.size, invocation),
        )
        record += preflight.check_program(
            prepared.data_facts(), prepared.fingerprint(), group, probe
        )
    return dataclasses.replace(found, prepared=prepared), record


def _check_owner(folder: RunFolder, saved: epath.Path) -> None:
    """Refuses to continue another run's checkpoints in a new run folder."""
    if folder.previous_values() is None and (step := latest_step(saved)) is not None:
        raise ValueError(
            f"checkpoint_folder {saved} holds checkpoints of another run (newest step "
            f"{step}), and run folder {folder.path} is new. Choose another, or pass "
            "--insist to go on from them."
        )


def _shared_folders(folder: RunFolder, config: "Config") -> dict[str, Path]:
    """Returns the folders that all hosts must share; a bucket always is shared."""
    folders = {"run folder": folder.path}
    if config.checkpoint_folder is not None and "://" not in config.checkpoint_folder:
        folders["checkpoint_folder"] = Path(config.checkpoint_folder)
    return folders
