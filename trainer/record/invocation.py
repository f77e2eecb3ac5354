"""How this process was started, which only the command line knows."""

import dataclasses
import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from ...launch import progress_file
from ...launch.masking import masked_command, masked_text

# Variables whose flags change how programs are compiled or run.
FLAGS = ("XLA_FLAGS", "LIBTPU_INIT_ARGS", "NPROC")


@dataclasses.dataclass(frozen=True)
class Invocation:
    """What the command line passes to a run. That of a library user is empty.

    Attributes:
      command: the command as it was typed, with secrets masked.
      attempt: the attempt of the job, counted from 1 by its supervisor.
      restart_reason: what ended the attempt before, in the supervisor's words.
      flags: the values of the variables FLAGS.
      progress_file: where the supervisor looks for progress, if there is one.
      end: ends this process at once with an exit code; None never does.
    """

    command: str = ""
    attempt: int = 1
    restart_reason: str = ""
    flags: Mapping[str, str] = dataclasses.field(default_factory=dict)
    progress_file: Path | None = None
    end: Callable[[int], object] | None = None

    @classmethod
    def of(
        cls,
        argv: Sequence[str],
        environ: Mapping[str, str],
        end: Callable[[int], object] | None = None,
    ) -> "Invocation":
        """Reads the arguments and the environment of a command."""
        report_to = environ.get(progress_file.VARIABLE)
        return cls(
            command=shlex.join(["meshloom", *masked_command(argv)]),
            attempt=int(environ.get("MESHLOOM_ATTEMPT", "1")),
            restart_reason=masked_text(environ.get("MESHLOOM_RESTART_REASON", "")),
            flags={name: environ.get(name, "") for name in FLAGS},
            progress_file=Path(report_to) if report_to else None,
            end=end,
        )
