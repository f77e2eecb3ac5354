"""Training, from a config to a trained state, in the order things come to exist."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
from etils import epath
from rich.console import Console

from ..sharding import MeshSpec, Rules
from ..sharding.plans import AUTO
from . import (
    compiler_options,
    continuing,
    data_identity,
    distributed,
    executables,
    loop,
    metrics,
    probe,
    storage,
    weights,
)
from .checkpoint import Checkpoints, latest_step
from .config import tree as config_tree
from .data import Source
from .finish import finish
from .ledger import Ledger
from .optimizers import Optimizer
from .phases import Phases
from .pipelining import Pipelining
from .plan import forecast as forecast_lib
from .pulse import ALLOW_SECONDS, Pulse
from .resume import Position
from .rollcall import calling as rollcall
from .rules import make_rules
from .run_folder import RunFolder, environment
from .schedules import Schedule
from .session import Session
from .setup import Setup, prepare
from .state import Model, State

# The least value of each whole number; 0 steps or batches mean never.
LEAST = (
    (("batch_size", "num_steps", "log_every", "sample_tokens"), 1),
    (("num_microbatches", "keep_checkpoints", "rewind_after"), 1),
    (("eval_every", "eval_batches", "save_every", "seed", "max_rewinds"), 0),
    (("test_batches", "keep_every", "keep_best", "check_replicas_every"), 0),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Everything that defines a run.

    Attributes:
      batch_size: examples of one update, over all devices and microbatches.
      plan: sharding plans joined with +, see meshloom.sharding.plans; "auto" is chosen
        for the mesh and its devices, as all that is left open below (docs/plan.md).
      rules: rules of your own, after those of the plan: {"classes": "tensor"} shards
        the logical axis `classes` over the mesh axis tensor, {"classes": None} never
        does, a list is tried in order, and {"classes": {"param": "fsdp"}} holds for one
        role only (param, compute, optimizer).
      num_microbatches: parts of the batch computed one after the other; in a pipeline
        they are its microbatches. None is chosen: the fewest that fit in memory, and in
        a pipeline a number for which little of the step is bubble.
      pipeline: how a mesh axis pipe larger than 1 is used.
      max_grad_norm: gradients are scaled down to this global norm; None does not clip.
      skip_grad_norm: a step whose gradient has a larger norm is left out, as one that
        is not finite always is; None for no such limit.
      rewind_after: so many failed steps in a row make the run go back to its last good
        checkpoint and pass over the data since.
      max_rewinds: so often in a row, without a new checkpoint between.
      stall_seconds: without a finished step, after which this process writes stacks
        and ends; None for 60, or ten times the median if that is more; 0 for never.
      eval_every: steps between evaluations, one more at the end; 0 only there.
      eval_batches: batches of the held-out split in each evaluation; None for all of
        it, 0 for none.
      test_batches: the same of the test split, once, after the last step.
      save_every: steps between checkpoints, one more at the end; 0 only there.
      init_from: a run folder, or the folder of one step of it, whose parameters the run
        begins with; used only where it has no checkpoint of its own.
      checkpoint_folder: where checkpoints are saved, a folder with its whole path or
        gs://BUCKET/...; None takes `checkpoints` in the run folder.
      keep_checkpoints: how many of the newest are kept; None keeps all.
      keep_every: steps that are multiples of it are kept too; 0 for none.
      keep_best: how many with the lowest held-out loss are kept too, of those saved at
        a step with an evaluation.
      check_replicas_every: steps between checks that copies of arrays on several
        devices are equal, one more at the end; 0 for none.
      writers: any of "tensorboard", "wandb", beside metrics.jsonl.
      compiler_options: "xla_NAME=VALUE" of what the step is compiled with.
      probe_network: measure how fast each axis of the mesh is, before training; None
        does where there are several processes.
      sample_prompt: text to continue after training, where the model can generate.
    """

    model: Model
    data: Source
    optimizer: Optimizer
    schedule: Schedule
    batch_size: int
    num_steps: int
    mesh: MeshSpec = MeshSpec(data=-1)
    plan: str = AUTO
    rules: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    num_microbatches: int | None = None
    pipeline: Pipelining = Pipelining()
    max_grad_norm: float | None = 1.0
    skip_grad_norm: float | None = None
    rewind_after: int = 10
    max_rewinds: int = 2
    stall_seconds: float | None = None
    seed: int = 0
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
    compiler_options: tuple[str, ...] = ()
    probe_network: bool | None = None
    sample_prompt: str | None = None
    sample_tokens: int = 256

    def __post_init__(self):
        for names, least in LEAST:
            for name in names:
                value = getattr(self, name)
                if value is not None and value < least:
                    raise ValueError(f"{name} must be at least {least}, got {value}")
        if self.max_grad_norm is not None and not self.max_grad_norm > 0:
            raise ValueError(
                f"max_grad_norm must be positive, got {self.max_grad_norm}; None does "
                "not clip"
            )
        if short := -self.batch_size % (self.num_microbatches or 1):
            raise ValueError(
                f"batch_size {self.batch_size} is not divided by num_microbatches "
                f"{self.num_microbatches}; {self.batch_size + short} would be"
            )
        if self.skip_grad_norm is not None and not self.skip_grad_norm > 0:
            raise ValueError(
                f"skip_grad_norm must be positive, got {self.skip_grad_norm}; None "
                "leaves out only steps that are not finite"
            )
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
        self.make_rules()
        compiler_options.parse(self.compiler_options)
        if unknown := set(self.writers) - set(metrics.EXTRAS):
            raise ValueError(
                f"writers: {sorted(unknown)[0]!r} is unknown; there are 'tensorboard' "
                "and 'wandb'"
            )

    def make_rules(self) -> Rules:
        return make_rules(self.plan, self.rules)


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
) -> State:
    """Trains to config.num_steps in `workdir`, from its newest checkpoint if any.

    Args:
      origins, config_text: where the config's values came from, for the run folder.
      insist: continue a folder that was started with another config.
      hooks: called beside the built-in ones.
      should_leave: asked after each step; where it says so, the run saves and raises
        preemption.Preempted. Must say the same in all processes.
      phases: of the start of this process, to go on with.
    """
    quiet = jax.process_index() != 0
    console = console or Console(quiet=quiet, highlight=False, soft_wrap=True)
    phases = phases or Phases.of_this_process()
    called = rollcall.who_we_are(config)  # before anything that waits for the others
    distributed.connect()
    with contextlib.ExitStack() as held:
        with distributed.all_or_none():
            metrics.check_installed(config.writers)
            storage.check_installed(config.checkpoint_folder)
            setup = prepare(config)
            folder = RunFolder(workdir, is_writer=jax.process_index() == 0)
            saved = storage.checkpoints_of(folder.path, config.checkpoint_folder)
            differences = continuing.check(config, folder, saved, insist=insist)
            weights.check(setup, folder)
            if config.checkpoint_folder is not None and not insist:
                _check_owner(folder, saved)
            held.enter_context(folder.claim())
        identity = data_identity.establish(
            setup.datasets, folder.path, saved, insist=insist, say=console.print
        )
        setup = dataclasses.replace(setup, identity=identity)
        called += rollcall.what_we_do(setup, _shared_folders(folder, config))
        _announce(setup, folder, differences, console)
        ledger = Ledger(folder.path, is_writer=folder.is_writer)
        pulse = held.enter_context(
            Pulse(
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
        session = Session(
            setup,
            folder,
            checkpoints,
            ledger,
            pulse,
            console,
            hooks,
            should_leave,
            phases,
            executables.of_job(folder.path, console),
        )
        phases.reached("ready")
        forecast = None
        try:
            position = _begin(session, called, origins or {}, config_text)
            state = position.state
            _probe(setup, folder, called, console)
            if position.step >= config.num_steps:
                console.print(f"This run is complete at step {position.step}.")
            else:
                if position.step:
                    console.print(f"Resuming from step {position.step}")
                _write_pipeline(setup, folder, position.step)
                forecast = _foretell(setup, folder, position.step, called, console)
                state = session.train(position)
        finally:
            checkpoints.close()
        ledger.event("done", step=int(state.step))
        pulse.beat(allow=ALLOW_SECONDS)
        finish(setup, folder, state, forecast, ledger, console)
        distributed.wait_for_all("done")
        return state


def _announce(
    setup: Setup, folder: RunFolder, differences: Sequence[str], console: Console
) -> None:
    console.print(f"Run folder {folder.path}")
    for line in (*setup.describe(), *differences):
        console.print(line, markup=False)
    if setup.identity is not None and setup.identity.changes:
        words = setup.identity.words()
        console.print(f"Continued with other data:\n{words}", markup=False)


def _begin(
    session: Session,
    called: rollcall.Record,
    origins: Mapping[str, str],
    config_text: str,
) -> Position:
    """Restores, or begins anew, and writes what the run is now.

    Until this attempt has restored, nothing in the run folder is changed.
    """
    setup, folder, ledger = session.setup, session.folder, session.ledger
    with ledger.held():
        if called.processes:
            ledger.event("rollcall", hosts=called.hosts, seconds=called.seconds)
        position = session.begin()
        folder.write_config(config_tree.to_json(setup.config, origins), config_text)
        assert setup.identity is not None
        setup.identity.write(folder.path, jax.process_index())
    sizes = setup.layout.params.mesh
    folder.write_json("environment.json", environment(sizes))
    folder.write_json("sharding.json", setup.layout.params.to_json())
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


def _write_rollcall(called: rollcall.Record, folder: RunFolder) -> None:
    if called.processes:
        folder.write_json(rollcall.FILE, called.to_json())
    else:
        folder.remove(rollcall.FILE)


def _probe(
    setup: Setup, folder: RunFolder, called: rollcall.Record, console: Console
) -> None:
    wanted = setup.config.probe_network
    if wanted or (wanted is None and jax.process_count() > 1):
        probe.run(setup.mesh, folder, called.hosts, console)


def _write_pipeline(setup: Setup, folder: RunFolder, start: int) -> None:
    """Only where steps follow: a complete run keeps what it was trained with."""
    if setup.pipeline is None:
        folder.remove("pipeline.json")
    else:
        folder.write_json("pipeline.json", setup.pipeline.to_json(start))


def _foretell(
    setup: Setup,
    folder: RunFolder,
    start: int,
    called: rollcall.Record,
    console: Console,
) -> forecast_lib.Forecast | None:
    """What a step will take, by the process that speaks for all."""
    if jax.process_index() != 0:
        return None
    forecast = forecast_lib.foretell(setup, start, called.hosts)
    folder.write_json(forecast_lib.FILE, forecast.to_json())
    console.print(forecast.line(), markup=False)
    return forecast
