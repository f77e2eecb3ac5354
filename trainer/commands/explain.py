"""The command `meshloom explain`: how every parameter is sharded on a mesh, and why."""

import argparse
import json

from .flags import add_config_flags, command, load


def add(commands) -> None:
    """Adds `explain` to the commands."""
    parser = command(
        commands,
        "explain",
        _explain,
        "show how every parameter is sharded on a mesh, and why",
    )
    add_config_flags(parser, "default")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print JSON")
    form.add_argument(
        "--against", metavar="SIZES", help="show what differs from another mesh"
    )


def _explain(args: argparse.Namespace) -> None:
    loaded = load(args)
    from ...sharding import MeshSpec, diff, lint
    from ...sharding.text import human_bytes
    from ..program.computation import layout_of

    mesh = _without_devices(loaded.config.mesh)
    layout, rules = layout_of(loaded.config, mesh)
    if args.json:
        print(json.dumps(layout.params.to_json(), indent=1))
        return
    if args.against:
        against = _without_devices(MeshSpec.parse(args.against))
        other, _ = layout_of(loaded.config, against)
        print("\n".join(diff(other.params, layout.params)) or "No difference.")
        return
    print(layout.params)
    print()
    if line := _chosen(loaded.config, mesh):
        print(line)
    print(layout.params.summary())
    print(
        f"optimizer state: {human_bytes(layout.opt_state.bytes)}, "
        f"{human_bytes(layout.opt_state.bytes_per_device)} per device"
    )
    if layout.variables.arrays:
        print(f"variables (not trained):\n{layout.variables}")
    used = layout.params.used | layout.opt_state.used | layout.variables.used
    for note in lint(rules, used, layout.params.mesh):
        if not note.startswith("never used"):  # activations are not listed here
            print(f"note: {note}")


def _chosen(config, mesh) -> str:
    """Returns a line about what `train` would choose on devices like the local ones."""
    import jax

    from ...sharding.mesh import mesh_sizes
    from ..plan.choosing import choose_here

    return choose_here(config, mesh_sizes(mesh), jax.devices()).line


def _without_devices(spec):
    """Returns a mesh without devices; an axis of -1 counts the local ones."""
    import jax

    from ...sharding.mesh import AXES

    is_open = any(getattr(spec, name) == -1 for name in AXES)
    return spec.abstract(jax.device_count() if is_open else None)
