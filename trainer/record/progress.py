"""Shows the progress of a run: a live bar, or plain lines in a log."""

import collections
import time
from collections.abc import Callable, Mapping

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from ...sharding.text import duration, short_number
from ..program.peaks import Peak


class Rate:
    """Steps per second, measured between calls.

    The time before the first call is never counted, because it includes compilation.

    Args:
      window: seconds over which `steps_per_s` is averaged.
    """

    def __init__(
        self, window: float = 20.0, clock: Callable[[], float] = time.perf_counter
    ):
        self._window = window
        self._clock = clock
        self._marks: collections.deque[tuple[int, float]] = collections.deque()
        self._known: float | None = None

    def update(self, step: int) -> float | None:
        """Records that `step` is done; returns the steps/s since the last call."""
        now = self._clock()
        interval = None
        if self._marks:
            last_step, last_time = self._marks[-1]
            if step <= last_step or now <= last_time:
                return None
            interval = (step - last_step) / (now - last_time)
        self._marks.append((step, now))
        while len(self._marks) > 2 and self._marks[1][1] <= now - self._window:
            self._marks.popleft()
        if len(self._marks) > 1:
            first_step, first_time = self._marks[0]
            self._known = (step - first_step) / (now - first_time)
        return interval

    def restart(self) -> None:
        """Excludes the time until the next call, if it was not spent on training steps.

        The last known rate is kept until a new one is measured.
        """
        self._marks.clear()

    @property
    def steps_per_s(self) -> float | None:
        """The rate over the window, or None before it is known."""
        return self._known


class Progress:
    """Shows the state of a run; a context manager.

    Args:
      start: the step the run starts or resumes from.
      units: unit of throughput and units per step; None does not show it.
      peak: of all devices combined; None does not show the utilization.
      bubble: simulated bubble as a fraction of a pipeline's step; None without one.
      enabled: whether to show anything; True on one process only.
      every: without a terminal, a line is printed after this many steps,
      seconds: or after this many seconds, whichever comes first.
    """

    def __init__(
        self,
        total_steps: int,
        start: int,
        units: tuple[str, float] | None,
        model_flops_per_step: float | None,
        peak: Peak | None,
        console: Console | None = None,
        *,
        bubble: float | None = None,
        enabled: bool = True,
        every: int = 100,
        seconds: float = 10.0,
        clock: Callable[[], float] = time.perf_counter,
    ):
        self.rate = Rate(clock=clock)
        self._total_steps = total_steps
        self._step = start
        self._units = units
        self._flops_per_step = model_flops_per_step
        self._peak = peak
        self._bubble = bubble
        self._console = console or Console()
        self._enabled = enabled
        self._every, self._seconds = every, seconds
        self._clock = clock
        self._metrics: dict[str, float] = {}
        self._shown: tuple[int, float] | None = None
        self._live = None
        if enabled and self._console.is_terminal:
            self._live = Live(
                console=self._console,
                get_renderable=self._render,
                refresh_per_second=1,  # drawing takes time from the CPU's own steps
            )

    def __enter__(self) -> "Progress":
        if self._live is not None:
            self._live.start(refresh=True)
        return self

    def __exit__(self, *_) -> None:
        if self._live is not None:
            self._live.stop()
        elif self._metrics and (self._shown is None or self._shown[0] != self._step):
            self._print_line()

    def update(self, step: int, metrics: Mapping[str, float]) -> None:
        """Records that `step` is done, with the metrics known so far."""
        self.rate.update(step)
        self._step = step
        self._metrics.update(metrics)
        if self._live is None and self._is_line_due():
            self._print_line()

    def message(self, text: str) -> None:
        """Prints a permanent line, above the bar if there is one."""
        if self._enabled:
            self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def figures(self) -> list[str]:
        """Returns the known figures of the current step, with their units."""
        parts, rate = [], self.rate.steps_per_s
        if (loss := self._metrics.get("loss")) is not None:
            parts.append(f"loss {loss:.4f}")
        if self._units is not None and rate:
            unit, count = self._units
            parts.append(f"{short_number(rate * count, 3, fixed=True)} {unit}/s")
        if self._bubble is not None:
            parts.append(f"bubble {100 * self._bubble:.0f} % (simulated)")
        if self._flops_per_step is not None and self._peak is not None and rate:
            share = rate * self._flops_per_step / self._peak.flops
            parts.append(f"{100 * share:.0f} % of the {self._peak.label}")
        return parts

    def time_left(self) -> str:
        """Returns the time to the last step, "" before a rate is known."""
        rate = self.rate.steps_per_s
        if not rate:
            return ""
        return f"{duration((self._total_steps - self._step) / rate)} left"

    def _is_line_due(self) -> bool:
        if self._shown is None or self._step == self._total_steps:
            return True
        step, when = self._shown
        return self._step - step >= self._every or self._clock() - when >= self._seconds

    def _print_line(self) -> None:
        self._shown = (self._step, self._clock())
        parts = [f"step {self._step}/{self._total_steps}", *self.figures()]
        if self._step < self._total_steps:
            parts.append(self.time_left())
        self.message("  ".join(filter(None, parts)))

    def _render(self) -> Group:
        line = Table.grid(padding=(0, 2), expand=True)
        line.add_column(no_wrap=True)
        line.add_column(ratio=1)
        line.add_column(no_wrap=True, justify="right")
        line.add_row(
            Text(f"step {self._step}/{self._total_steps}", style="bold"),
            ProgressBar(total=max(self._total_steps, 1), completed=self._step),
            Text(self.time_left()),
        )
        return Group(line, Text("  ·  ".join(self.figures()), style="dim"))
