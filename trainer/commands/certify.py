"""The command `meshloom certify`."""

import argparse
import sys
from pathlib import Path

from .flags import add_config_flags, command

FAILED = 1  # exit status if any level fails
DEFAULTS = {"steps": 20, "save_at": 10, "drift": 1e-5, "run_seconds": 1800.0}
# Flags that have no meaning with --run.
OF_MESHES = ("config", "set", "workdir", *DEFAULTS)


def add(commands) -> None:
    """Adds `certify` to the commands."""
    parser = command(
        commands,
        "certify",
        _certify,
        "verify that a run continues exactly on other meshes, or that a training "
        "between learners is what its log says; status 1 if not",
    )
    add_config_flags(parser, "default", mesh=False)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument(
        "--meshes",
        nargs="+",
        metavar="SIZES",
        help="for instance fsdp=8 data=2,tensor=4 data=4@2, where @2 means in two "
        "processes; the uninterrupted run uses the first",
    )
    what.add_argument(
        "--run",
        dest="folder",
        type=Path,
        metavar="RUN",
        help="the folder of a finished training between learners, which is computed "
        "again from its log; with no other flag but --json",
    )
    parser.add_argument(
        "--steps",
        type=int,
        metavar="N",
        help=f"steps of each run; default: {DEFAULTS['steps']}",
    )
    parser.add_argument(
        "--save-at",
        type=int,
        metavar="N",
        help=f"the step to continue from; default: {DEFAULTS['save_at']}",
    )
    parser.add_argument(
        "--drift",
        type=float,
        metavar="X",
        help="largest relative difference of a loss between meshes; default: 1e-5",
    )
    parser.add_argument(
        "--run-seconds",
        type=float,
        metavar="S",
        help=f"kill a run after S seconds; default: {DEFAULTS['run_seconds']:g}",
    )
    parser.add_argument(
        "--workdir",
        type=Path,
        metavar="DIR",
        help="a new folder for the runs; default: runs/certify-CONFIG",
    )
    parser.add_argument(
        "--json",
        type=Path,
        metavar="FILE",
        help="also write the certificate to FILE; it is always in the workdir, or RUN",
    )


def _certify(args: argparse.Namespace) -> int:
    if args.folder is not None:
        return _certify_learners(args)
    for name, value in DEFAULTS.items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    import jax

    # This process only compares; the devices are left to the runs.
    jax.config.update("jax_platforms", "cpu")
    from ..verify import certify, certify_meshes

    meshes = tuple(certify_meshes.ProcessMesh.parse(text) for text in args.meshes)
    jax.config.update("jax_num_cpu_devices", max(mesh.devices for mesh in meshes))
    configs = tuple(args.config or ["default"])
    workdir = args.workdir or Path("runs", f"certify-{Path(configs[-1]).stem}")
    job = certify.Certify(
        configs=configs,
        sets=tuple(args.set),
        meshes=meshes,
        workdir=workdir,
        steps=args.steps,
        save_at=args.save_at,
        drift=args.drift,
        seconds=args.run_seconds,
        log=_log,
    )
    try:
        certificate = job.run()
    except certify.RunFailed as error:
        print(f"meshloom: {error}", file=sys.stderr)
        return FAILED
    if args.json:
        args.json.write_text((workdir / certify.FILE).read_text())
    print(f"certificate: {workdir / certify.FILE}")
    print(_verdict(certificate))
    return 0 if certificate["passed"] else FAILED


def _certify_learners(args: argparse.Namespace) -> int:
    for name in OF_MESHES:
        if getattr(args, name) not in (None, []):
            raise ValueError(
                f"--{name.replace('_', '-')} is for --meshes: a training between "
                "learners is computed again as it was; remove the flag"
            )
    from ..verify import certify_learners, replay
    from .devices import use_cpu

    use_cpu(replay.num_devices(args.folder))
    certificate = certify_learners.certify(args.folder, _log)
    path = args.folder / certify_learners.FILE
    if args.json:
        args.json.write_text(path.read_text())
    print(f"certificate: {path}")
    print(certify_learners.verdict_of(certificate))
    return 0 if certificate["passed"] else FAILED


def _log(line: str) -> None:
    print(line, flush=True)


def _verdict(certificate: dict) -> str:
    failed = [row["mesh"] for row in certificate["meshes"] if not row["passed"]]
    if failed:
        return f"certify: FAILED on {', '.join(failed)}"
    count = len(certificate["meshes"])
    return f"certify: state, data and trajectory hold on each of {count} meshes"
