"""The command `meshloom drill`."""

import argparse
from collections.abc import Callable
from pathlib import Path

FAILED = 1  # exit status where a fault was not recovered from


def add(commands, command: Callable[..., argparse.ArgumentParser]) -> None:
    """Adds `drill` to the commands; `command` makes a parser with what it runs."""
    parser = command(
        commands,
        "drill",
        _drill,
        "strike a job on this machine with faults, and prove that it comes back "
        "exactly; status 1 if it does not",
    )
    parser.add_argument(
        "--config", action="append", metavar="NAME_OR_FILE", help="default: drill"
    )
    parser.add_argument(
        "--set", action="append", default=[], metavar="NAME=VALUE", help="as of train"
    )
    parser.add_argument(
        "--mesh",
        nargs="+",
        default=[""],
        metavar="SIZES[@PROCESSES]",
        help="as of train; data=2,fsdp=2@4 is in 4 processes. Of several, a table",
    )
    parser.add_argument(
        "--faults", nargs="+", metavar="NAME", help="some of them; default: all"
    )
    parser.add_argument("--list", action="store_true", help="name the faults and stop")
    for flag, default, what in (
        ("--processes", 2, "of the job"),
        ("--cpu-devices", 1, "in each process"),
        ("--steps", 600, "of each run"),
        ("--save-every", 25, "steps"),
        ("--soak", 0, "instead of the faults, this many kills at random moments"),
        ("--seed", 0, "of the moments"),
    ):
        parser.add_argument(
            flag,
            type=int,
            default=default,
            metavar="N",
            help=f"{what}; default: {default}",
        )
    parser.add_argument(
        "--every",
        type=float,
        metavar="S",
        help="seconds between the kills of a soak; default: soon after each return",
    )
    parser.add_argument(
        "--workdir", type=Path, default=Path("runs", "drill"), metavar="DIR"
    )


def _drill(args: argparse.Namespace) -> int:
    import jax

    jax.config.update("jax_platforms", "cpu")
    from ..verify import drill, soak
    from ..verify.drill_faults import FAULTS

    if args.list:
        print("\n".join(FAULTS))
        return 0
    names = args.faults or list(FAULTS)
    if unknown := [name for name in names if name not in FAULTS]:
        raise ValueError(
            f"fault {unknown[0]!r} is unknown; meshloom drill --list names them all"
        )
    plans = [_plan(args, mesh) for mesh in args.mesh]
    if args.soak and len(plans) > 1:
        raise ValueError(f"a soak takes one --mesh, got {len(plans)}: {args.mesh}")
    if args.workdir.exists() and any(args.workdir.iterdir()):
        raise ValueError(
            f"{args.workdir} is not empty. Remove it, or choose another --workdir."
        )
    workdir = args.workdir.absolute()

    def say(text: str) -> None:
        print(text, flush=True)

    if args.soak:
        found = soak.run(plans[0], workdir, args.soak, args.every, args.seed, say)
        print(found)
        found.write(workdir / "soak.json")
        return FAILED if found.problem else 0
    results = []
    for number, plan in enumerate(plans):
        folder = workdir / str(number) if len(plans) > 1 else workdir
        results += drill.run(plan, folder, names, say)
    drill.write(workdir / "drill.json", results)
    print(drill.table(results))
    return FAILED if any(result.problem for result in results) else 0


def _plan(args: argparse.Namespace, text: str):
    """How jobs are run on a mesh such as "fsdp=2" or "fsdp=4@4"."""
    from ...sharding import MeshSpec
    from ..verify.drill_job import Plan

    mesh, at, count = text.partition("@")
    if at and not count.isdigit():
        raise ValueError(
            f"--mesh {text}: expected a number of processes after @, found {count!r}. "
            "Write it as fsdp=4@4."
        )
    processes, least = int(count or args.processes), 4 * args.save_every
    if processes < 2 or args.save_every < 1 or args.steps < least:
        raise ValueError(
            f"a drill needs at least 2 processes and {least} steps (four times "
            f"--save-every), got {processes} and {args.steps}"
        )
    if mesh:
        MeshSpec.parse(mesh).abstract(processes * args.cpu_devices)
    train = [
        *(part for name in args.config or ["drill"] for part in ("--config", name)),
        *(part for text in args.set for part in ("--set", text)),
    ]
    return Plan(
        tuple(train),
        mesh,
        processes=processes,
        cpu_devices=args.cpu_devices,
        num_steps=args.steps,
        save_every=args.save_every,
    )
