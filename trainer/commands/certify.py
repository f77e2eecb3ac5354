"""The command `meshloom certify`."""

import argparse
import sys
from pathlib import Path

from .flags import add_config_flags, command

FAILED = 1  # exit status if any mesh fails a level


def add(commands) -> None:
    """Adds `certify` to the commands."""
    parser = command(
        commands,
        "certify",
        _certify,
        "verify that a run continues exactly on other meshes; status 1 if it does not",
    )
    add_config_flags(parser, "default", mesh=False)
    parser.add_argument(
        "--meshes",
        nargs="+",
        required=True,
        metavar="SIZES",
        help="for instance fsdp=8 data=2,tensor=4 data=4@2, where @2 means in two "
        "processes; the uninterrupted run uses the first",
    )
    parser.add_argument(
        "--steps",
        type=int,
        default=20,
        metavar="N",
        help="steps of each run; default: 20",
    )
    parser.add_argument(
        "--save-at",
        type=int,
        default=10,
        metavar="N",
        help="the step to continue from; default: 10",
    )
    parser.add_argument(
        "--drift",
        type=float,
        default=1e-5,
        metavar="X",
        help="largest relative difference of a loss between meshes; default: 1e-5",
    )
    parser.add_argument(
        "--run-seconds",
        type=float,
        default=1800.0,
        metavar="S",
        help="kill a run after S seconds; default: 1800",
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
        help="also write the certificate to FILE; it is always in the workdir",
    )


def _certify(args: argparse.Namespace) -> int:
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


def _log(line: str) -> None:
    print(line, flush=True)


def _verdict(certificate: dict) -> str:
    failed = [row["mesh"] for row in certificate["meshes"] if not row["passed"]]
    if failed:
        return f"certify: FAILED on {', '.join(failed)}"
    count = len(certificate["meshes"])
    return f"certify: state, data and trajectory hold on each of {count} meshes"
