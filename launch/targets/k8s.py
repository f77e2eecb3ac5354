"""`meshloom launch k8s`: a job on several hosts of a Kubernetes cluster.

It prints the manifest of a JobSet (or a Kubeflow TrainJob), and with --apply starts and
follows the job. The cluster watches and restarts it instead of our supervisor.
"""

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from .. import fleet_flags
from .k8s_cluster import Kubernetes
from .k8s_job import FORMS, Job, chips_of

SUMMARY = (
    "print the Kubernetes manifest of a command that runs as one process on each of "
    "several hosts, or start it"
)
STOPPED_FOLLOWING = 130  # what shells report for Ctrl-C


def add_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--name", required=True, help="name of the job")
    add("--image", default="", help="a container image with meshloom installed")
    add("--namespace", default="default", metavar="NAME")
    add("--hosts", type=int, metavar="N", help="hosts per slice; for TPUs, derived")
    add(
        "--slices",
        type=int,
        default=1,
        metavar="N",
        help="number of TPU slices; default: 1",
    )
    add("--tpu-accelerator", metavar="NAME", help="such as tpu-v5-lite-podslice")
    add("--tpu-topology", metavar="SIZES", help="topology of a slice, such as 4x4")
    add("--chips-per-host", type=int, default=4, metavar="N", help="default: 4")
    add("--gpus", type=int, default=0, metavar="N", help="GPUs per host")
    _add_pairs(parser, "--request", "NAME=AMOUNT", "resources per host, such as cpu=8")
    _add_pairs(parser, "--volume", "CLAIM:FOLDER", "mount a persistent volume claim")
    _add_pairs(
        parser, "--env", "NAME=VALUE", "a variable, in plain text in the manifest"
    )
    _add_pairs(
        parser, "--secret-env", "NAME=SECRET:KEY", "a variable, from a key of a Secret"
    )
    add("--queue", default="", metavar="NAME", help="a Kueue queue")
    add(
        "--grace-seconds",
        type=int,
        default=120,
        metavar="S",
        help="to save when told to stop: more than a checkpoint takes; default: 120",
    )
    add(
        "--max-restarts",
        type=int,
        metavar="N",
        help="restarts of the whole job, in total; default: 5",
    )
    add(
        "--port",
        type=int,
        default=8476,
        metavar="N",
        help="port of process 0, where all processes join; default: 8476",
    )
    add("--form", choices=FORMS, default="jobset", help="default: jobset")
    add(
        "--runtime",
        default="jax-distributed",
        metavar="NAME",
        help="runtime of a TrainJob; default: jax-distributed",
    )
    _add_fleet(parser)
    add(
        "--no-network-policy",
        action="store_true",
        help="leave it out; by default only the job's own pods can reach its ports",
    )
    action = parser.add_mutually_exclusive_group()
    action.add_argument(
        "--apply", action="store_true", help="start the job and follow it"
    )
    action.add_argument("--delete", action="store_true", help="stop the job")
    add("--detach", action="store_true", help="with --apply: do not follow the job")
    add(
        "command",
        nargs="*",
        metavar="COMMAND",
        help="a meshloom command, after --, such as -- train --steps 100",
    )


def _add_fleet(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("learners that do not wait for each other")
    add = add.add_argument
    add("--learners", type=int, metavar="N", help="N jobs, each on --hosts hosts")
    add("--servers", type=int, metavar="M", help="of their service; default: 1")
    add(
        "--save-commits",
        type=int,
        metavar="N",
        help="commits between two checkpoints of the service; default: that of serve",
    )
    add(
        "--token-secret",
        metavar="SECRET:KEY",
        help="key of a Secret that learners and service show each other; required",
    )


def _add_pairs(parser, flag: str, form: str, help: str) -> None:
    help = f"{help}; may be repeated"
    parser.add_argument(flag, action="append", default=[], metavar=form, help=help)


def launch(args: argparse.Namespace) -> int:
    """Prints, starts or stops a job; returns the exit code."""
    target = Kubernetes(_job(args))
    if args.delete:
        target.stop()
        return 0
    if not args.apply:
        if args.detach:
            raise ValueError("--detach needs --apply; leave it out")
        sys.stdout.write(target.manifest())
        return 0
    target.start()
    if args.detach:
        print(f"The job is running. To stop it: {target.stop_command}")
        return 0
    try:
        return target.follow()
    except KeyboardInterrupt:
        print(f"The job keeps running. To stop it: {target.stop_command}")
        return STOPPED_FOLLOWING


def _job(args: argparse.Namespace) -> Job:
    if not args.delete and not (args.image and args.command):
        raise ValueError(
            "--image and a COMMAND after -- are required to start a job, such as "
            "--image me/meshloom:1 -- train --config gpt2_124m"
        )
    hosts, devices, tpu = args.hosts, args.gpus, None
    if args.tpu_accelerator or args.tpu_topology:
        tpu, devices = _tpu(args), args.chips_per_host
        if devices < 1:
            raise ValueError(f"--chips-per-host must be at least 1, got {devices}")
        hosts = hosts or -(-chips_of(args.tpu_topology) // devices)
    elif args.slices != 1:
        raise ValueError(
            f"--slices is {args.slices}, but only TPUs come in slices; use --hosts"
        )
    if hosts is None and not args.delete:
        raise ValueError(
            "--hosts is required: the number of machines, one process each"
        )
    return Job(
        name=args.name,
        image=args.image,
        command=tuple(args.command),
        hosts=1 if hosts is None else hosts,
        slices=args.slices,
        tpu=tpu,
        devices=devices,
        requests=_pairs("--request", "NAME=AMOUNT", args.request),
        volumes={
            folder: claim
            for claim, folder in _pairs(
                "--volume", "CLAIM:FOLDER", args.volume, ":"
            ).items()
        },
        env=_pairs("--env", "NAME=VALUE", args.env),
        secrets=_secrets(args.secret_env),
        namespace=args.namespace,
        queue=args.queue,
        grace_seconds=args.grace_seconds,
        max_restarts=args.max_restarts,
        port=args.port,
        form=args.form,
        runtime=args.runtime,
        **({} if args.delete else _fleet(args)),
        is_fenced=not args.no_network_policy,
    )


def _fleet(args: argparse.Namespace) -> dict[str, Any]:
    """Returns the fields of a job with learners."""
    if args.token_secret is not None and ":" not in args.token_secret:
        raise ValueError(
            f"--token-secret is {args.token_secret!r}; expected SECRET:KEY"
        )
    if not fleet_flags.is_given(args):
        return {}
    return {
        "learners": args.learners,
        "servers": args.servers or 1,
        "save_commits": args.save_commits,
        "token": args.token_secret and tuple(args.token_secret.split(":", 1)),
    }


def _tpu(args: argparse.Namespace) -> tuple[str, str]:
    if not (args.tpu_accelerator and args.tpu_topology):
        raise ValueError(
            "--tpu-accelerator and --tpu-topology go together, such as "
            "--tpu-accelerator tpu-v5-lite-podslice --tpu-topology 4x4"
        )
    if args.gpus:
        raise ValueError("--gpus and --tpu-accelerator cannot be combined")
    return args.tpu_accelerator, args.tpu_topology


def _pairs(
    flag: str, form: str, given: Sequence[str], between: str = "="
) -> dict[str, str]:
    found: dict[str, str] = {}
    for text in given:
        name, sign, value = text.partition(between)
        if not name or not sign:
            # The value may be a secret, so the message does not repeat it.
            raise ValueError(f"{flag} got a value without {between}; expected {form}")
        if name in found:
            raise ValueError(f"{flag} gives {name} twice; remove one")
        found[name] = value
    return found


def _secrets(given: Sequence[str]) -> dict[str, tuple[str, str]]:
    found = {}
    for name, where in _pairs("--secret-env", "NAME=SECRET:KEY", given).items():
        secret, _, key = where.partition(":")
        if not secret or not key:
            raise ValueError(
                f"--secret-env {name} does not name a key of a Secret; expected "
                f"{name}=SECRET:KEY"
            )
        found[name] = (secret, key)
    return found
