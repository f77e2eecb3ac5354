"""Trains a model: from a config to a trained state, in the order things are created."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import jax
from rich.console import Console

from ...service.rounds.plateau import StopRule
from ..checkpoint.manager import Checkpoints
from ..checkpoint.restore import Position
from ..config import tree as config_tree
from ..job import network_probe, preflight
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
from . import early_stop, following, loop
from . import exchange as exchange_lib
from .finish import Observer, finish
from .opening import Opened, open_run
from .prepare import Prepared
from .publishing import Publisher
from .run import Run

if TYPE_CHECKING:
    from .learner import Learner


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(Computation):
    """Everything that defines a run: its computation, and how it is run.

    Attributes:
      rewind_after: after this many failed steps in a row the run rewinds to its last
        good checkpoint and skips the data since.
      max_rewinds: how often it may rewind in a row, without a new checkpoint.
      stall_seconds: after this long without a finished step, this process writes its
        stacks and exits; None for 60, or ten times the median between two reports if
        that is more; 0 for never.
      init_from: a run folder, or the folder of one of its steps, whose parameters the
        run starts with; ignored once the run has a checkpoint of its own.
      log_every: steps between updates of the log and of metrics.jsonl.
      eval_every: steps between evaluations, besides the one at the end; 0 for only
        that one.
      eval_batches: batches of the held-out split in each evaluation; None for all of
        it, 0 for none.
      test_batches: the same for the test split, evaluated once, after the last step.
      stop_patience: the run ends after this many evaluations in a row in which the
        held-out loss did not fall; 0 for only after num_steps. Learners of one job end
        together, by the evaluations of learner 0.
      stop_min_change: by how much the loss must fall to count as lower.
      save_every: steps between checkpoints, besides the one at the end; 0 for only
        that one.
      checkpoint_folder: where checkpoints are saved, an absolute path or
        gs://BUCKET/...; None for `checkpoints` in the run folder.
      keep_checkpoints: how many of the newest are kept; None keeps all.
      keep_every: steps that are multiples of it are kept too; 0 for none.
      keep_best: how many with the lowest held-out loss are kept too, among those saved
        at a step with an evaluation.
      check_replicas_every: steps between checks that replicas of arrays on several
        devices are equal, besides the one at the end; 0 for none.
      writers: any of "tensorboard", "wandb", in addition to metrics.jsonl.
      probe_network: measure how fast each axis of the mesh is before training; None
        for only with several processes.
      sample_prompt: text to continue after training, if the model can generate.
      sample_tokens: how many tokens to generate.
      follow: whether to wait for new files once all data was read and to continue with
        them, instead of reading it again.
      follow_passes: how often each part of such data is read.
      follow_seconds: the run ends after so long without new data; 0 for never.
      publish_every: steps between checkpoints that are saved in order to publish
        weights; 0 for only those of save_every. Each commit is published.
      publish_seconds: the same by time, looked at every log_every steps.
      exchange: trains as one of several learners, see run/exchange.py.
    """

    rewind_after: int = 10
    max_rewinds: int = 2
    stall_seconds: float | None = None
    init_from: str | None = None
    log_every: int = 10
    eval_every: int = 100
    eval_batches: int | None = 16
    test_batches: int | None = 0
    stop_patience: int = 0
    stop_min_change: float = 0.0
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
    follow: bool = False
    follow_passes: int = 1
    follow_seconds: float = 0.0
    publish_every: int = 0
    publish_seconds: float = 0.0
    exchange: exchange_lib.Config = exchange_lib.Config()

    @property
    def stop_rule(self) -> StopRule | None:
        """When to end before num_steps; None for never."""
        if not self.stop_patience:
            return None
        return StopRule(self.stop_patience, self.stop_min_change)

    def __post_init__(self):
        super().__post_init__()
        self.exchange.share.size(self.batch_size)
        check_minimum(self, 1, "log_every", "sample_tokens", "keep_checkpoints")
        check_minimum(self, 1, "rewind_after")
        # For these, 0 means never.
        check_minimum(
            self, 0, "eval_every", "eval_batches", "save_every", "max_rewinds"
        )
        check_minimum(self, 0, "test_batches", "keep_every", "keep_best")
        check_minimum(self, 0, "check_replicas_every")
        if self.stall_seconds is not None and not self.stall_seconds >= 0:
            raise ValueError(
                f"stall_seconds must be >= 0, got {self.stall_seconds}; 0 never ends "
                "a process that is stuck"
            )
        early_stop.check(self)
        check_minimum(self, 1, "follow_passes")
        check_minimum(self, 0, "publish_every")
        following.check(self)
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
                f"writers: {sorted(unknown)[0]!r} is not a writer; expected "
                "'tensorboard' or 'wandb'"
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
    should_stop: Callable[[int], bool] | None = None,
    phases: Phases | None = None,
    choose: Choose = choose_plain,
    observer: Observer | None = None,
) -> State:
    """Trains to config.num_steps in `workdir`, from its newest checkpoint if any.

    Every process of the group must call this.

    Args:
      origins, config_text: where the values of the config came from, and its text; for
        the run folder.
      insist: continue a folder that was started with another config or other data.
      group: the processes that train together; by default all that jax knows.
      invocation: how this process was started, for the record.
      hooks: called after the built-in ones.
      should_stop: called after each step; if true, the run saves and raises
        preemption.Preempted. It must be true at the same step in all processes.
      phases: how this process has started up so far.
      choose: fills in what the config leaves open; `meshloom train` compares plans.
      observer: called in the first process only.
    """
    group = group or Group.of_jax()
    invocation = invocation or Invocation()
    if console is None:
        console = Console(quiet=not group.is_first, highlight=False, soft_wrap=True)
    phases = phases or Phases(invocation.attempt)
    opening = open_run(
        config,
        workdir,
        group,
        invocation,
        choose=choose,
        insist=insist,
        log=console.print,
    )
    with opening as opened, _watchdog(opened, group, invocation) as watchdog:
        _announce(opened, console)
        ledger = Ledger(opened.folder.path, is_writer=group.is_first)
        publisher = Publisher(ledger, group, _where(opened), console.print)
        run = Run(
            prepared=opened.prepared,
            group=group,
            invocation=invocation,
            folder=opened.folder,
            checkpoints=_checkpoints(opened, group, publisher),
            publisher=publisher,
            ledger=ledger,
            watchdog=watchdog,
            console=console,
            hooks=hooks,
            should_stop=should_stop,
            phases=phases,
            executables=_executables(group, invocation, opened.folder, console),
            learner=_learner(opened, group, ledger, watchdog, console),
        )
        phases.reached("ready")
        observer = observer if group.is_first else None
        with _closing(run):
            position = _begin(run, opened.record, origins or {}, config_text)
            state = _train(run, position, opened.record.hosts, observer)
        ledger.event("done", step=int(state.step))
        watchdog.beat(allow=ALLOW_SECONDS)
        finish(run, state, observer)
        group.wait("done")
        return state


def _watchdog(opened: Opened, group: Group, invocation: Invocation) -> Watchdog:
    return Watchdog(
        opened.folder.path,
        group,
        stall_seconds=opened.prepared.config.stall_seconds,
        report_to=invocation.progress_file,
        end=invocation.end,
    )


def _where(opened: Opened) -> str:
    """Returns the folder of the checkpoints, relative to a run folder that has it."""
    own = str(opened.folder.path.absolute())
    return str(opened.saved).removeprefix(f"{own}/")


def _checkpoints(opened: Opened, group: Group, publisher: Publisher) -> Checkpoints:
    config = opened.prepared.config
    return Checkpoints(
        opened.saved,
        group,
        keep=config.keep_checkpoints,
        keep_every=config.keep_every,
        keep_best=config.keep_best,
        event=publisher.event,
    )


def _learner(
    opened: Opened, group: Group, ledger: Ledger, watchdog: Watchdog, console: Console
) -> "Learner | None":
    """Returns the learner that this run is; None if it trains alone."""
    if not opened.prepared.config.exchange.is_on:
        return None

    from .learner import Learner  # gRPC, which most runs do not need

    def on_wait() -> None:
        watchdog.beat(allow=ALLOW_SECONDS)

    owner = str(opened.folder.path.absolute())
    learner = Learner(opened.prepared, group, ledger, owner=owner, on_wait=on_wait)
    console.print(learner.describe(), markup=False)
    return learner


@contextlib.contextmanager
def _closing(run: Run) -> Iterator[None]:
    """Leaves the service, if the run is a learner, and closes the checkpoints."""
    try:
        yield
    except BaseException as error:
        _leave(run, error)
        raise
    else:
        _leave(run, None)
    finally:
        run.checkpoints.close()


def _leave(run: Run, error: BaseException | None) -> None:
    if run.learner is not None:
        run.learner.leave(error)


def _executables(
    group: Group, invocation: Invocation, folder: RunFolder, console: Console
) -> Executables:
    """Stores compiled programs in the run folder if jax's cache cannot be used."""
    jax_caches = group.size == 1 or jax.default_backend() != "cpu"
    return Executables(
        None if jax_caches else folder.path,
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
        changes = prepared.identity.describe_changes()
        console.print(f"Continuing with different data:\n{changes}", markup=False)


def _begin(
    run: Run,
    record: preflight.Record,
    origins: Mapping[str, str],
    config_text: str,
) -> Position:
    """Restores or initializes the state, and describes the run in its folder.

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


def _train(
    run: Run, position: Position, hosts: Sequence[str], observer: Observer | None
) -> State:
    """Trains the steps that are left, if any."""
    prepared, folder, console = run.prepared, run.folder, run.console
    config = prepared.config
    if config.probe_network or (config.probe_network is None and run.group.size > 1):
        network_probe.run(prepared.mesh, run.group, folder, hosts, console)
    if (line := early_stop.complete(config, position, run.learner)) is not None:
        console.print(line, markup=False)
        return position.state
    if position.step:
        console.print(f"Resuming from step {position.step}")
    _write_pipeline(prepared, folder, position.step)
    if observer is not None:
        line = observer.on_start(prepared, folder, position.step, hosts)
        console.print(line, markup=False)
    step_fn = run.compile()
    while True:
        position = run.train(step_fn, position)
        grown = following.wait(run, position) if config.follow else None
        if grown is None:
            return position.state
        run = grown


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
