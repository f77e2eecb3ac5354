"""What the subcommands of `meshloom` do, once jax is worth importing."""

import json
import os
from argparse import Namespace
from pathlib import Path

from ...launch import process_env, progress_file
from ...launch.exit_codes import DONE, PREEMPTED
from ..config import files as config_files
from ..config import tree as config_tree

DEFAULT_CONFIG = "default"


def train(args: Namespace) -> int:
    if (
        process_env.find(os.environ) is None
    ):  # processes of a job fail together, see below
        _check_early(args)
    import jax

    from ..job import joining, preemption
    from ..plan.choosing import choose_here
    from ..record.phases import Phases
    from ..run import train as train_lib
    from .observing import Forecasting

    phases = Phases.of_this_process()
    phases.reached("imported")
    if args.cpu_devices is not None:
        _use_cpu(args.cpu_devices)
    joining.initialize()
    phases.reached("joined")
    with joining.all_or_none():
        loaded = _load(args)
        if args.steps is not None:
            loaded = config_files.override(loaded, "num_steps", args.steps, "--steps")
    loaded = _with_fewer_processes(loaded, jax.process_count())
    workdir = args.workdir or Path("runs") / Path(_names(args)[-1]).stem
    _use_compilation_cache()
    if args.dry_run:
        _dry_run(loaded.config, workdir, args.insist)
        return DONE
    with preemption.listening() as should_leave:
        try:
            train_lib.train(
                loaded.config,
                workdir=workdir,
                origins=loaded.origins,
                config_text=loaded.text,
                insist=args.insist,
                should_leave=should_leave,
                phases=phases,
                choose=choose_here,
                observer=Forecasting(),
            )
        except preemption.Preempted as error:
            print(f"meshloom: {error}. Run the same command again to continue.")
            return progress_file.leave(PREEMPTED)
    return progress_file.leave(DONE)


def _with_fewer_processes(loaded: config_files.Loaded, now: int) -> config_files.Loaded:
    """Of a job that goes on with fewer processes, each does more, in more parts.

    The batch stays the same; so does the memory that a device needs for its part. A
    model with variables is left as it is: a batch norm would compute something else.
    """
    from ..program import contract

    full = int(os.environ.get("MESHLOOM_FULL_PROCESSES", now))
    config = loaded.config
    if full <= now or config.mesh.pipe != 1:  # a pipeline chooses its own parts
        return loaded
    if contract.has_variables(config.model):
        return loaded
    least = -(-(config.num_microbatches or 1) * full // now)
    parts = (
        n for n in range(least, config.batch_size + 1) if not config.batch_size % n
    )
    origin = f"{now} of {full} processes"
    number = next(parts, config.batch_size)
    return config_files.override(
        loaded, "num_microbatches", number, origin, over_flags=True
    )


def explain(args: Namespace) -> None:
    loaded = _load(args)
    from ...sharding import MeshSpec, diff, lint
    from ...sharding.text import human_bytes

    mesh = _without_devices(loaded.config.mesh)
    layout, rules = _plan(loaded.config, mesh)
    if args.json:
        print(json.dumps(layout.params.to_json(), indent=1))
        return
    if args.against:
        against = _without_devices(MeshSpec.parse(args.against))
        other, _ = _plan(loaded.config, against)
        print("\n".join(diff(other.params, layout.params)) or "No difference.")
        return
    print(layout.params)
    print()
    if line := _chosen(loaded.config, mesh):
        print(line)
    print(layout.params.summary())
    print(
        f"optimizer state: {human_bytes(layout.opt_state.bytes)}, "
        f"{human_bytes(layout.opt_state.bytes_per_device)} a device"
    )
    if layout.variables.arrays:
        print(f"variables, not trained:\n{layout.variables}")
    used = layout.params.used | layout.opt_state.used | layout.variables.used
    for note in lint(rules, used, layout.params.mesh):
        if not note.startswith("never used"):  # activations are not listed here
            print(f"note: {note}")


def _chosen(config, mesh) -> str:
    """What `train` would choose on this mesh of devices like those here."""
    import jax

    from ...sharding.mesh import mesh_sizes
    from ..plan.choosing import choose_here

    return choose_here(config, mesh_sizes(mesh), jax.devices()).line


def config_show(args: Namespace) -> None:
    loaded = _load(args)
    print(config_tree.show(loaded.config, loaded.origins))


def config_diff(args: Namespace) -> None:
    from ..run.train import Config

    a, b = (config_files.flat_values(x, root=Config) for x in (args.a, args.b))
    print(config_tree.format_diff(config_tree.diff(a, b)) or "No difference.")


def generate(args: Namespace) -> None:
    import jax

    from ...sharding import MeshSpec
    from ..checkpoint import manager
    from ..record import run_folder
    from ..run import sampling
    from ..run.train import Config

    if args.tokens < 1:
        raise ValueError(f"--tokens must be at least 1, got {args.tokens}")
    folder = run_folder.RunFolder(args.run_folder)
    text = folder.path / run_folder.CONFIG_GIN
    steps = manager.committed_steps(folder.checkpoints)
    if not text.exists() or not steps:
        raise ValueError(
            f"{folder.path} holds no trained model: expected {run_folder.CONFIG_GIN} "
            "and a checkpoint. Name the folder of a run that has saved one."
        )
    step = steps[-1] if args.step is None else args.step
    if step not in steps:
        raise ValueError(
            f"{folder.path} has no checkpoint of step {step}; it has "
            f"{', '.join(map(str, steps))}. Give --step one of these, or leave it out."
        )
    _use_compilation_cache()
    config = config_files.load([str(text)], root=Config).config
    mesh = MeshSpec.parse(args.mesh).make(jax.local_devices())
    layout, _ = _plan(config, mesh)
    params = manager.restore_params(
        folder.checkpoints, step, layout.abstract.params, layout.params.shardings(mesh)
    )
    print(
        sampling.sample(
            config,
            mesh,
            params,
            args.prompt,
            args.tokens,
            temperature=args.temperature,
            top_k=args.top_k,
            seed=args.seed,
        )
    )


def load_config(args: Namespace):
    """The config of the flags --config, --set and --mesh, without its origins."""
    return _load(args).config


def _names(args: Namespace) -> list[str]:
    return args.config or [DEFAULT_CONFIG]


def _load(args: Namespace) -> config_files.Loaded:
    """The config of the flags --config, --set and --mesh."""
    spec = _check_early(args)
    from ..run.train import Config

    loaded = config_files.load(_names(args), args.set, root=Config)
    for note in loaded.dropped:
        print(f"note: {note}")
    if spec is not None:
        loaded = config_files.override(loaded, "mesh", spec, "--mesh")
    return loaded


def _check_early(args: Namespace):
    """Checks the flags that need no heavy import; returns the mesh of --mesh, if any.

    The rest needs the classes of the config, whose imports take a second.
    """
    config_files.check_syntax(_names(args), args.set)
    if args.mesh is None:
        return None
    from ...sharding import MeshSpec

    return MeshSpec.parse(args.mesh)


def _without_devices(spec):
    """A mesh that need not be here; an axis of -1 takes the devices that are."""
    import jax

    from ...sharding.mesh import AXES

    is_open = any(getattr(spec, name) == -1 for name in AXES)
    return spec.abstract(jax.device_count() if is_open else None)


def _plan(config, mesh):
    """The layout of a config on a mesh, and the rules that made it."""
    from ..program.rules import name_settings
    from ..program.state import make_layout

    rules = config.make_rules()
    learning_rate = config.schedule.make(config.num_steps)
    tx = config.optimizer.make(learning_rate, config.model.axes())
    with name_settings(config):
        axes = getattr(config.optimizer, "state_axes", None)
        return make_layout(config.model, tx, rules, mesh, state_axes=axes), rules


def _dry_run(config, workdir: Path, insist: bool) -> None:
    from ..checkpoint import init_from
    from ..plan import run_forecast
    from ..plan.choosing import choose_here
    from ..record import storage
    from ..record.run_folder import RunFolder
    from ..run import continuing, data_identity
    from ..run.prepare import prepare

    prepared = prepare(config, choose=choose_here)
    folder = RunFolder(workdir)
    saved = storage.checkpoints_of(folder.path, config.checkpoint_folder)
    continuing.check(config, folder, saved, insist=insist)
    init_from.check(config.init_from, prepared.program, saved)
    if folder.previous_values() is not None:
        data_identity.establish(
            prepared.datasets, folder.path, saved, insist=insist, say=print
        )
    for line in prepared.describe():
        print(line)
    print(run_forecast.forecast_run(prepared, 0).line())
    print("Dry run: config, data and run folder checked; nothing written or trained.")


def _use_cpu(num_devices: int) -> None:
    import jax

    if num_devices < 1:
        raise ValueError(f"--cpu-devices must be at least 1, got {num_devices}")
    if num_devices > 1:
        # A device holds a thread of XLA's pool for each collective it waits in, and the
        # pool has one a device: with two at a time, all wait for ever (seen with
        # pipelines that gather weights once a microbatch). Read with the first device.
        os.environ.setdefault("NPROC", str(max(4 * num_devices, os.cpu_count() or 1)))
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", num_devices)


def _use_compilation_cache() -> None:
    """Keeps compiled programs between runs, unless jax was told where already."""
    import jax

    if jax.config.values["jax_compilation_cache_dir"] is None:
        cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        jax.config.update(
            "jax_compilation_cache_dir", str(Path(cache) / "meshloom" / "compiled")
        )
