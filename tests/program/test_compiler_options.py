"""Tests that compiler options of a config are used, and invalid ones rejected."""

import dataclasses

import pytest
from tiny_plans import config

from meshloom.trainer.program import compiler_options
from meshloom.trainer.run.prepare import prepare


def test_values_are_parsed():
    options = ("xla_a=true", "xla_b=false", "xla_c=12", "xla_d=-1", "xla_e=fast")
    expected = {
        "xla_a": True,
        "xla_b": False,
        "xla_c": 12,
        "xla_d": -1,
        "xla_e": "fast",
    }
    assert compiler_options.parse(options) == expected


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--xla_a=true",), "'--xla_a=true' is not an option; expected xla_NAME=VALUE"),
        (("xla_a",), "expected xla_NAME=VALUE"),
        (("xla_a=1", "xla_a=2"), "xla_a is given twice"),
    ],
)
def test_what_is_no_option(options, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(config(), compiler_options=options)


def small(**settings):
    tiny = config(num_layers=1, d_model=64, d_ff=64, vocab_size=1024)
    return dataclasses.replace(tiny, batch_size=8, eval_batches=0, **settings)


def test_they_reach_the_compiler(monkeypatch):
    prepared = prepare(small(compiler_options=("xla_cpu_enable_fast_math=true",)))
    given = []
    kind = type(prepared.lowered)
    monkeypatch.setattr(kind, "compile", lambda self, **how: given.append(how))
    prepared.compile()
    assert given == [{"compiler_options": {"xla_cpu_enable_fast_math": True}}]


def test_one_that_the_compiler_does_not_know_is_named():
    prepared = prepare(small(compiler_options=("xla_no_such_thing=true",)))
    with pytest.raises(ValueError, match="xla_no_such_thing.*remove it"):
        prepared.compile()
