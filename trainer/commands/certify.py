"""The command `meshloom certify`."""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

FAILED = 1  # exit status where a level of any mesh fails


def add(
    commands,
    command: Callable[..., argparse.ArgumentParser],
    config_flags: Callable[..., None],
) -> None:
    """Adds `certify` to the commands.

    Args:
      command: makes a parser with what it runs.
      config_flags: adds --config and --set to a parser.
    """
    parser = command(
        commands,
        "certify",
        _certify,
        "prove that a run continues exactly on other meshes; status 1 if it does not",
    )
    config_flags(parser, "default", mesh=False)
    parser.add_argument(
        "--meshes",
        nargs="+",
        required=True,
        metavar="SIZES",
        help="for instance fsdp=8 data=2,tensor=4 data=4@2; @2 is in two processes; "
        "the uninterrupted run is on the first",
    )
    parser.add_argument(
        "--steps", type=int, default=20, metavar="N", help="of each run; default: 20"
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
        help="largest relative difference of a loss on another mesh; default: 1e-5",
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
        help="write the certificate there too, beside certificate.json in the workdir",
    )


def _certify(args: argparse.Namespace) -> int:
    import jax

    # This process only checks and compares; devices are for the runs.
    jax.config.update("jax_platforms", "cpu")
    from ..verify import certify, certify_meshes

    targets = tuple(certify_meshes.Target.parse(text) for text in args.meshes)
    jax.config.update("jax_num_cpu_devices", max(t.devices for t in targets))
    configs = tuple(args.config or ["default"])
    workdir = args.workdir or Path("runs", f"certify-{Path(configs[-1]).stem}")
    job = certify.Certify(
        configs=configs,
        sets=tuple(args.set),
        targets=targets,
        workdir=workdir,
        steps=args.steps,
        save_at=args.save_at,
        drift=args.drift,
        seconds=args.run_seconds,
        say=_say,
    )
    try:
        found = job.run()
    except certify.RunFailed as error:
        print(f"meshloom: {error}", file=sys.stderr)
        return FAILED
    if args.json:
        args.json.write_text((workdir / certify.FILE).read_text())
    print(f"certificate: {workdir / certify.FILE}")
    print(_verdict(found))
    return 0 if found["passed"] else FAILED


def _say(line: str) -> None:
    print(line, flush=True)


def _verdict(found: dict) -> str:
    failed = [row["mesh"] for row in found["meshes"] if not row["passed"]]
    if failed:
        return f"certify: FAILED on {', '.join(failed)}"
    count = len(found["meshes"])
    return f"certify: state, data and trajectory hold on each of {count} meshes"
