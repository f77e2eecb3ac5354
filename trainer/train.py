"""Training, from a config to a trained state, in the order things come to exist."""

import contextlib
import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import jax
from rich.console import Console

from ..sharding import MeshSpec, parse_plan
from . import config_tree, distributed, loop, metrics, sampling
from .checkpoint import Checkpoints
from .data import Order, Source, device_batches
from .hooks import Evaluate, Recorder, Save
from .optimizers import Optimizer
from .peaks import total_peak
from .pipelining import Pipelining
from .progress import Progress
from .report import write_report
from .resume import restore_newest
from .run_folder import RunFolder, environment
from .schedules import Schedule
from .setup import Setup, prepare
from .state import Model, State

# Fields that change how a run is computed, saved or shown, and not what it computes:
# a run folder may be continued with other values of these.
FREE_FIELDS = (
    "mesh",
    "plan",
    "num_microbatches",
    "pipeline",
    "log_every",
    "eval_every",
    "eval_batches",
    "save_every",
    "keep_checkpoints",
    "writers",
    "sample_prompt",
    "sample_tokens",
)

# The least value of each whole number; 0 steps or batches mean never.
LEAST = (
    (("batch_size", "num_steps", "log_every", "sample_tokens"), 1),
    (("num_microbatches", "keep_checkpoints"), 1),
    (("eval_every", "eval_batches", "save_every", "seed"), 0),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Everything that defines a run.

    Attributes:
      batch_size: examples of one update, over all devices and microbatches.
      plan: sharding plans joined with +, see meshloom.sharding.plans.
      num_microbatches: parts of the batch computed one after the other; in a pipeline
        they are its microbatches. None takes 1, and in a pipeline a number for which
        little of the step is bubble.
      pipeline: how a mesh axis pipe larger than 1 is used.
      max_grad_norm: gradients are scaled down to this global norm; None does not clip.
      eval_every: steps between evaluations, one more at the end; 0 only there.
      eval_batches: batches of the held-out split in each evaluation; 0 for none.
      save_every: steps between checkpoints, one more at the end; 0 only there.
      keep_checkpoints: how many of the newest are kept; None keeps all.
      writers: any of "tensorboard", "wandb", beside metrics.jsonl.
      sample_prompt: text to continue after training, where the model can generate.
    """

    model: Model
    data: Source
    optimizer: Optimizer
    schedule: Schedule
    batch_size: int
    num_steps: int
    mesh: MeshSpec = MeshSpec(data=-1)
    plan: str = "data+fsdp+tensor+pipeline"
    num_microbatches: int | None = None
    pipeline: Pipelining = Pipelining()
    max_grad_norm: float | None = 1.0
    seed: int = 0
    log_every: int = 10
    eval_every: int = 100
    eval_batches: int = 16
    save_every: int = 100
    keep_checkpoints: int | None = 3
    writers: tuple[str, ...] = ()
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
        parse_plan(self.plan)
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
) -> State:
    """Trains to config.num_steps in `workdir`, from its newest checkpoint if any.

    Args:
      origins, config_text: where the config's values came from, for the run folder.
      insist: continue a folder that was started with another config.
      hooks: called beside the built-in ones.
    """
    quiet = jax.process_index() != 0
    console = console or Console(quiet=quiet, highlight=False, soft_wrap=True)
    distributed.agree("config digest", int(config_tree.digest(config)[:7], 16))
    with contextlib.ExitStack() as held:
        with distributed.all_or_none():
            metrics.check_installed(config.writers)
            setup = prepare(config)
            folder = RunFolder(workdir, is_writer=jax.process_index() == 0)
            values = config_tree.flatten(config)
            changes = folder.check(values, free=FREE_FIELDS, insist=insist)
            held.enter_context(folder.claim())
        folder.write_config(config_tree.to_json(config, origins or {}), config_text)
        folder.write_json("environment.json", environment(setup.layout.params.mesh))
        folder.write_json("sharding.json", setup.layout.params.to_json())
        console.print(f"Run folder {folder.path}")
        for line in setup.describe():
            console.print(line, markup=False)
        if changes:
            text = config_tree.format_diff(changes)
            console.print(f"Continued with other settings:\n{text}", markup=False)
        checkpoints = Checkpoints(folder.checkpoints, keep=config.keep_checkpoints)
        try:
            if found := restore_newest(checkpoints, setup, console):
                start, state = found
            else:
                start = 0
                state = setup.layout.create(jax.random.key(config.seed), setup.mesh)
            if start >= config.num_steps:
                console.print(f"This run is complete at step {start}.")
            else:
                if start:
                    console.print(f"Resuming from step {start}")
                state = _run(setup, folder, checkpoints, state, start, console, hooks)
        finally:
            checkpoints.close()
        _show(setup, folder, state, console)
        distributed.wait_for_all("done")
        return state


def _run(
    setup: Setup,
    folder: RunFolder,
    checkpoints: Checkpoints,
    state: State,
    start: int,
    console: Console,
    hooks: Iterable[loop.Hook],
) -> State:
    """The steps from `start` on, with everything that accompanies them."""
    config = setup.config
    # Here, where steps follow: a complete run keeps what it was trained with.
    bubble = None
    if setup.pipeline is None:
        folder.remove("pipeline.json")
    else:
        folder.write_json("pipeline.json", setup.pipeline.to_json(start))
        bubble = setup.pipeline.simulation.bubble
    console.print("Compiling the train step ...")
    step_fn = setup.compile()
    distributed.wait_for_all("compiled")
    tokens_per_step = setup.train_data.tokens_per_example * config.batch_size
    writers = _writers(config, folder, start)
    progress = Progress(
        config.num_steps,
        start,
        tokens_per_step,
        config.model.model_flops(setup.batch),
        total_peak(list(setup.mesh.devices.flat), setup.matmul_dtype),
        console,
        bubble=bubble,
        enabled=jax.process_index() == 0,
    )
    built_in: list[loop.Hook] = []
    if setup.eval_data is not None:
        built_in.append(
            Evaluate(
                config.eval_every,
                setup.eval_fn,
                setup.eval_data,
                config.batch_size,
                setup.num_eval_batches,
                setup.batch_shardings,
                progress,
                writers,
            )
        )
    # Last: a run killed right after it resumes here, and must lack no evaluation.
    built_in.append(Save(config.save_every, checkpoints, setup, progress))
    batches = device_batches(
        setup.train_data,
        Order(len(setup.train_data), config.seed),
        batch_size=config.batch_size,
        shardings=setup.batch_shardings,
        start=start,
        stop=config.num_steps,
    )
    try:
        with progress, batches:
            return loop.run(
                step_fn,
                state,
                batches,
                start=start,
                num_steps=config.num_steps,
                record=Recorder(progress, writers, tokens_per_step, bubble),
                record_every=config.log_every,
                hooks=[*built_in, *hooks],
            )
    finally:
        for writer in writers:
            writer.close()


def _writers(config: Config, folder: RunFolder, start: int) -> Sequence[metrics.Writer]:
    """Writers of the main process; other processes write no figures."""
    if jax.process_index() != 0:
        return []
    files = metrics.FileWriter(folder.path)
    files.truncate_after(start)
    writers: list[metrics.Writer] = [files]
    if "tensorboard" in config.writers:
        writers.append(metrics.TensorBoardWriter(folder.path / "tensorboard", start))
    if "wandb" in config.writers:
        writers.append(metrics.WandbWriter(folder.path, "meshloom", folder.path.name))
    return writers


def _show(setup: Setup, folder: RunFolder, state: State, console: Console) -> None:
    """The end of a run: a sample where the model can write one, and the report."""
    config = setup.config
    if config.sample_prompt is not None:
        text = sampling.sample(
            config,
            setup.mesh,
            setup.layout.canonical(state, setup.mesh).params,
            config.sample_prompt,
            config.sample_tokens,
        )
        folder.write_text("sample.txt", text)
        console.rule("sample")
        console.print(text, markup=False)
        console.rule()
    if jax.process_index() == 0:
        report = write_report(folder.path)
        console.print(f"Checkpoints: {folder.checkpoints}")
        console.print(f"Report: {report}")
