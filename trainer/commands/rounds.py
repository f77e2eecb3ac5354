"""The commands `meshloom rounds simulate` and `meshloom rounds compare`."""

import argparse
import ast
import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import rounds_replay
from .flags import add_config_flags, command

if TYPE_CHECKING:
    from ...service.rounds.cluster import Cluster, Outcome
    from ...service.rounds.policy import Policy

ALL = "all"
CONFIG = "drill"
LINK_UNITS = {"kbit": 125.0, "Mbit": 1.25e5, "Gbit": 1.25e8}
BYTES_PER_PARAMETER = 4  # contributions are float32


def add(commands) -> None:
    parser = command(
        commands,
        "rounds",
        _no_action,
        "choose how learners wait for each other, before renting anything",
    )
    actions = parser.add_subparsers(metavar="ACTION")
    simulate = command(
        actions,
        "simulate",
        _simulate,
        "simulate learners, links and failures: rounds/s, goodput, staleness, bytes",
    )
    simulate.add_argument(
        "--mode",
        default=ALL,
        help="a mode such as sync or diloco; default: all of them in one table",
    )
    _add_cluster_flags(simulate)
    simulate.add_argument(
        "--rounds",
        type=int,
        default=50,
        metavar="N",
        help="how often all parameters are exchanged; with --mode all, that of the "
        "mode with the most local steps; default: 50",
    )
    simulate.add_argument("--svg", type=Path, metavar="FILE", help="write a picture")
    simulate.add_argument("--json", action="store_true", help="print JSON")
    rounds_replay.add(actions)
    compare = command(
        actions,
        "compare",
        _compare,
        "train a small model in several modes, in one process and simulated time",
    )
    compare.add_argument(
        "--modes",
        nargs="+",
        metavar="MODE",
        help="modes to compare; default: all of them",
    )
    _add_cluster_flags(compare)
    add_config_flags(compare, CONFIG, mesh=False)
    compare.add_argument(
        "--steps",
        type=int,
        default=192,
        metavar="N",
        help="local steps of each learner; default: 192",
    )
    compare.add_argument("--svg", type=Path, metavar="FILE", help="write a plot")
    compare.add_argument("--json", action="store_true", help="print JSON")


def _add_cluster_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags that describe learners, links and the policy."""
    numbers = {
        "--step-seconds": (0.5, "seconds of a local step"),
        "--jitter": (0.02, "deviation of a round's duration, as a share"),
        "--params": (1e8, "number of parameters, such as 1e9"),
        "--latency": (0.0, "seconds that a message takes"),
        "--restart": (60.0, "seconds from a failure until a learner is back"),
    }
    parser.add_argument("--learners", type=int, default=8, metavar="N")
    for flag, (default, help) in numbers.items():
        parser.add_argument(
            flag,
            type=float,
            default=default,
            metavar="X",
            help=f"{help}; default: {default:g}",
        )
    parser.add_argument(
        "--slow",
        action="append",
        default=[],
        metavar="NxF",
        help="make N of the learners F times slower, such as 1x4; may be repeated",
    )
    parser.add_argument(
        "--link",
        default="1Gbit",
        help="speed of a learner's link each way; default: 1Gbit",
    )
    parser.add_argument(
        "--mtbf",
        type=float,
        metavar="SECONDS",
        help="mean time between failures of a learner; default: they never fail",
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N")
    parser.add_argument(
        "--policy",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="override a setting of the policy, such as --policy local_steps=100; "
        "may be repeated",
    )


def _no_action(args: argparse.Namespace) -> None:
    del args
    raise ValueError(
        "rounds: an action is missing; expected simulate, compare or replay"
    )


def _simulate(args: argparse.Namespace) -> None:
    from ...service.rounds import picture
    from ...service.rounds.policy import PRESETS
    from ...service.rounds.simulate import simulate

    if args.rounds < 1:
        raise ValueError(f"--rounds must be >= 1, got {args.rounds}")
    if args.mode == ALL and args.svg is not None:
        raise ValueError("--svg draws one run: name its mode by --mode")
    modes = list(PRESETS) if args.mode == ALL else [args.mode]
    policies = {mode: policy_of(mode, args.policy) for mode in modes}
    cluster = cluster_of(args)
    num_slow = sum(count for count, _ in _slow(args))
    num_steps = args.rounds * max(p.local_steps for p in policies.values())
    rows = []
    for mode, policy in policies.items():
        turns = -(-num_steps // policy.local_steps)
        num_rounds = turns * policy.fragments
        outcome = simulate(policy, cluster, num_rounds, record=args.svg is not None)
        cost = _straggler_cost(policy, cluster, num_rounds, outcome, num_slow)
        rows.append((mode, outcome, cost))
    if args.svg is not None:
        title = f"{args.mode}, {args.learners} learners"
        until = rows[0][1].commits[: 8 * policies[args.mode].fragments][-1]
        args.svg.write_text(picture.svg(title, rows[0][1], until), encoding="utf-8")
    if args.json:
        found = [
            {"mode": mode, "straggler_cost": cost} | outcome.to_json()
            for mode, outcome, cost in rows
        ]
        print(json.dumps(found, indent=1))
        return
    _show(args, rows)


def _compare(args: argparse.Namespace) -> None:
    from ...service.rounds.policy import PRESETS

    modes = list(dict.fromkeys(args.modes or PRESETS))
    policies = {mode: policy_of(mode, args.policy) for mode in modes}
    cluster = cluster_of(args)
    for mode, policy in policies.items():
        policy.check_learners(args.learners)
        try:
            policy.num_rounds(args.steps)
        except ValueError as error:
            raise ValueError(f"--steps, mode {mode!r}: {error}") from None

    from ..config import files as config_files
    from ..run.train import Config
    from ..verify import compare as compare_lib
    from ..verify import compare_plot

    names = args.config or [CONFIG]
    bindings = [*args.set, f"num_steps={args.steps}"]
    config = config_files.load(names, bindings, root=Config).config
    results = compare_lib.compare(config, policies, cluster)
    if args.svg is not None:
        args.svg.write_text(compare_plot.svg(results), encoding="utf-8")
    if args.json:
        print(json.dumps([result.to_json() for result in results], indent=1))
        return
    print(compare_plot.table(results))
    if args.svg is not None:
        print(f"\nThe plot is in {args.svg}.")


def policy_of(mode: str, settings: list[str]) -> "Policy":
    """Returns the policy of a mode with the settings of --policy."""
    from ...service.rounds.policy import make_policy

    overrides: dict[str, Any] = {}
    for words in settings:
        name, equals, value = words.partition("=")
        if not equals:
            raise ValueError(f"--policy {words!r}: expected NAME=VALUE")
        try:
            overrides[name] = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            overrides[name] = value  # a word, such as late=drop
    return make_policy(mode, **overrides)


def cluster_of(args: argparse.Namespace) -> "Cluster":
    """Returns the learners and links that the flags describe; slow ones come first."""
    from ...service.rounds.cluster import Cluster

    if args.learners < 1:
        raise ValueError(f"--learners must be >= 1, got {args.learners}")
    if args.step_seconds <= 0:
        raise ValueError(f"--step-seconds must be > 0, got {args.step_seconds:g}")
    factors = [factor for count, factor in _slow(args) for _ in range(count)]
    if len(factors) > args.learners:
        raise ValueError(
            f"--slow names {len(factors)} learners, but --learners is {args.learners}"
        )
    factors += [1.0] * (args.learners - len(factors))
    found = re.fullmatch(rf"(\d+(?:\.\d+)?) ?({'|'.join(LINK_UNITS)})", args.link)
    speed = float(found[1]) * LINK_UNITS[found[2]] if found else 0.0
    if not speed:
        raise ValueError(
            f"--link {args.link!r}: expected a number above 0 with "
            f"{', '.join(LINK_UNITS)}, such as 1Gbit"
        )
    return Cluster(
        step_seconds=tuple(args.step_seconds * factor for factor in factors),
        jitter=args.jitter,
        param_bytes=round(args.params * BYTES_PER_PARAMETER),
        up=speed,
        down=speed,
        latency=args.latency,
        mean_uptime=args.mtbf,
        restart_seconds=args.restart,
        seed=args.seed,
    )


def _slow(args: argparse.Namespace) -> list[tuple[int, float]]:
    found = []
    for words in args.slow:
        match = re.fullmatch(r"(\d+)x(\d+(?:\.\d+)?)", words)
        if not match or float(match[2]) <= 0:
            raise ValueError(
                f"--slow {words!r}: expected NUMBERxFACTOR, such as 1x4 for one "
                "learner that is four times slower"
            )
        found.append((int(match[1]), float(match[2])))
    return found


def _straggler_cost(
    policy: "Policy",
    cluster: "Cluster",
    num_rounds: int,
    outcome: "Outcome",
    num_slow: int,
) -> float | None:
    """Returns the share of their steps/s that the others lose to the slow ones.

    It is measured against a run without the slow learners; None without any, or if the
    others are fewer than the quorum.
    """
    import dataclasses

    from ...service.rounds.simulate import simulate

    num_learners = len(cluster.step_seconds)
    rest = cluster.step_seconds[num_slow:]
    is_count = isinstance(policy.quorum, int)
    if not num_slow or not rest or (is_count and policy.quorum > len(rest)):
        return None
    alone = dataclasses.replace(cluster, step_seconds=rest)
    without = simulate(policy, alone, num_rounds)
    mine = outcome.steps_per_second(range(num_slow, num_learners))
    return 1 - mine / without.steps_per_second(range(len(rest)))


def _show(
    args: argparse.Namespace, rows: list[tuple[str, "Outcome", float | None]]
) -> None:
    from rich.console import Console
    from rich.text import Text

    from ...sharding.text import align, human_bytes, seconds_text

    head = "mode|time|rounds/s|goodput|waiting|straggler costs|staleness mean, max"
    table: list[list[str]] = [[*head.split("|"), "dropped", "sent a learner"]]
    for mode, outcome, cost in rows:
        sent = sum(x.bytes_up for x in outcome.learners) / len(outcome.learners)
        table.append(
            [
                mode,
                seconds_text(outcome.seconds),
                f"{outcome.rounds_per_second:.3g}",
                f"{100 * outcome.goodput:.1f} %",
                f"{100 * outcome.waiting:.1f} %",
                "-" if cost is None else f"{100 * cost:.1f} %",
                f"{outcome.mean_staleness:.2f}, {max(outcome.staleness, default=0)}",
                str(outcome.num_dropped),
                human_bytes(sent),
            ]
        )
    lines = [align(table, right=range(1, len(table[0])))]
    if len(rows) == 1:
        lines += ["", *_details(rows[0][1])]
    if args.svg is not None:
        lines += ["", f"The picture is in {args.svg}."]
    Console().print(Text("\n".join(lines)), soft_wrap=True)


def _details(outcome: "Outcome") -> list[str]:
    """Returns the staleness histogram, and the learners that differ."""
    from ...sharding.text import align, human_bytes

    count = sum(outcome.staleness.values())
    ages = [("commits old", "contributions")] + [
        (str(age), f"{100 * n / count:.1f} %")
        for age, n in sorted(outcome.staleness.items())[:12]
    ]
    rows = [("learner", "seconds a step", "waiting", "sent", "received")]
    for learner in outcome.learners[:12]:
        rows.append(
            (
                str(learner.index),
                f"{learner.step_seconds:g}",
                f"{100 * learner.waiting:.1f} %",
                human_bytes(learner.bytes_up),
                human_bytes(learner.bytes_down),
            )
        )
    left_out = len(outcome.learners) - 12
    more = [f"{left_out} more learners: see --json."] if left_out > 0 else []
    tables = align(rows, right=range(5)), align(ages, right=range(2))
    return [tables[0], *more, "", tables[1]]
