"""A run in progress: its steps, with everything that accompanies them."""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

import jax
from rich.console import Console

from ..checkpoint import init_from
from ..checkpoint.manager import Checkpoints, committed_steps
from ..checkpoint.restore import Position, restore_newest
from ..data import throughput_unit
from ..data.batches import DeviceBatches
from ..data.leased import LeasedBatches
from ..job.group import Group
from ..job.preemption import Preempted
from ..job.watchdog import ALLOW_SECONDS, Watchdog
from ..program import digest
from ..program.executables import Executables
from ..program.peaks import total_peak
from ..program.state import State
from ..record import history, metrics, published
from ..record.invocation import Invocation
from ..record.ledger import Ledger
from ..record.phases import Phases
from ..record.progress import Progress
from ..record.run_folder import RunFolder
from . import attempts, following, loop
from .early_stop import EarlyStop
from .failed_steps import FailedSteps, Rewind, give_up
from .hooks import Evaluate, Recorder, Save, Watched
from .prepare import Prepared
from .publishing import Publish, Publisher
from .reading import batches_of, leased_batches
from .replica_check import CheckReplicas

if TYPE_CHECKING:
    from .learner import Learner

# How long compiling the step of a large model may take.
COMPILE_SECONDS = 3600.0


@dataclasses.dataclass(frozen=True)
class Run:
    """Everything that a run uses in this process."""

    prepared: Prepared
    group: Group
    invocation: Invocation
    folder: RunFolder
    checkpoints: Checkpoints
    publisher: Publisher
    ledger: Ledger
    watchdog: Watchdog
    console: Console
    hooks: Iterable[loop.Hook]
    should_stop: Callable[[int], bool] | None
    phases: Phases
    executables: Executables
    learner: "Learner | None" = None

    def begin(self) -> Position:
        """Restores the newest checkpoint, or initializes the state."""
        attempts.record_start(self)
        self.watchdog.beat(allow=ALLOW_SECONDS)
        if self.executables.are_kept:
            tree = self.prepared.layout.placed(self.prepared.mesh)._asdict()
            compile = functools.partial(self.executables.compile, "digests")
            digest.prepare(tree, compile)
        if self.learner is not None:
            position = self._join(self.learner)
        else:
            position = self._restore() or self._first_position()
        self.watchdog.beat()
        self.phases.reached("restored")
        return position

    def _first_position(self) -> Position:
        self._move_history()
        return Position(0, self._initial_state())

    def _join(self, learner: "Learner") -> Position:
        """Joins the other learners, wherever they are.

        The service has the parameters. A checkpoint of this learner adds the state of
        its own optimizer, unless it is newer than what the service came back to.
        """
        step = learner.begin(self._initial_state)
        self._abandon_after(step)
        restored = self._restore(before=step + 1) if step else None
        if restored is None and step == 0:
            self._move_history()
        state = self._initial_state() if restored is None else restored.state
        optimizer_step = 0 if restored is None else restored.step
        return Position(step, learner.joined(state, optimizer_step))

    def _restore(self, *, before: int | None = None) -> Position | None:
        return restore_newest(
            self.checkpoints,
            self.prepared.program,
            self.group,
            self.ledger,
            self.console,
            before=before,
        )

    def _move_history(self) -> None:
        """Moves the files of earlier steps away if their checkpoints are gone."""
        if not self.folder.is_writer:
            return
        path, log = self.folder.path, self.console.print
        if moved := history.archive(path, self.ledger, log):
            self.ledger.event("anew", **dataclasses.asdict(moved))

    def _initial_state(self) -> State:
        """Returns the state of step 0, initialized from scratch or from weights."""
        config = self.prepared.config
        if config.init_from is None:
            key = jax.random.key(config.seed)
            return self.prepared.layout.create(key, self.prepared.mesh)
        source = init_from.find(config.init_from, self.prepared.program)
        program = self.prepared.program
        state, line = init_from.initialize(
            source, program, self.group, seed=config.seed
        )
        self.console.print(line, markup=False)
        self.ledger.event("init", source=config.init_from)
        return state

    def compile(self) -> loop.StepFn:
        """Returns the compiled train step, once all processes have it."""
        self.watchdog.beat(allow=COMPILE_SECONDS)
        self.console.print("Compiling the train step ...")
        step_fn = self.prepared.compile(self.executables)
        if self.learner is not None:
            step_fn = self.learner.step_fn(step_fn)
        self.group.wait("compiled", COMPILE_SECONDS)
        self.phases.reached("compiled")
        phases = self.phases
        self.ledger.event(
            "phases", attempt=phases.attempt, times=phases.times, cpu=phases.cpu
        )
        return step_fn

    def train(self, step_fn: loop.StepFn, position: Position) -> Position:
        """Trains as far as the data is enough; rewinds if too many steps fail."""
        self.watchdog.beat(allow=ALLOW_SECONDS)
        config, rewinds = self.prepared.config, [0]  # the steps rewound to
        while True:
            stop = self._last_step(position)
            if config.follow and stop == position.step:
                return position
            failed_steps = FailedSteps(config.rewind_after, log=self.console.print)
            try:
                state = self._run(step_fn, position, stop, failed_steps)
                step = int(state.step)
                return dataclasses.replace(position, step=step, state=state)
            except _Moved as moved:
                position = Position(moved.step, moved.state)
            except Rewind as rewind:
                target = None
                if len(rewinds) <= config.max_rewinds:
                    target = self._rewind(rewind, position, failed_steps)
                if target is None:
                    num = len(rewinds) - 1
                    raise give_up(rewind, config.rewind_after, num) from None
                # A new checkpoint since the last rewind counts as progress.
                rewinds = [0] if target.step > max(rewinds) else rewinds
                rewinds.append(target.step)
                position = target

    def _last_step(self, position: Position) -> int:
        """Returns the last step, or that for which there is data so far."""
        if self.prepared.config.follow:
            return following.last_step(self, position)
        return self.prepared.config.num_steps

    def _abandon_after(self, step: int) -> None:
        """Sets checkpoints of later steps aside: the run continues without them."""
        if self.folder.is_writer:
            published.withdraw_after(self.folder.path, step)
        for later in committed_steps(self.checkpoints.folder):
            if later > step:
                self.checkpoints.set_aside(later, "abandoned")

    def _rewind(
        self, rewind: Rewind, position: Position, failed_steps: FailedSteps
    ) -> Position | None:
        """Restores the last good checkpoint, and skips the data read since."""
        # A state after which no step succeeded is not restored again.
        first_failed = rewind.step - failed_steps.consecutive + 1
        before = first_failed if failed_steps.any_succeeded else position.step
        self.checkpoints.wait()
        target = self._restore(before=before)
        if target is None:
            return None
        self._abandon_after(target.step)
        # All batches since that checkpoint are skipped, whether they failed or not.
        next_batch = rewind.step + position.batches_ahead
        first_batch = target.step + target.batches_ahead
        ahead = next_batch - target.step
        self.ledger.event(
            "rewind",
            step=target.step,
            failed_step=rewind.step,
            skipped_batches=[first_batch, next_batch],
            reason=rewind.reason,
        )
        self.console.print(
            f"Rewinding from step {rewind.step} to step {target.step}; skipping the "
            f"data of {next_batch - first_batch} batches"
        )
        self.watchdog.beat(allow=ALLOW_SECONDS)
        return dataclasses.replace(target, batches_ahead=ahead)

    def _run(
        self, step_fn, position: Position, last: int, failed_steps: FailedSteps
    ) -> State:
        """Runs the steps from a position to the last; raises Rewind or Preempted."""
        config, start = self.prepared.config, position.step
        writers = self._writers(start)
        progress = self._progress(start)
        failed_steps.log = progress.message
        record = Recorder(
            progress,
            writers,
            *self._units,
            failed_steps,
            self.ledger,
            position.batches_ahead,
            self._bubble,
            self.prepared.shares,
        )
        stop = EarlyStop.of(config, self.group, position, self.learner, self._stopped)
        hooks, save = self._built_in_hooks(
            position, last, progress, writers, failed_steps, stop
        )
        batches = self._batches(position, last)
        try:
            with progress, batches:
                state = loop.run(
                    step_fn,
                    position.state,
                    batches,
                    start=start,
                    num_steps=last,
                    record=record,
                    record_every=config.log_every,
                    hooks=[
                        Watched(hook, self.watchdog) for hook in (*hooks, *self.hooks)
                    ],
                    started=self._started,
                    should_stop=self._should_stop,
                    is_over=stop.is_over,
                )
                if self.learner is not None and self.learner.has_ended():
                    self._stopped(self.learner.step, self.learner.why_ended)
                return state
        except loop.StopRequested as asked:
            if self.learner is not None and self.learner.has_moved():
                raise _Moved(self.learner.resume(), asked.state) from None
            self.watchdog.beat(allow=ALLOW_SECONDS)
            if save.last_step != asked.step:
                save.now(asked.step, asked.state)
            self.checkpoints.wait()
            self.ledger.event("preempted", step=asked.step)
            raise Preempted(asked.step) from None
        finally:
            for writer in writers:
                writer.close()

    def _batches(self, position: Position, last: int) -> DeviceBatches | LeasedBatches:
        """Returns the batches from a position on; the service chooses a learner's."""
        if self.learner is not None:
            return leased_batches(self.prepared, self.learner.upcoming)
        ahead = position.batches_ahead
        return batches_of(self.prepared, range(position.step + ahead, last + ahead))

    def _should_stop(self, step: int) -> bool:
        if self.learner is not None and self.learner.has_moved():
            return True
        return self.should_stop is not None and self.should_stop(step)

    def _stopped(self, step: int, reason: str) -> None:
        """Says and records why the run ends before its last step."""
        num_steps = self.prepared.config.num_steps
        self.console.print(f"Stopped at step {step} of {num_steps}: {reason}")
        self.ledger.event("stopped", step=step, reason=reason)

    def _started(self, step: int, metrics: dict[str, jax.Array]) -> None:
        self.watchdog.started(step, metrics["loss"])
        self.publisher.started(step, metrics)
        # Now, and not when the next save is due: all work until then would be lost.
        self.checkpoints.raise_if_failed()

    @property
    def _units(self) -> tuple[str, int]:
        """What throughput is counted in, and how many of them a step processes."""
        unit, count = throughput_unit(self.prepared.train_data)
        return unit, count * self.prepared.batch_size

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

    def _built_in_hooks(
        self,
        position: Position,
        last: int,
        progress: Progress,
        writers: Sequence[metrics.Writer],
        failed_steps: FailedSteps,
        stop: EarlyStop,
    ) -> tuple[list[loop.Hook], Save]:
        """Returns the hooks that every run has, in order, and the one that saves."""
        prepared, config = self.prepared, self.prepared.config
        # The test split is evaluated once, at the end.
        every = {"eval": config.eval_every, "test": 0}
        evaluations = {
            name: Evaluate(
                every[name],
                prepared.program.evaluate,
                split,
                prepared.batch_size,
                prepared.program.batch_shardings,
                progress,
                writers,
                stop if name == "eval" else None,
            )
            for name, split in prepared.held_out.items()
        }
        hooks: list[loop.Hook] = list(evaluations.values())
        if config.check_replicas_every:
            # After the evaluation that may end the run. It comes before the save: a
            # state that fails the check is not saved.
            where = self.folder.path, self.group.index, position.step
            check = CheckReplicas(config.check_replicas_every, *where)
            hooks.insert(int("eval" in evaluations), check)
        # Last: a run that is killed right after it must not lack an evaluation.
        save = Save(
            config.save_every,
            self.checkpoints,
            prepared,
            progress,
            failed_steps,
            position.batches_ahead,
            evaluations.get("eval"),
            stop,
            last,
        )
        hooks.append(save)
        if config.publish_every or config.publish_seconds:
            hooks.append(Publish.of(config, save, self.group))
        return hooks, save

    def _writers(self, start: int) -> Sequence[metrics.Writer]:
        """Returns the writers of metrics; only the first process has any."""
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
        if self.learner is not None and self.learner.reports:
            writers.append(self.learner)
        return writers


class _Moved(Exception):
    """A learner continues at another step than the next one."""

    def __init__(self, step: int, state: State):
        super().__init__(f"continues after step {step}")
        self.step, self.state = step, state
