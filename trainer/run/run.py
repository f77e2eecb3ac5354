"""A run in flight: its steps, with everything that accompanies them."""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence

import jax
from rich.console import Console

from ..checkpoint import init_from
from ..checkpoint.manager import Checkpoints, committed_steps
from ..checkpoint.restore import Position, restore_newest
from ..config import tree as config_tree
from ..data import Order, throughput_unit
from ..data.batches import device_batches
from ..job.group import Group
from ..job.preemption import Preempted
from ..job.watchdog import ALLOW_SECONDS, Watchdog
from ..program import digest
from ..program.executables import Executables
from ..program.peaks import total_peak
from ..program.state import State
from ..record import history, metrics
from ..record.invocation import Invocation
from ..record.ledger import Ledger
from ..record.phases import Phases
from ..record.progress import Progress
from ..record.run_folder import RunFolder
from . import loop
from .failed_steps import FailedSteps, Rewind, give_up
from .hooks import Evaluate, Recorder, Save
from .prepare import Prepared
from .replica_check import CheckReplicas

# Compiling the step of a large model may take this long.
COMPILE_SECONDS = 3600.0


@dataclasses.dataclass(frozen=True)
class Run:
    """What a run works with, in this process."""

    prepared: Prepared
    group: Group
    invocation: Invocation
    folder: RunFolder
    checkpoints: Checkpoints
    ledger: Ledger
    watchdog: Watchdog
    console: Console
    hooks: Iterable[loop.Hook]
    should_leave: Callable[[int], bool] | None
    phases: Phases
    executables: Executables

    def begin(self) -> Position:
        """From the newest checkpoint, or from nothing."""
        self._note_start()
        self.watchdog.beat(allow=ALLOW_SECONDS)
        if self.executables.are_kept:
            tree = self.prepared.layout.placed(self.prepared.mesh)._asdict()
            compile = functools.partial(self.executables.compile, "digests")
            digest.prepare(tree, compile)
        found = restore_newest(
            self.checkpoints,
            self.prepared.program,
            self.group,
            self.ledger,
            self.console,
        )
        if found is None:
            found = Position(0, self._new_state())
            self._begin_anew()
        self.watchdog.beat()
        self.phases.reached("restored")
        return found

    def _begin_anew(self) -> None:
        if not self.folder.is_writer:
            return
        path, say = self.folder.path, self.console.print
        if archived := history.archive(path, self.ledger, say):
            self.ledger.event("anew", **dataclasses.asdict(archived))

    def _new_state(self) -> State:
        """The state of step 0: new, or with the weights of another run."""
        config = self.prepared.config
        if config.init_from is None:
            key = jax.random.key(config.seed)
            return self.prepared.layout.create(key, self.prepared.mesh)
        source = init_from.find(config.init_from, self.prepared.program)
        state, taken = init_from.initialize(source, self.prepared.program, self.group)
        self.console.print(taken, markup=False)
        self.ledger.event("init", source=config.init_from)
        return state

    def train(self, position: Position) -> State:
        """The steps from a position on; rewinds where too many in a row fail."""
        self.watchdog.beat(allow=COMPILE_SECONDS)
        self.console.print("Compiling the train step ...")
        step_fn = self.prepared.compile(self.executables)
        self.group.wait("compiled", COMPILE_SECONDS)
        self.phases.reached("compiled")
        phases = self.phases
        self.ledger.event(
            "phases", attempt=phases.attempt, times=phases.times, cpu=phases.cpu
        )
        self.watchdog.beat(allow=ALLOW_SECONDS)
        config, rewinds = self.prepared.config, [0]  # the steps that were gone back to
        while True:
            bad = FailedSteps(config.rewind_after, say=self.console.print)
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
        self, rewind: Rewind, position: Position, bad: FailedSteps
    ) -> Position | None:
        """The last good checkpoint, with the data that failed passed over."""
        # A state after which nothing went well is not gone back to again.
        first = rewind.step - bad.in_a_row + 1
        before = first if bad.any_good else position.step
        self.checkpoints.wait()
        found = restore_newest(
            self.checkpoints,
            self.prepared.program,
            self.group,
            self.ledger,
            self.console,
            before=before,
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
        self.watchdog.beat(allow=ALLOW_SECONDS)
        return dataclasses.replace(found, batches_ahead=ahead)

    def _run(self, step_fn, position: Position, bad: FailedSteps) -> State:
        prepared, config, start = self.prepared, self.prepared.config, position.step
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
            prepared.train_data,
            Order(len(prepared.train_data), config.seed),
            batch_size=config.batch_size,
            shardings=prepared.program.batch_shardings,
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
            self.watchdog.beat(allow=ALLOW_SECONDS)
            if save.last_step != leave.step:
                save.now(leave.step, leave.state)
            self.checkpoints.wait()
            self.ledger.event("preempted", step=leave.step)
            raise Preempted(leave.step) from None
        finally:
            for writer in writers:
                writer.close()

    def _started(self, step: int, row: dict[str, jax.Array]) -> None:
        self.watchdog.started(step, row["loss"])
        # At once, and not when the next save is due: until then all work may be lost.
        self.checkpoints.raise_if_failed()

    @property
    def _units(self) -> tuple[str, int]:
        """What throughput is counted in, and how many of them a step takes."""
        unit, count = throughput_unit(self.prepared.train_data)
        return unit, count * self.prepared.config.batch_size

    @property
    def _bubble(self) -> float | None:
        pipeline = self.prepared.staging
        return pipeline.simulation.bubble if pipeline else None

    def _progress(self, start: int) -> Progress:
        prepared, config = self.prepared, self.prepared.config
        return Progress(
            config.num_steps,
            start,
            self._units,
            prepared.model_flops,
            total_peak(list(prepared.mesh.devices.flat), prepared.matmul_dtype),
            self.console,
            bubble=self._bubble,
            enabled=self.group.is_first,
        )

    def _built_in(
        self,
        position: Position,
        progress: Progress,
        writers: Sequence[metrics.Writer],
        bad: FailedSteps,
    ) -> tuple[list[loop.Hook], Save]:
        """The hooks that every run has, in their order; the last one saves."""
        prepared, config = self.prepared, self.prepared.config
        hooks: list[loop.Hook] = []
        if config.check_replicas_every:  # first: what it refuses must not be saved
            every = config.check_replicas_every
            hooks.append(
                CheckReplicas(every, self.folder.path, self.group.index, position.step)
            )
        # The test split once, at the end; the other as often as it is asked for.
        every = {"eval": config.eval_every, "test": 0}
        evaluations = {
            name: Evaluate(
                every[name],
                prepared.program.evaluate,
                split,
                config.batch_size,
                prepared.program.batch_shardings,
                progress,
                writers,
            )
            for name, split in prepared.held_out.items()
        }
        hooks += evaluations.values()
        # Last: a run killed right after it resumes here, and must lack no evaluation.
        save = Save(
            config.save_every,
            self.checkpoints,
            prepared,
            progress,
            bad,
            position.batches_ahead,
            evaluations.get("eval"),
        )
        return [*hooks, save], save

    def _alive(self, hook: loop.Hook) -> loop.Hook:
        return _Alive(hook, self.watchdog)

    def _note_start(self) -> None:
        """What this attempt is, and what ended the one before it."""
        config, data = self.prepared.config, self.prepared.train_data
        before = [row for row in self.ledger.read() if row["event"] == "start"]
        if reason := self.invocation.restart_reason:
            self.ledger.event("death", reason=reason)
        count = self.group.size
        if before and before[-1]["processes"] != count:
            self.ledger.event("resize", processes=count, before=before[-1]["processes"])
        identity = self.prepared.identity
        for change in identity.changes if identity else ():
            self.ledger.event("data_changed", **change)
        self.ledger.event(
            "start",
            processes=count,
            devices=jax.device_count(),
            mesh={k: v for k, v in self.prepared.layout.params.mesh.items() if v > 1},
            attempt=self.invocation.attempt,
            config_digest=config_tree.digest(config),
            batch_size=config.batch_size,
            seed=config.seed,
            num_examples=len(data),
            data=identity.splits["train"].digest if identity else None,
        )

    def _writers(self, start: int) -> Sequence[metrics.Writer]:
        """Writers of the main process; other processes write no figures."""
        if not self.group.is_first:
            return []
        extras, path = self.prepared.config.writers, self.folder.path
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

    def __init__(self, hook: loop.Hook, watchdog: Watchdog):
        self.every, self._hook, self._pulse = hook.every, hook, watchdog

    def __call__(self, step: int, state: State) -> None:
        self._pulse.beat(allow=ALLOW_SECONDS)
        self._hook(step, state)
        self._pulse.beat()
