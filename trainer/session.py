"""A run in flight: its steps, with everything that accompanies them."""

import dataclasses
import functools
import os
from collections.abc import Callable, Iterable, Sequence

import jax
from rich.console import Console

from ..launch.masking import masked_text
from . import digest, distributed, history, loop, metrics, weights
from .bad_steps import BadSteps, Rewind, give_up
from .checkpoint import Checkpoints, committed_steps
from .config import tree as config_tree
from .data import Order, device_batches, throughput_unit
from .executables import Executables
from .hooks import Evaluate, Recorder, Save
from .ledger import Ledger
from .peaks import total_peak
from .phases import Phases
from .preemption import Preempted
from .progress import Progress
from .pulse import ALLOW_SECONDS, Pulse
from .replicas import CheckReplicas
from .resume import Position, restore_newest
from .run_folder import RunFolder
from .setup import Setup
from .state import State

# Compiling the step of a large model may take this long.
COMPILE_SECONDS = 3600.0


@dataclasses.dataclass(frozen=True)
class Session:
    """What a run works with, in this process."""

    setup: Setup
    folder: RunFolder
    checkpoints: Checkpoints
    ledger: Ledger
    pulse: Pulse
    console: Console
    hooks: Iterable[loop.Hook]
    should_leave: Callable[[int], bool] | None
    phases: Phases
    executables: Executables

    def begin(self) -> Position:
        """From the newest checkpoint, or from nothing."""
        self._note_start()
        self.pulse.beat(allow=ALLOW_SECONDS)
        if self.executables.are_kept:
            tree = self.setup.layout.placed(self.setup.mesh)._asdict()
            compile = functools.partial(self.executables.compile, "digests")
            digest.prepare(tree, compile)
        found = restore_newest(self.checkpoints, self.setup, self.ledger, self.console)
        if found is None:
            found = Position(0, self._new_state())
            self._begin_anew()
        self.pulse.beat()
        self.phases.reached("restored")
        return found

    def _begin_anew(self) -> None:
        if not self.folder.is_writer:
            return
        path, say = self.folder.path, self.console.print
        if anew := history.begin_anew(path, self.ledger, say):
            self.ledger.event("anew", **dataclasses.asdict(anew))

    def _new_state(self) -> State:
        """The state of step 0: new, or with the weights of another run."""
        config = self.setup.config
        if config.init_from is None:
            key = jax.random.key(config.seed)
            return self.setup.layout.create(key, self.setup.mesh)
        source = weights.find(config.init_from, self.setup)
        state, taken = weights.begin(source, self.setup)
        self.console.print(taken, markup=False)
        self.ledger.event("init", source=config.init_from)
        return state

    def train(self, position: Position) -> State:
        """The steps from a position on; rewinds where too many in a row fail."""
        self.pulse.beat(allow=COMPILE_SECONDS)
        self.console.print("Compiling the train step ...")
        step_fn = self.setup.compile(self.executables)
        distributed.wait_for_all("compiled", COMPILE_SECONDS)
        self.phases.reached("compiled")
        phases = self.phases
        self.ledger.event(
            "phases", attempt=phases.attempt, times=phases.times, cpu=phases.cpu
        )
        self.pulse.beat(allow=ALLOW_SECONDS)
        config, rewinds = self.setup.config, [0]  # the steps that were gone back to
        while True:
            bad = BadSteps(config.rewind_after, say=self.console.print)
            try:
                return self._run(step_fn, position, bad)
            except Rewind as rewind:
                found = None
                if len(rewinds) <= config.max_rewinds:
                    found = self._rewind(rewind, position, bad)
                if found is None:
                    num = len(rewinds) - 1
                    raise give_up(rewind, config.rewind_after, num) from None
                # To have saved something new is progress.
                rewinds = [0] if found.step > max(rewinds) else rewinds
                rewinds.append(found.step)
                position = found

    def _rewind(
        self, rewind: Rewind, position: Position, bad: BadSteps
    ) -> Position | None:
        """The last good checkpoint, with the data that failed passed over."""
        # A state after which nothing went well is not gone back to again.
        first = rewind.step - bad.in_a_row + 1
        before = first if bad.any_good else position.step
        self.checkpoints.wait()
        found = restore_newest(
            self.checkpoints, self.setup, self.ledger, self.console, before=before
        )
        if found is None:
            return None
        for step in committed_steps(self.checkpoints.folder):
            if step > found.step:
                self.checkpoints.set_aside(step, "abandoned")
        # What was read after that checkpoint is passed over, good or bad.
        next_batch = rewind.step + position.batches_ahead
        first_batch = found.step + found.batches_ahead
        ahead = next_batch - found.step
        self.ledger.event(
            "rewind",
            step=found.step,
            failed_step=rewind.step,
            skipped_batches=[first_batch, next_batch],
            reason=rewind.words,
        )
        self.console.print(
            f"Rewinding from step {rewind.step} to {found.step}; the data of "
            f"{next_batch - first_batch} batches is passed over"
        )
        self.pulse.beat(allow=ALLOW_SECONDS)
        return dataclasses.replace(found, batches_ahead=ahead)

    def _run(self, step_fn, position: Position, bad: BadSteps) -> State:
        setup, config, start = self.setup, self.setup.config, position.step
        writers = self._writers(start)
        progress = self._progress(start)
        bad.say = progress.message
        record = Recorder(
            progress,
            writers,
            *self._units,
            bad,
            self.ledger,
            position.batches_ahead,
            self._bubble,
        )
        hooks, save = self._built_in(position, progress, writers, bad)
        batches = device_batches(
            setup.train_data,
            Order(len(setup.train_data), config.seed),
            batch_size=config.batch_size,
            shardings=setup.batch_shardings,
            start=start + position.batches_ahead,
            stop=config.num_steps + position.batches_ahead,
        )
        try:
            with progress, batches:
                return loop.run(
                    step_fn,
                    position.state,
                    batches,
                    start=start,
                    num_steps=config.num_steps,
                    record=record,
                    record_every=config.log_every,
                    hooks=[self._alive(hook) for hook in (*hooks, *self.hooks)],
                    started=self._started,
                    should_leave=self.should_leave,
                )
        except loop.Leave as leave:
            self.pulse.beat(allow=ALLOW_SECONDS)
            if save.last_step != leave.step:
                save.now(leave.step, leave.state)
            self.checkpoints.wait()
            self.ledger.event("preempted", step=leave.step)
            raise Preempted(leave.step) from None
        finally:
            for writer in writers:
                writer.close()

    def _started(self, step: int, row: dict[str, jax.Array]) -> None:
        self.pulse.started(step, row["loss"])
        # At once, and not when the next save is due: until then all work may be lost.
        self.checkpoints.raise_if_failed()

    @property
    def _units(self) -> tuple[str, int]:
        """What throughput is counted in, and how many of them a step takes."""
        unit, count = throughput_unit(self.setup.train_data)
        return unit, count * self.setup.config.batch_size

    @property
    def _bubble(self) -> float | None:
        pipeline = self.setup.pipeline
        return pipeline.simulation.bubble if pipeline else None

    def _progress(self, start: int) -> Progress:
        setup, config = self.setup, self.setup.config
        return Progress(
            config.num_steps,
            start,
            self._units,
            setup.model_flops,
            total_peak(list(setup.mesh.devices.flat), setup.matmul_dtype),
            self.console,
            bubble=self._bubble,
            enabled=jax.process_index() == 0,
        )

    def _built_in(
        self,
        position: Position,
        progress: Progress,
        writers: Sequence[metrics.Writer],
        bad: BadSteps,
    ) -> tuple[list[loop.Hook], Save]:
        """The hooks that every run has, in their order; the last one saves."""
        setup, config = self.setup, self.setup.config
        hooks: list[loop.Hook] = []
        if config.check_replicas_every:  # first: what it refuses must not be saved
            every = config.check_replicas_every
            hooks.append(CheckReplicas(every, self.folder.path, position.step))
        # The test split once, at the end; the other as often as it is asked for.
        every = {"eval": config.eval_every, "test": 0}
        evaluations = {
            name: Evaluate(
                every[name],
                setup.eval_fn,
                split,
                config.batch_size,
                setup.batch_shardings,
                progress,
                writers,
            )
            for name, split in setup.held_out.items()
        }
        hooks += evaluations.values()
        # Last: a run killed right after it resumes here, and must lack no evaluation.
        save = Save(
            config.save_every,
            self.checkpoints,
            setup,
            progress,
            bad,
            position.batches_ahead,
            evaluations.get("eval"),
        )
        return [*hooks, save], save

    def _alive(self, hook: loop.Hook) -> loop.Hook:
        return _Alive(hook, self.pulse)

    def _note_start(self) -> None:
        """What this attempt is, and what ended the one before it."""
        config, data = self.setup.config, self.setup.train_data
        before = [row for row in self.ledger.read() if row["event"] == "start"]
        if reason := os.environ.get("MESHLOOM_RESTART_REASON"):
            self.ledger.event("death", reason=masked_text(reason))
        count = jax.process_count()
        if before and before[-1]["processes"] != count:
            self.ledger.event("resize", processes=count, before=before[-1]["processes"])
        identity = self.setup.identity
        for change in identity.changes if identity else ():
            self.ledger.event("data_changed", **change)
        self.ledger.event(
            "start",
            processes=count,
            devices=jax.device_count(),
            mesh={k: v for k, v in self.setup.layout.params.mesh.items() if v > 1},
            attempt=int(os.environ.get("MESHLOOM_ATTEMPT", "1")),
            config_digest=config_tree.digest(config),
            batch_size=config.batch_size,
            seed=config.seed,
            num_examples=len(data),
            data=identity.splits["train"].digest if identity else None,
        )

    def _writers(self, start: int) -> Sequence[metrics.Writer]:
        """Writers of the main process; other processes write no figures."""
        if jax.process_index() != 0:
            return []
        extras, path = self.setup.config.writers, self.folder.path
        files = metrics.FileWriter(path)
        files.truncate_after(start)
        writers: list[metrics.Writer] = [files]
        if "tensorboard" in extras:
            writers.append(metrics.TensorBoardWriter(path / "tensorboard", start))
        if "wandb" in extras:
            writers.append(metrics.WandbWriter(path, "meshloom", path.name))
        return writers


class _Alive:
    """A hook that may take longer than a step."""

    def __init__(self, hook: loop.Hook, pulse: Pulse):
        self.every, self._hook, self._pulse = hook.every, hook, pulse

    def __call__(self, step: int, state: State) -> None:
        self._pulse.beat(allow=ALLOW_SECONDS)
        self._hook(step, state)
        self._pulse.beat()
