"""The command `meshloom launch`: starts the processes of a job, and restarts them."""

from ...launch.targets import k8s, local, mpi, slurm, ssh
from .flags import command


def add(commands) -> None:
    """Adds `launch` to the commands, with an action for each target."""
    parser = commands.add_parser(
        "launch", help="start the processes of a job, and restart them if they fail"
    )
    actions = parser.add_subparsers(required=True, metavar="ACTION")
    for target in (local, slurm, mpi, ssh, k8s):
        name = target.__name__.rpartition(".")[2]
        target.add_flags(command(actions, name, target.launch, target.SUMMARY))
