"""Options of the compiler, as a config writes them: "xla_name=value"."""

from collections.abc import Sequence

WORDS = {"true": True, "false": False}


def parse(options: Sequence[str]) -> dict[str, bool | int | str]:
    """As jax.stages.Lowered.compile takes them."""
    found: dict[str, bool | int | str] = {}
    for option in options:
        name, equals, value = option.partition("=")
        if not (name.startswith("xla_") and equals and value):
            raise ValueError(
                f"compiler_options: {option!r} is none; expected xla_NAME=VALUE, as "
                "XLA_FLAGS has it without the dashes"
            )
        if name in found:
            raise ValueError(f"compiler_options: {name} is there twice; keep one")
        number = int(value) if value.lstrip("-").isdigit() else value
        found[name] = WORDS.get(value, number)
    return found
