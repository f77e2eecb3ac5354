"""The command `meshloom doctor`."""

import argparse
from collections.abc import Iterator
from pathlib import Path

from .flags import add_config_flags, command

UNFIT = 1  # exit status if there is a problem


def add(commands) -> None:
    """Adds `doctor` to the commands."""
    parser = command(
        commands,
        "doctor",
        _doctor,
        "check whether this machine is ready to train; status 1 if something is wrong",
    )
    add_config_flags(parser, None, mesh=False)
    parser.add_argument(
        "--workdir", type=Path, metavar="DIR", help="the run folder; default: runs"
    )
    where = parser.add_mutually_exclusive_group()
    where.add_argument(
        "--address", help="address to listen on; default: that of the host name"
    )
    where.add_argument(
        "--interface", metavar="NAME", help="the same by interface, such as eth0"
    )
    parser.add_argument(
        "--port",
        type=int,
        default=0,
        metavar="N",
        help="port of the coordinator; default: any that is free",
    )
    parser.add_argument(
        "--seconds",
        type=float,
        default=20.0,
        metavar="S",
        help="how long jax may take to start, and the data to open; default: 20",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def _doctor(args: argparse.Namespace) -> int:
    import json
    import os
    import socket

    from ..doctor import findings as doctor
    from ..doctor import machine as doctor_machine
    from ..doctor import network as doctor_network
    from ..doctor import storage as doctor_storage
    from ..doctor.probe_process import ProbeProcess

    if not 0 <= args.port <= 65535:
        raise ValueError(f"--port must be 0 to 65535, got {args.port}")
    if args.seconds <= 0:
        raise ValueError(f"--seconds must be > 0, got {args.seconds:g}")
    if args.set and not args.config:
        raise ValueError("--set changes a config; give it with --config")
    probe = ProbeProcess("devices", environ=os.environ, seconds=args.seconds)
    config = None
    if args.config:
        lists = (json.dumps(args.config), json.dumps(args.set))
        on_cpu = {**os.environ, "JAX_PLATFORMS": "cpu"}
        config = ProbeProcess("config", *lists, environ=on_cpu, seconds=args.seconds)
    name = socket.gethostname()
    addresses = doctor_network.resolve(name)

    def check_config() -> Iterator[doctor.Finding]:
        if config is not None:
            yield from _config(config.result())

    report = doctor.examine(
        [
            ("packages", doctor_machine.installed),
            ("machine", doctor_machine.machine),
            ("host name", lambda: doctor_network.host(name, addresses)),
            (
                "port",
                lambda: doctor_network.port(
                    args.port,
                    address=args.address,
                    interface=args.interface,
                    addresses=addresses,
                ),
            ),
            ("scheduler", lambda: doctor_network.scheduler(os.environ)),
            ("variables", lambda: doctor_network.variables(os.environ)),
            (
                "run folder",
                lambda: doctor_storage.folder(
                    "run folder", args.workdir or Path("runs")
                ),
            ),
            ("config", check_config),
            ("devices", lambda: doctor_machine.devices(probe.result(), os.environ)),
        ]
    )
    print(report.to_json() if args.json else report)
    return UNFIT if report.count("problem") else 0


def _config(answer: dict) -> Iterator:
    from ..doctor import storage as doctor_storage
    from ..doctor.findings import Finding

    if error := answer.get("error"):
        remedy = "Fix that; meshloom train --dry-run checks the rest of the config."
        yield Finding("config", error, "problem", remedy)
        return
    about = ", ".join(f"{name} {value}" for name, value in answer["data"].items())
    yield Finding("data", about)
    folder = answer["checkpoint_folder"]
    if folder is None:
        yield Finding("checkpoints", "in the run folder")
    elif "exists" in answer:
        status = "exists" if answer["exists"] else "can be reached, and will be created"
        yield Finding("checkpoints", f"{folder} {status}")
    else:
        yield from doctor_storage.folder("checkpoints", Path(folder))
