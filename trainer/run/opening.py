"""Opens a run: its folder, its data and its program, in all processes or in none."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from etils import epath

from ..checkpoint import init_from
from ..checkpoint.manager import latest_step
from ..data.growth import Part
from ..job import joining, preflight
from ..job.group import Group, Report
from ..job.preflight_folders import FolderProbe
from ..program.computation import Choose
from ..record import metrics, storage
from ..record.invocation import Invocation
from ..record.run_folder import RunFolder, environment
from . import continuing, data_identity, following
from .prepare import Prepared, prepare

if TYPE_CHECKING:
    from .train import Config


@dataclasses.dataclass(frozen=True)
class Opened:
    """A run folder that fits the config, claimed by this process.

    Attributes:
      saved: the folder of its checkpoints.
      differences: lines about how the config differs from the one it was started with.
      record: the reports of the preflight.
    """

    prepared: Prepared
    folder: RunFolder
    saved: epath.Path
    differences: Sequence[str]
    record: preflight.Record


@contextlib.contextmanager
def open_run(
    config: "Config",
    workdir: Path,
    group: Group,
    invocation: Invocation,
    *,
    choose: Choose,
    insist: bool,
    log: Callable[[str], None],
) -> Iterator[Opened]:
    """Prepares a run, and checks it against its folder, its data and other processes.

    All processes succeed, or all fail alike. The run folder is claimed until the
    context ends.
    """
    # Before anything that could hang if processes differ.
    record = preflight.check_environment(config, group, invocation.flags)
    if group.size > 1:
        joining.connect()
    folder = RunFolder(workdir, is_writer=group.is_first)
    opened: list[Opened] = []
    parts: list[dict[str, Any]] = []

    def prepare_and_claim() -> Report:
        metrics.check_installed(config.writers)
        storage.check_installed(config.checkpoint_folder)
        source = following.source_of(config, folder.path)
        prepared = prepare(config, choose=choose, source=source)
        parts.extend(following.parts_of(config, folder.path, prepared.train_data))
        saved = storage.checkpoints_of(folder.path, config.checkpoint_folder)
        differences = continuing.check(config, folder, saved, insist=insist)
        init_from.check(config.init_from, prepared.program, saved)
        if config.checkpoint_folder is not None and not insist:
            _check_owner(folder, saved)
        claim.enter_context(folder.claim())
        if group.is_first and group.size > 1:
            probe.leave()
        opened.append(Opened(prepared, folder, saved, differences, record))
        return data_identity.view(prepared.datasets)

    with contextlib.ExitStack() as claim:
        shared = _shared_folders(folder, config)
        with FolderProbe(shared, group, record.mark) as probe:
            answer = group.exchange("ready", prepare_and_claim, data_identity.readers)
            (run,) = opened
            identity = data_identity.establish(
                run.prepared.datasets,
                group,
                answer["readers"],
                folder.path,
                run.saved,
                insist=insist,
                log=log,
            )
            facts = environment(run.prepared.layout.params.mesh, group.size, invocation)
            prepared = dataclasses.replace(
                run.prepared,
                identity=identity.with_parts(parts),
                environment=facts,
                parts=tuple(Part(*each["part"]) for each in parts),
            )
            record += preflight.check_program(
                prepared.data_facts(), prepared.fingerprint(), group, probe
            )
        yield dataclasses.replace(run, prepared=prepared, record=record)


def _check_owner(folder: RunFolder, saved: epath.Path) -> None:
    """Refuses to continue another run's checkpoints in a new run folder."""
    if folder.previous_values() is None and (step := latest_step(saved)) is not None:
        raise ValueError(
            f"checkpoint_folder {saved} holds checkpoints of another run (newest step "
            f"{step}), and run folder {folder.path} is new. Choose another, or pass "
            "--insist to continue from them."
        )


def _shared_folders(folder: RunFolder, config: "Config") -> dict[str, Path]:
    """Returns the folders that all hosts must share; a bucket always is shared."""
    folders = {"run folder": folder.path}
    if config.checkpoint_folder is not None and "://" not in config.checkpoint_folder:
        folders["checkpoint_folder"] = Path(config.checkpoint_folder)
    return folders
