"""Numbers as text: the one formatter for each kind."""

import math

import pytest

from meshloom.sharding.text import (
    counted,
    duration,
    human_bytes,
    percent,
    seconds_text,
    short_number,
)


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (3 * 2**40, "3.0 TiB")],
)
def test_human_bytes(count, text):
    assert human_bytes(count) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"), (1500, "1.5 k"), (2e6, "2 M"), (0.25, "0.25"), (3e-4, "3e-4"),
        (-12345, "-12.35 k"), (math.inf, "not finite"), (1.33549, "1.335"),
        (999.96, "1 k"), (999_960, "1 M"),
    ],
)  # fmt: skip
def test_short_number(value, text):
    assert short_number(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.5, "0.500"), (12.34, "12.3"), (999.4, "999"), (999.7, "1.00 k"),
     (41234, "41.2 k"), (3.2e6, "3.20 M"), (1.5e14, "150 T")],
)  # fmt: skip
def test_short_number_that_keeps_its_width(value, text):
    assert short_number(value, 3, fixed=True) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(2.5e-5, "25 µs"), (0.0125, "12.5 ms"), (0.9996, "1 s"), (4680.2, "4,680 s")],
)
def test_seconds_text(seconds, text):
    assert seconds_text(seconds) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0 s"), (59.4, "59 s"), (59.6, "1 min 00 s"), (3599, "59 min 59 s"),
     (3 * 3600 + 420, "3 h 07 min"), (49 * 3600, "2 d 01 h")],
)  # fmt: skip
def test_duration(seconds, text):
    assert duration(seconds) == text


def test_shares_and_counts():
    assert percent(0.125) == "12.5 %"
    assert [counted(n, "device") for n in (0, 1)] == ["0 devices", "1 device"]
    assert counted(2, "process") == "2 processes"
