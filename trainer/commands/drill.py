"""The command `meshloom drill`."""

import argparse
from pathlib import Path

from . import drill_fleet
from .flags import command

FAILED = 1  # exit status if the job did not recover from a fault


def add(commands) -> None:
    """Adds `drill` to the commands."""
    parser = command(
        commands,
        "drill",
        _drill,
        "inject faults into a job on this machine, or into learners and a service, and "
        "verify that it recovers exactly; status 1 if it does not",
    )
    parser.add_argument(
        "--config", action="append", metavar="NAME_OR_FILE", help="default: drill"
    )
    parser.add_argument(
        "--set", action="append", default=[], metavar="NAME=VALUE", help="as for train"
    )
    parser.add_argument(
        "--mesh",
        nargs="+",
        default=[""],
        metavar="SIZES[@PROCESSES]",
        help="as for train; data=2,fsdp=2@4 means in 4 processes; may be several",
    )
    parser.add_argument(
        "--faults", nargs="+", metavar="NAME", help="the faults to inject; default: all"
    )
    parser.add_argument("--list", action="store_true", help="list the faults and exit")
    for flag, default, what in (
        ("--processes", 2, "processes of the job"),
        ("--cpu-devices", 1, "devices of each process"),
        ("--soak", 0, "instead of the faults, this many kills at random times"),
        ("--seed", 0, "of these times"),
    ):
        parser.add_argument(
            flag,
            type=int,
            default=default,
            metavar="N",
            help=f"{what}; default: {default}",
        )
    drill_fleet.add_flags(parser)
    parser.add_argument(
        "--limit-seconds",
        type=float,
        default=300.0,
        metavar="S",
        help="a job, or with --learners a start or a recovery, that takes longer has "
        "failed; the soak of a job has a limit of its own; default: %(default)g",
    )
    parser.add_argument(
        "--every",
        type=float,
        metavar="S",
        help="seconds between the kills of a soak; default: soon after each recovery",
    )
    parser.add_argument(
        "--workdir", type=Path, default=Path("runs", "drill"), metavar="DIR"
    )


def _drill(args: argparse.Namespace) -> int:
    if drill_fleet.is_given(args):
        return drill_fleet.run(args)
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
            f"{unknown[0]!r} is not a fault; meshloom drill --list lists them all"
        )
    specs = [_job_spec(args, mesh) for mesh in args.mesh]
    if args.soak and len(specs) > 1:
        raise ValueError(f"a soak takes one --mesh, got {len(specs)}: {args.mesh}")
    workdir, log = drill_fleet.new_folder(args.workdir), drill_fleet.log
    if args.soak:
        found = soak.run(specs[0], workdir, args.soak, args.every, args.seed, log)
        print(found)
        found.write(workdir / "soak.json")
        return FAILED if found.problem else 0
    results = []
    for number, spec in enumerate(specs):
        folder = workdir / str(number) if len(specs) > 1 else workdir
        results += drill.run(spec, folder, names, log)
    drill.write(workdir / "drill.json", results)
    print(drill.table(results))
    return FAILED if any(result.problem for result in results) else 0


def _job_spec(args: argparse.Namespace, text: str):
    """Returns how to run jobs on a mesh such as "fsdp=2" or "fsdp=4@4"."""
    from ...sharding import MeshSpec
    from ..verify.drill_job import JobSpec

    steps, save_every = args.steps or 600, args.save_every or 25
    mesh, processes = drill_fleet.mesh_of(text, default=args.processes)
    least = 4 * save_every
    if processes < 2 or save_every < 1 or steps < least:
        raise ValueError(
            f"a drill needs at least 2 processes and {least} steps (four times "
            f"--save-every), got {processes} and {steps}"
        )
    if mesh:
        MeshSpec.parse(mesh).abstract(processes * args.cpu_devices)
    train = [
        *(part for name in args.config or ["drill"] for part in ("--config", name)),
        *(part for text in args.set for part in ("--set", text)),
    ]
    return JobSpec(
        tuple(train),
        mesh,
        processes=processes,
        cpu_devices=args.cpu_devices,
        num_steps=steps,
        save_every=save_every,
        limit_seconds=args.limit_seconds,
    )
