"""`meshloom drill --learners N`: faults in a training between learners."""

import argparse
import random
from collections.abc import Iterable, Mapping
from pathlib import Path

FAILED = 1  # exit status if the training did not recover from a fault
# The default config has blocks for several servers, and rounds that take their time
# without a core, so that a fault finds a training that goes on.
DEFAULT = (
    *("--config", "drill", "--set", "exchange.block_bytes=4096"),
    *("--set", "exchange.wait=0.5"),
)
STEPS, SAVE_EVERY = 200, 10


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of a drill of learners, and those with another default there."""
    parser.add_argument(
        "--learners",
        type=int,
        metavar="N",
        help="drill a training of N learners that exchange parameters through a "
        "service instead of one job; see docs/service.md",
    )
    parser.add_argument(
        "--servers", type=int, metavar="M", help="of that service; default: 2"
    )
    parser.add_argument(
        "--copies",
        type=int,
        choices=(1, 2),
        metavar="N",
        help="servers that hold each block, as for launch; default: 1",
    )
    for flag, job, learners, what in (
        ("--steps", 600, STEPS, "steps of each run"),
        ("--save-every", 25, SAVE_EVERY, "steps, or commits, between checkpoints"),
    ):
        text = f"{what}; default: {job}, and {learners} with --learners"
        parser.add_argument(flag, type=int, metavar="N", help=text)


def is_given(args: argparse.Namespace) -> bool:
    """Returns whether learners are to be drilled; checks the flags of that."""
    if args.learners is None:
        for flag in ("servers", "copies"):
            if getattr(args, flag) is not None:
                raise ValueError(
                    f"--{flag} needs --learners; add it, or leave both out"
                )
        return False
    for name in ("learners", "servers", "steps", "save_every"):
        value, flag = getattr(args, name), f"--{name.replace('_', '-')}"
        if value is not None and value < 1:
            raise ValueError(f"{flag} must be >= 1, got {value}")
    if args.processes != 2 or len(args.mesh) > 1:
        raise ValueError(
            "a drill of learners takes one --mesh, that of each learner. Leave out "
            "--processes: --mesh fsdp=2@2 means learners of two processes each"
        )
    return True


def run(args: argparse.Namespace) -> int:
    from ...sharding import MeshSpec
    from ..verify import fleet_drill, fleet_soak
    from ..verify.fleet_faults import FAULTS, KILLS
    from ..verify.fleet_spec import FleetSpec

    if args.list:
        print("\n".join(FAULTS))
        return 0
    names = _names(args.faults, KILLS if args.soak else FAULTS)
    train = list(DEFAULT)
    if args.config:
        train = [part for name in args.config for part in ("--config", name)]
    train += [part for text in args.set for part in ("--set", text)]
    mesh, processes = mesh_of(args.mesh[0], default=1)
    if mesh:
        MeshSpec.parse(mesh).abstract(processes * args.cpu_devices)
        train += ["--mesh", mesh]
    spec = FleetSpec(
        tuple(train),
        learners=args.learners,
        servers=args.servers or 2,
        cpu_devices=args.cpu_devices,
        num_steps=args.steps or STEPS,
        save_every=args.save_every or SAVE_EVERY,
        limit_seconds=args.limit_seconds,
        processes=processes,
        copies=args.copies or 1,
    )
    workdir = new_folder(args.workdir)
    if args.soak:
        rng = random.Random(args.seed)
        names = [rng.choice(names) for _ in range(args.soak)]

    def keep(trainings: list) -> None:
        """Writes what there is so far: you may stop a long drill."""
        if args.soak:
            found = fleet_soak.summary(trainings, args.soak)
            fleet_drill.write(workdir / "soak.json", trainings, found)
        else:
            fleet_drill.write(workdir / "drill.json", trainings)

    trainings = fleet_drill.run(
        spec, workdir, names, log, every=args.every, seed=args.seed, keep=keep
    )
    if args.soak:
        print(fleet_soak.describe(fleet_soak.summary(trainings, args.soak)))
    else:
        print(fleet_drill.table(trainings))
    return FAILED if fleet_drill.has_failed(trainings) else 0


def mesh_of(text: str, *, default: int) -> tuple[str, int]:
    """Returns the mesh and the number of processes of a flag such as fsdp=4@4."""
    mesh, at, count = text.partition("@")
    if at and (not count.isdigit() or int(count) < 1):
        raise ValueError(
            f"--mesh {text}: expected a number of processes after @, found {count!r}. "
            "Write it as fsdp=4@4."
        )
    return mesh, int(count or default)


def _names(given: list[str] | None, default: Iterable[str]) -> list[str]:
    """Returns the faults to inject: those given, or all that are possible here."""
    from ..verify.fleet_faults import FAULTS, impossible

    cannot = impossible()
    if given:
        for name in check_names(given, FAULTS):
            if name in cannot:
                raise ValueError(f"{name}: {cannot[name]}; leave it out of --faults")
        return given
    names = list(default)
    for name in names:
        if name in cannot:
            log(f"{name}: skipped: {cannot[name]}")
    return [name for name in names if name not in cannot]


def check_names(names: list[str], faults: Mapping[str, object]) -> list[str]:
    """Returns the names of faults, if all are known."""
    if unknown := [name for name in names if name not in faults]:
        raise ValueError(
            f"{unknown[0]!r} is not a fault; meshloom drill --list lists them all, and "
            "with --learners those of learners"
        )
    return names


def new_folder(folder: Path) -> Path:
    """Returns the absolute path of a folder that has nothing in it."""
    if folder.exists() and any(folder.iterdir()):
        raise ValueError(
            f"{folder} is not empty. Remove it, or choose another --workdir."
        )
    return folder.absolute()


def log(text: str) -> None:
    print(text, flush=True)
