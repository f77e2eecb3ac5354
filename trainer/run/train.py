"""Training, from a config to a trained state, in the order things come to exist."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import jax
from rich.console import Console

from ..checkpoint.manager import Checkpoints
from ..checkpoint.restore import Position
from ..config import tree as config_tree
from ..job import joining, network_probe, preflight
from ..job.group import Group
from ..job.watchdog import ALLOW_SECONDS, Watchdog
from ..program.computation import Choose, Computation, check_minimum, choose_plain
from ..program.executables import Executables
from ..program.state import State
from ..record import metrics, storage
from ..record.invocation import Invocation
from ..record.ledger import Ledger
from ..record.phases import Phases
from ..record.run_folder import RunFolder
from . import loop
from .finish import Observer, finish
from .opening import Opened, open_run
from .prepare import Prepared
from .run import Run


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(Computation):
    """Everything that defines a run: its computation, and how it is run.

    Attributes:
      rewind_after: so many failed steps in a row make the run go back to its last good
        checkpoint and pass over the data since.
      max_rewinds: so often in a row, without a new checkpoint between.
      stall_seconds: without a finished step, after which this process writes stacks
        and ends; None for 60, or ten times the median if that is more; 0 for never.
      init_from: a run folder, or the folder of one step of it, whose parameters the run
        begins with; used only where it has no checkpoint of its own.
      eval_every: steps between evaluations, one more at the end; 0 only there.
      eval_batches: batches of the held-out split in each evaluation; None for all of
        it, 0 for none.
      test_batches: the same of the test split, once, after the last step.
      save_every: steps between checkpoints, one more at the end; 0 only there.
      checkpoint_folder: where checkpoints are saved, a folder with its whole path or
        gs://BUCKET/...; None takes `checkpoints` in the run folder.
      keep_checkpoints: how many of the newest are kept; None keeps all.
      keep_every: steps that are multiples of it are kept too; 0 for none.
      keep_best: how many with the lowest held-out loss are kept too, of those saved at
        a step with an evaluation.
      check_replicas_every: steps between checks that copies of arrays on several
        devices are equal, one more at the end; 0 for none.
      writers: any of "tensorboard", "wandb", beside metrics.jsonl.
      probe_network: measure how fast each axis of the mesh is, before training; None
        does where there are several processes.
      sample_prompt: text to continue after training, where the model can generate.
    """

    rewind_after: int = 10
    max_rewinds: int = 2
    stall_seconds: float | None = None
    init_from: str | None = None
    log_every: int = 10
    eval_every: int = 100
    eval_batches: int | None = 16
    test_batches: int | None = 0
    save_every: int = 100
    checkpoint_folder: str | None = None
    keep_checkpoints: int | None = 3
    keep_every: int = 0
    keep_best: int = 0
    check_replicas_every: int = 100
    writers: tuple[str, ...] = ()
    probe_network: bool | None = None
    sample_prompt: str | None = None
    sample_tokens: int = 256

    def __post_init__(self):
        super().__post_init__()
        check_minimum(self, 1, "log_every", "sample_tokens", "keep_checkpoints")
        check_minimum(self, 1, "rewind_after")
        # 0 steps or batches mean never.
        check_minimum(
            self, 0, "eval_every", "eval_batches", "save_every", "max_rewinds"
        )
        check_minimum(self, 0, "test_batches", "keep_every", "keep_best")
        check_minimum(self, 0, "check_replicas_every")
        if self.stall_seconds is not None and not self.stall_seconds >= 0:
            raise ValueError(
                f"stall_seconds must not be negative, got {self.stall_seconds}; 0 "
                "never ends a process that is stuck"
            )
        if self.keep_best and self.eval_batches == 0:
            raise ValueError(
                f"keep_best is {self.keep_best}, but with eval_batches=0 there is no "
                "held-out loss to choose by. Set eval_batches, or keep_best=0."
            )
        if self.keep_checkpoints is None and (self.keep_every or self.keep_best):
            raise ValueError(
                "keep_every and keep_best have no effect: keep_checkpoints=None keeps "
                "all. Set keep_checkpoints to a number, or leave them at 0."
            )
        storage.check(self.checkpoint_folder)
        if unknown := set(self.writers) - set(metrics.EXTRAS):
            raise ValueError(
                f"writers: {sorted(unknown)[0]!r} is unknown; there are 'tensorboard' "
                "and 'wandb'"
            )


def train(
    config: Config,
    *,
    workdir: Path,
    origins: Mapping[str, str] | None = None,
    config_text: str = "",
    insist: bool = False,
    group: Group | None = None,
    invocation: Invocation | None = None,
    console: Console | None = None,
    hooks: Iterable[loop.Hook] = (),
    should_leave: Callable[[int], bool] | None = None,
    phases: Phases | None = None,
    choose: Choose = choose_plain,
    observer: Observer | None = None,
) -> State:
    """Trains to config.num_steps in `workdir`, from its newest checkpoint if any.

    Every process of the group must call this.

    Args:
      origins, config_text: where the config's values came from, for the run folder.
      insist: continue a folder that was started with another config or other data.
      group: the processes that train together; by default all that jax knows.
      invocation: how this process was started, for the record.
      hooks: called beside the built-in ones.
      should_leave: asked after each step; if true, the run saves and raises
        preemption.Preempted. It must be true at the same step in all processes.
      phases: the start of this process, to be continued.
      choose: fills in what the config leaves open; `meshloom train` compares plans.
      observer: told about the run, in the first process only.
    """
    group = group or Group.of_jax()
    invocation = invocation or Invocation()
    if console is None:
        console = Console(quiet=not group.is_first, highlight=False, soft_wrap=True)
    phases = phases or Phases(invocation.attempt)
    # Before anything that could hang if processes differ.
    record = preflight.check_environment(config, group, invocation.flags)
    if group.size > 1:
        joining.connect()
    with contextlib.ExitStack() as held:
        opened, record = open_run(
            config,
            RunFolder(workdir, is_writer=group.is_first),
            group,
            invocation,
            record,
            held,
            choose=choose,
            insist=insist,
            say=console.print,
        )
        prepared, folder = opened.prepared, opened.folder
        _announce(opened, console)
        ledger = Ledger(folder.path, is_writer=folder.is_writer)
        watchdog = held.enter_context(
            Watchdog(
                folder.path,
                group,
                stall_seconds=config.stall_seconds,
                report_to=invocation.progress_file,
                end=invocation.end,
            )
        )
        checkpoints = Checkpoints(
            opened.saved,
            group,
            keep=config.keep_checkpoints,
            keep_every=config.keep_every,
            keep_best=config.keep_best,
            event=ledger.event,
        )
        run = Run(
            prepared,
            group,
            invocation,
            folder,
            checkpoints,
            ledger,
            watchdog,
            console,
            hooks,
            should_leave,
            phases,
            _executables(group, invocation, folder, console),
        )
        phases.reached("ready")
        observer = observer if group.is_first else None
        try:
            position = _begin(run, record, origins or {}, config_text)
            state = position.state
            if config.probe_network or (
                config.probe_network is None and group.size > 1
            ):
                network_probe.run(prepared.mesh, group, folder, record.hosts, console)
            if position.step >= config.num_steps:
                console.print(f"This run is complete at step {position.step}.")
            else:
                if position.step:
                    console.print(f"Resuming from step {position.step}")
                _write_pipeline(prepared, folder, position.step)
                if observer is not None:
                    hosts = record.hosts
                    line = observer.begins(prepared, folder, position.step, hosts)
                    console.print(line, markup=False)
                state = run.train(position)
        finally:
            checkpoints.close()
        ledger.event("done", step=int(state.step))
        watchdog.beat(allow=ALLOW_SECONDS)
        finish(prepared, folder, state, observer, ledger, console)
        group.wait("done")
        return state


def _executables(
    group: Group, invocation: Invocation, folder: RunFolder, console: Console
) -> Executables:
    """Keeps compiled programs in the run folder if jax's own cache does not help."""
    is_served = group.size == 1 or jax.default_backend() != "cpu"
    return Executables(
        None if is_served else folder.path,
        lambda text: console.print(text, markup=False),
        process=(group.index, group.size),
        flags=invocation.flags,
    )


def _announce(opened: Opened, console: Console) -> None:
    prepared = opened.prepared
    console.print(f"Run folder {opened.folder.path}")
    for line in (*prepared.describe(), *opened.differences):
        console.print(line, markup=False)
    if prepared.identity is not None and prepared.identity.changes:
        words = prepared.identity.words()
        console.print(f"Continued with other data:\n{words}", markup=False)


def _begin(
    run: Run,
    record: preflight.Record,
    origins: Mapping[str, str],
    config_text: str,
) -> Position:
    """Restores or starts from scratch, and writes what the run is now.

    Nothing in the run folder changes before this attempt has restored.
    """
    prepared, folder, ledger = run.prepared, run.folder, run.ledger
    with ledger.held():
        if record.processes:
            hosts, seconds = record.hosts, record.seconds
            ledger.event("preflight", hosts=hosts, seconds=seconds)
        position = run.begin()
        folder.write_config(config_tree.to_json(prepared.config, origins), config_text)
        assert prepared.identity is not None
        prepared.identity.write(folder.path, run.group.index)
    folder.write_json("environment.json", prepared.environment)
    folder.write_json("sharding.json", prepared.layout.params.to_json())
    _write_preflight(record, folder)
    return position


def _write_preflight(record: preflight.Record, folder: RunFolder) -> None:
    if record.processes:
        folder.write_json(preflight.FILE, record.to_json())
    else:
        folder.remove(preflight.FILE)


def _write_pipeline(prepared: Prepared, folder: RunFolder, start: int) -> None:
    """Writes the schedule if steps follow; a complete run keeps the one it had."""
    if prepared.staging is None:
        folder.remove("pipeline.json")
    else:
        folder.write_json("pipeline.json", prepared.staging.to_json(start))
