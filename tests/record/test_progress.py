"""Tests of rates, log lines and the live bar on a terminal."""

import io

import pytest
from rich.console import Console

from meshloom.trainer.program.peaks import Peak
from meshloom.trainer.record.progress import Progress, Rate

PEAK = Peak(1e9, "measured matmul peak")


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


def progress_on(text, clock, *, terminal=False, peak: Peak | None = PEAK, **options):
    console = Console(file=text, force_terminal=terminal, width=100)
    return Progress(
        1000, 0, ("tokens", 512), 1e7, peak, console, clock=clock, **options
    )


def test_rate_leaves_the_first_interval_out(clock):
    rate = Rate(clock=clock)
    assert rate.steps_per_s is None
    clock.now += 30.0  # compilation
    assert rate.update(1) is None
    assert rate.steps_per_s is None
    clock.now += 0.5
    assert rate.update(2) == pytest.approx(2.0)
    assert rate.steps_per_s == pytest.approx(2.0)
    clock.now += 0.5
    assert rate.update(12) == pytest.approx(20.0)
    assert rate.steps_per_s == pytest.approx(11.0)


def test_rate_forgets_what_is_older_than_its_window(clock):
    rate = Rate(window=10.0, clock=clock)
    for step in range(100):
        rate.update(step)
        clock.now += 1.0
    for step in range(100, 250):
        rate.update(step)
        clock.now += 0.1
    assert rate.steps_per_s == pytest.approx(10.0)


def test_rate_gives_no_figure_for_no_progress(clock):
    rate = Rate(clock=clock)
    rate.update(5)
    assert rate.update(6) is None  # no time has passed
    clock.now += 1.0
    assert rate.update(5) is None  # no step was done
    assert rate.update(7) == pytest.approx(2.0)


def test_restart_leaves_a_pause_out_and_keeps_the_known_rate(clock):
    rate = Rate(clock=clock)
    rate.update(0)
    clock.now += 1.0
    rate.update(4)
    rate.restart()
    clock.now += 60.0  # evaluation
    assert rate.update(5) is None
    assert rate.steps_per_s == pytest.approx(4.0)
    clock.now += 1.0
    assert rate.update(8) == pytest.approx(3.0)
    assert rate.steps_per_s == pytest.approx(3.0)


def test_figures_are_left_out_before_they_are_measured(clock):
    progress = progress_on(io.StringIO(), clock)
    clock.now += 30.0
    progress.update(1, {"loss": 5.54321})
    assert progress.figures() == ["loss 5.5432"] and progress.time_left() == ""
    clock.now += 2.0
    progress.update(101, {"loss": 4.0})
    # 50 steps/s of 512 tokens and 1e7 FLOPs, and 899 steps to go.
    assert progress.figures() == [
        "loss 4.0000", "25.6 k tokens/s", "50 % of the measured matmul peak"
    ]  # fmt: skip
    assert progress.time_left() == "18 s left"


def test_the_bubble_of_a_pipeline_stands_beside_the_speed(clock):
    progress = progress_on(io.StringIO(), clock, peak=None, bubble=0.158)
    progress.update(1, {"loss": 1.0})
    assert progress.figures() == ["loss 1.0000", "bubble 16 % (simulated)"]
    clock.now += 1.0
    progress.update(2, {"loss": 1.0})
    assert progress.figures() == [
        "loss 1.0000", "512 tokens/s", "bubble 16 % (simulated)"
    ]  # fmt: skip


def test_an_unknown_peak_is_left_out(clock):
    progress = progress_on(io.StringIO(), clock, peak=None)
    for step in (1, 2):
        progress.update(step, {"loss": 1.0})
        clock.now += 1.0
    assert progress.figures() == ["loss 1.0000", "512 tokens/s"]


def run(progress, clock, steps, seconds_per_step):
    with progress:
        for step in steps:
            clock.now += seconds_per_step
            progress.update(step, {"loss": 1.0})


def logged_steps(text):
    return [int(line.split("/")[0].split()[1]) for line in text.splitlines()]


def test_plain_lines_come_every_so_many_steps_with_first_and_last(clock):
    text = io.StringIO()
    run(progress_on(text, clock, every=300), clock, range(1, 1001), 0.01)
    lines = text.getvalue().splitlines()
    assert logged_steps(text.getvalue()) == [1, 301, 601, 901, 1000]
    assert lines[0] == "step 1/1000  loss 1.0000"
    assert lines[1].endswith("100 % of the measured matmul peak  7 s left")
    assert "left" not in lines[-1] and "\x1b" not in text.getvalue()


def test_plain_lines_come_every_ten_seconds_if_steps_are_slow(clock):
    text = io.StringIO()
    # The run stops early, but its last step is still printed.
    run(progress_on(text, clock, every=300), clock, range(1, 13), 4.0)
    assert logged_steps(text.getvalue()) == [1, 4, 7, 10, 12]


def test_only_an_enabled_progress_shows_anything(clock):
    for terminal in (False, True):
        text = io.StringIO()
        progress = progress_on(text, clock, terminal=terminal, enabled=False)
        run(progress, clock, range(1, 1001), 0.1)
        progress.message("hello")
        assert text.getvalue() == ""


def test_terminal_gets_a_live_bar_and_messages_above_it(clock):
    text = io.StringIO()
    with progress_on(text, clock, terminal=True) as progress:
        for step in (250, 500):
            clock.now += 10.0
            progress.update(step, {"loss": 1.5})
        progress.message("[saved] step 500")
    shown = text.getvalue()
    assert "step 500/1000" in shown and "━" in shown and "20 s left" in shown
    assert "12.8 k tokens/s" in shown and "25 % of the measured matmul peak" in shown
    # Brackets are text, not rich markup.
    assert "[saved] step 500" in shown
