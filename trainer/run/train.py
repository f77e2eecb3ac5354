"""Training, from a config to a trained state, in the order things come to exist."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import jax
from etils import epath
from rich.console import Console

from ..checkpoint import init_from
from ..checkpoint.manager import Checkpoints, latest_step
from ..checkpoint.restore import Position
from ..config import tree as config_tree
from ..job import joining, network_probe, preflight
from ..job.watchdog import ALLOW_SECONDS, Watchdog
from ..program import executables
from ..program.computation import Choose, Computation, check_minimum, choose_plain
from ..program.state import State
from ..record import metrics, storage
from ..record.ledger import Ledger
from ..record.phases import Phases
from ..record.run_folder import RunFolder, environment
from . import continuing, data_identity, loop
from .finish import Observer, finish
from .prepare import Prepared, prepare
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
    console: Console | None = None,
    hooks: Iterable[loop.Hook] = (),
    should_leave: Callable[[int], bool] | None = None,
    phases: Phases | None = None,
    choose: Choose = choose_plain,
    observer: Observer | None = None,
) -> State:
    """Trains to config.num_steps in `workdir`, from its newest checkpoint if any.

    Args:
      origins, config_text: where the config's values came from, for the run folder.
      insist: continue a folder that was started with another config.
      hooks: called beside the built-in ones.
      should_leave: asked after each step; where it says so, the run saves and raises
        preemption.Preempted. Must say the same in all processes.
      phases: of the start of this process, to go on with.
      choose: fills what the config leaves open; `meshloom train` compares plans.
      observer: told of the run in the process that speaks for all.
    """
    quiet = jax.process_index() != 0
    console = console or Console(quiet=quiet, highlight=False, soft_wrap=True)
    phases = phases or Phases.of_this_process()
    called = preflight.who_we_are(config)  # before anything that waits for the others
    joining.connect()
    with contextlib.ExitStack() as held:
        with joining.all_or_none():
            metrics.check_installed(config.writers)
            storage.check_installed(config.checkpoint_folder)
            prepared = prepare(config, choose=choose)
            folder = RunFolder(workdir, is_writer=jax.process_index() == 0)
            saved = storage.checkpoints_of(folder.path, config.checkpoint_folder)
            differences = continuing.check(config, folder, saved, insist=insist)
            init_from.check(config.init_from, prepared.program, saved)
            if config.checkpoint_folder is not None and not insist:
                _check_owner(folder, saved)
            held.enter_context(folder.claim())
        identity = data_identity.establish(
            prepared.datasets, folder.path, saved, insist=insist, say=console.print
        )
        prepared = dataclasses.replace(prepared, identity=identity)
        called += preflight.what_we_do(
            prepared.data_facts(),
            prepared.fingerprint(),
            _shared_folders(folder, config),
        )
        _announce(prepared, folder, differences, console)
        ledger = Ledger(folder.path, is_writer=folder.is_writer)
        watchdog = held.enter_context(
            Watchdog(
                folder.path,
                jax.process_index(),
                jax.process_count(),
                stall_seconds=config.stall_seconds,
            )
        )
        checkpoints = Checkpoints(
            saved,
            keep=config.keep_checkpoints,
            keep_every=config.keep_every,
            keep_best=config.keep_best,
            event=ledger.event,
        )
        run = Run(
            prepared,
            folder,
            checkpoints,
            ledger,
            watchdog,
            console,
            hooks,
            should_leave,
            phases,
            executables.of_job(folder.path, console),
        )
        phases.reached("ready")
        observer = observer if folder.is_writer else None
        try:
            position = _begin(run, called, origins or {}, config_text)
            state = position.state
            _probe(prepared, folder, called, console)
            if position.step >= config.num_steps:
                console.print(f"This run is complete at step {position.step}.")
            else:
                if position.step:
                    console.print(f"Resuming from step {position.step}")
                _write_pipeline(prepared, folder, position.step)
                if observer is not None:
                    line = observer.begins(
                        prepared, folder, position.step, called.hosts
                    )
                    console.print(line, markup=False)
                state = run.train(position)
        finally:
            checkpoints.close()
        ledger.event("done", step=int(state.step))
        watchdog.beat(allow=ALLOW_SECONDS)
        finish(prepared, folder, state, observer, ledger, console)
        joining.wait_for_all("done")
        return state


def _announce(
    prepared: Prepared, folder: RunFolder, differences: Sequence[str], console: Console
) -> None:
    console.print(f"Run folder {folder.path}")
    for line in (*prepared.describe(), *differences):
        console.print(line, markup=False)
    if prepared.identity is not None and prepared.identity.changes:
        words = prepared.identity.words()
        console.print(f"Continued with other data:\n{words}", markup=False)


def _begin(
    run: Run,
    called: preflight.Record,
    origins: Mapping[str, str],
    config_text: str,
) -> Position:
    """Restores, or begins anew, and writes what the run is now.

    Until this attempt has restored, nothing in the run folder is changed.
    """
    prepared, folder, ledger = run.prepared, run.folder, run.ledger
    with ledger.held():
        if called.processes:
            ledger.event("rollcall", hosts=called.hosts, seconds=called.seconds)
        position = run.begin()
        folder.write_config(config_tree.to_json(prepared.config, origins), config_text)
        assert prepared.identity is not None
        prepared.identity.write(folder.path, jax.process_index())
    sizes = prepared.layout.params.mesh
    folder.write_json("environment.json", environment(sizes))
    folder.write_json("sharding.json", prepared.layout.params.to_json())
    _write_rollcall(called, folder)
    return position


def _check_owner(folder: RunFolder, saved: epath.Path) -> None:
    """Refuses to go on, in a new run folder, from what another run has saved."""
    if folder.previous_values() is None and (step := latest_step(saved)) is not None:
        raise ValueError(
            f"checkpoint_folder {saved} holds checkpoints of another run (newest step "
            f"{step}), and run folder {folder.path} is new. Choose another, or pass "
            "--insist to go on from them."
        )


def _shared_folders(folder: RunFolder, config: Config) -> dict[str, Path]:
    """Folders that all hosts must see; a bucket is the same for all by its name."""
    folders = {"run folder": folder.path}
    if config.checkpoint_folder is not None and "://" not in config.checkpoint_folder:
        folders["checkpoint_folder"] = Path(config.checkpoint_folder)
    return folders


def _write_rollcall(called: preflight.Record, folder: RunFolder) -> None:
    if called.processes:
        folder.write_json(preflight.FILE, called.to_json())
    else:
        folder.remove(preflight.FILE)


def _probe(
    prepared: Prepared, folder: RunFolder, called: preflight.Record, console: Console
) -> None:
    wanted = prepared.config.probe_network
    if wanted or (wanted is None and jax.process_count() > 1):
        network_probe.run(prepared.mesh, folder, called.hosts, console)


def _write_pipeline(prepared: Prepared, folder: RunFolder, start: int) -> None:
    """Only where steps follow: a complete run keeps what it was trained with."""
    if prepared.staging is None:
        folder.remove("pipeline.json")
    else:
        folder.write_json("pipeline.json", prepared.staging.to_json(start))
