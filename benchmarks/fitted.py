"""Which searches depend on the numbers that were fitted to compilers.

    python benchmarks/fitted.py [tpu|gpu] [NAME=VALUE[,NAME=VALUE] ...]

Repeats searches with numbers of trainer/plan/fitted.py replaced, by default one after
the other, and prints in which of them the five best candidates, or what fits, change. A
number on which nothing depends has no place in the table.
"""

import argparse
import dataclasses

import jax

from meshloom.trainer.config import files as config_files
from meshloom.trainer.plan import fitted, search
from meshloom.trainer.run.train import Config

XLA, STANDARD = 'model.attention="xla"', 'plan="data+fsdp+tensor+pipeline"'
SEARCHES = {
    "tpu": [
        ("gpt2_124m", "v5e-16", 64, ()),
        ("llama2_7b", "v5e-64", 128, ()),
        ("llama3_8b", "v5p-64", 256, ()),
        ("llama3_8b", "v6e-64", 128, ()),
        ("llama3_8b", "2xv5p-64", 128, ()),
        ("llama3_70b", "v5p-256", 128, ()),
        ("llama2_7b", "v5p-16", 32, (STANDARD,)),
        ("gpt2_124m", "v5e-16", 64, (XLA,)),
    ],
    "gpu": [
        ("gpt2_124m", "h100:1x8", 64, ()),
        ("gpt2_124m", "h100:2x8", 64, (XLA,)),
        ("llama2_7b", "h100:8x8", 128, ()),
        ("llama3_8b", "h100:4x8", 128, ()),
        ("llama3_8b", "a100:8x8", 128, ()),
        ("llama3_8b", "h100:1x8", 16, (STANDARD,)),
        ("llama3_70b", "h100:8x8", 256, ()),
    ],
}
OTHERS = {
    "tpu": "head_streams=0 block_streams=0 stage_streams=0 split_streams=0 "
    "loop_devices=0 loop_devices=1000000 stream_passes=36 working_passes=0.8 "
    "gradient_passes=0 score_passes=0 repeated_score_passes=0",
    "gpu": "head_streams=0 block_streams=0 stage_streams=0 split_streams=0 "
    "stream_passes=16 working_passes=0.8 working_passes=2 gather_passes=0 "
    "gradient_passes=4 hidden_sums=0 score_passes=0 repeated_score_passes=0",
}


def found(platform: str) -> dict[str, tuple[list[str], frozenset[str], float]]:
    """Returns for each search the five best, all that fit, and the best's seconds."""
    result = {}
    for name, target, batch, settings in SEARCHES[platform]:
        config = config_files.load([name], settings, root=Config).config
        done = search(config, target, batch=batch)
        best = done.finalists(5)
        words = f"{name} on {target}{', '.join(['', *settings])}"
        result[words] = (
            [str(candidate.choice) for candidate in best],
            frozenset(str(candidate.choice) for candidate in done.fitting),
            best[0].seconds or 0.0,
        )
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("platform", choices=tuple(SEARCHES))
    parser.add_argument("changes", nargs="*", metavar="NAME=VALUE[,NAME=VALUE]")
    args = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    name = args.platform.upper()
    given = getattr(fitted, name)
    before = found(args.platform)
    for change in args.changes or OTHERS[args.platform].split():
        pairs = (pair.split("=") for pair in change.split(","))
        values = {key: float(value) for key, value in pairs}
        setattr(fitted, name, dataclasses.replace(given, **values))
        after = found(args.platform)
        setattr(fitted, name, given)
        order = [w for w in before if before[w][0] != after[w][0]]
        fits = sum(len(before[w][1] ^ after[w][1]) for w in before)
        step = max(abs(after[w][2] / before[w][2] - 1) for w in before)
        print(
            f"{change}: other order in {len(order)} of {len(before)} searches "
            f"({', '.join(order) or 'none'}), {fits} fit otherwise, "
            f"the best's step changes by up to {step:.1%}",
            flush=True,
        )


if __name__ == "__main__":
    main()
