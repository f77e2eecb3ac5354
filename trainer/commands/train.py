"""The command `meshloom train`."""

import argparse
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from ...launch import process_env, progress_file
from ...launch.exit_codes import DONE, PREEMPTED
from .devices import (
    quiet_grpc,
    use_compilation_cache,
    use_cpu,
    without_collection,
)
from .flags import add_config_flags, check_early, command, config_names, load

if TYPE_CHECKING:
    from ..config.files import Loaded


def add(commands) -> None:
    """Adds `train` to the commands."""
    parser = command(
        commands, "train", run, "train a model; without arguments, the default one"
    )
    add_config_flags(parser, "default")
    parser.add_argument(
        "--workdir",
        type=Path,
        metavar="DIR",
        help="the run folder; an existing run continues; default: runs/CONFIG",
    )
    parser.add_argument("--steps", type=int, metavar="N", help="the number of updates")
    parser.add_argument(
        "--cpu-devices",
        type=int,
        metavar="N",
        help="train on the CPU, as N devices",
    )
    parser.add_argument(
        "--exchange",
        metavar="HOST:PORT[,HOST:PORT...][/JOB]",
        help="train as a learner of the service there; see docs/service.md",
    )
    parser.add_argument(
        "--learner",
        metavar="I/N",
        help="which learner of how many this is, from 0/N; with --exchange",
    )
    parser.add_argument(
        "--follow",
        action="store_true",
        help="when all data was read, wait for files that are added and go on",
    )
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="check everything and show the plan, without writing or training",
    )
    parser.add_argument(
        "--insist",
        action="store_true",
        help="continue a run folder that was started with another config or other data",
    )


def run(args: argparse.Namespace) -> int:
    if process_env.find(os.environ) is None:  # a job's processes fail together, below
        check_early(args)
    with without_collection():
        from ..config import files as config_files
        from ..job import joining, preemption
        from ..plan.choosing import choose_here
        from ..record.invocation import Invocation
        from ..record.phases import Phases
        from ..run import train as train_lib
        from .forecast_observer import ForecastObserver

    invocation = Invocation.of(sys.argv[1:], os.environ, end=os._exit)
    phases = Phases(invocation.attempt)
    phases.reached("imported")
    if args.cpu_devices is not None:
        use_cpu(args.cpu_devices)
    group = joining.join(os.environ)
    phases.reached("joined")
    with group.all_or_none("config"):
        loaded = load(args)
        if args.steps is not None:
            loaded = config_files.override(loaded, "num_steps", args.steps, "--steps")
        if args.follow:
            loaded = config_files.override(loaded, "follow", True, "--follow")
        loaded = with_exchange(loaded, args.exchange, args.learner)
    loaded = with_fewer_processes(loaded, group.size)
    workdir = args.workdir or Path("runs") / Path(config_names(args)[-1]).stem
    use_compilation_cache()
    if args.dry_run:
        _dry_run(loaded.config, workdir, group, args.insist)
        return DONE
    with preemption.listening(group, os._exit) as should_stop:
        try:
            train_lib.train(
                loaded.config,
                workdir=workdir,
                origins=loaded.origins,
                config_text=loaded.text,
                insist=args.insist,
                group=group,
                invocation=invocation,
                should_stop=should_stop,
                phases=phases,
                choose=choose_here,
                observer=ForecastObserver(),
            )
        except preemption.Preempted as error:
            print(f"meshloom: {error}. Run the same command again to continue.")
            return progress_file.leave(PREEMPTED)
    return progress_file.leave(DONE)


def with_exchange(
    loaded: "Loaded", exchange: str | None, learner: str | None
) -> "Loaded":
    """Applies --exchange and --learner to the config."""
    from ..config import files as config_files

    values: list[tuple[str, object, str]] = []
    if learner is not None:
        index, slash, count = learner.partition("/")
        if not (slash and index.isdigit() and count.isdigit()):
            raise ValueError(f"--learner {learner!r}: expected I/N, such as 0/4")
        values.append(("learners", int(count), "--learner"))
        values.append(("learner", int(index), "--learner"))
    if exchange is not None:
        address, slash, job = exchange.partition("/")
        if slash:
            values.append(("job", job, "--exchange"))
        values.append(("address", address, "--exchange"))
    for name, value, origin in values:
        loaded = config_files.override(loaded, f"exchange.{name}", value, origin)
    if loaded.config.exchange.is_on:
        quiet_grpc()
    return loaded


def with_fewer_processes(loaded: "Loaded", now: int) -> "Loaded":
    """Uses more microbatches if the job runs with fewer processes than it was given.

    The batch stays the same, and so does the memory per device. A model with variables
    keeps its microbatches: a batch norm would compute something else.
    """
    from ..config import files as config_files
    from ..program import contract

    full = int(os.environ.get("MESHLOOM_FULL_PROCESSES", now))
    config = loaded.config
    if full <= now or config.mesh.pipe != 1:  # a pipeline chooses its own number
        return loaded
    if contract.has_variables(config.model):
        return loaded
    least = -(-(config.num_microbatches or 1) * full // now)
    sizes = (
        n for n in range(least, config.batch_size + 1) if not config.batch_size % n
    )
    origin = f"{now} of {full} processes"
    number = next(sizes, config.batch_size)
    return config_files.override(
        loaded, "num_microbatches", number, origin, over_flags=True
    )


def _dry_run(config, workdir: Path, group, insist: bool) -> None:
    from ..checkpoint import init_from
    from ..plan import run_forecast
    from ..plan.choosing import choose_here
    from ..record import storage
    from ..record.run_folder import RunFolder
    from ..run import continuing, data_identity, following
    from ..run.prepare import prepare

    folder = RunFolder(workdir)
    source = following.source_of(config, folder.path)
    prepared = prepare(config, choose=choose_here, source=source)
    saved = storage.checkpoints_of(folder.path, config.checkpoint_folder)
    continuing.check(config, folder, saved, insist=insist)
    init_from.check(config.init_from, prepared.program, saved)
    if folder.previous_values() is not None:
        data = prepared.datasets
        readers = group.exchange(
            "data", lambda: data_identity.view(data), data_identity.readers
        )["readers"]
        data_identity.establish(
            data, group, readers, folder.path, saved, insist=insist, log=print
        )
    for line in prepared.describe():
        print(line)
    print(run_forecast.forecast_run(prepared, 0).line())
    print("Dry run: config, data and run folder checked; nothing written or trained.")
