"""Compiler options, written as "xla_name=value" in a config."""

from collections.abc import Sequence

BOOLEANS = {"true": True, "false": False}


def parse(options: Sequence[str]) -> dict[str, bool | int | str]:
    """Returns the options in the form that `jax.stages.Lowered.compile` takes."""
    parsed: dict[str, bool | int | str] = {}
    for option in options:
        name, equals, value = option.partition("=")
        if not (name.startswith("xla_") and equals and value):
            raise ValueError(
                f"compiler_options: {option!r} is not an option; expected "
                "xla_NAME=VALUE, as in XLA_FLAGS but without the dashes"
            )
        if name in parsed:
            raise ValueError(f"compiler_options: {name} is given twice; remove one")
        number = int(value) if value.lstrip("-").isdigit() else value
        parsed[name] = BOOLEANS.get(value, number)
    return parsed
