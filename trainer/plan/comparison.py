"""Compares a forecast with what a run measured."""

from collections.abc import Mapping
from typing import Any

from ...sharding.text import human_bytes, seconds_text

# A forecast outside this range of what was measured is far off.
CLOSE = (0.5, 2.0)


def compare(document: Mapping[str, Any]) -> list[str]:
    """Returns a line on forecast.json, and one for each figure that is far off.

    Without a forecast or measured figures there is nothing to compare.
    """
    if "measured" not in document:
        return []
    expected = {
        "memory": document["plan"]["memory"]["peak"],
        "seconds": document["seconds"],
    }
    found = document["measured"]
    ratios = {
        name: expected[name] / found[name]
        for name in expected
        if found[name] and expected[name] is not None
    }
    memory, step = "memory unknown", "no step time: too few steps"
    if "memory" in ratios:
        memory = (
            f"{found['memory_of']} {human_bytes(found['memory'])} "
            f"(forecast {ratios['memory']:.2f} of it)"
        )
    if found["seconds"]:
        step = f"median step {seconds_text(found['seconds'])}"
    if "seconds" in ratios:
        step += f" ({ratios['seconds']:.2f})"
    words = f"Forecast {human_bytes(expected['memory'])}"
    if expected["seconds"] is not None:
        words += f" and {seconds_text(expected['seconds'])} a step"
    lines = [f"{words}; {memory}, {step}"]
    names = {"memory": "Memory", "seconds": "The step time"}
    for name, ratio in ratios.items():
        if not CLOSE[0] <= ratio <= CLOSE[1]:
            lines.append(
                f"{names[name]} is far off: {1 / ratio:.3g} times its forecast"
            )
    return lines
