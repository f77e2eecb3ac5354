"""Cases in a process of their own, which may crash or hang without harm.

A worker reads cases from its standard input, one a line, and answers each with a line.
"""

import contextlib
import dataclasses
import faulthandler
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from compiling import FLAGS
from fuzz_cases import Case

FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[1]
ANSWER = "fuzz answer: "
LIMIT = 240.0  # seconds; a case takes 5 to 20 on two quiet cores
# Compiled programs of many cases fill a process; a new one costs a few seconds.
MOST_CASES = 40
GRACE = 5  # seconds in which a process that hangs ends by itself
SHOWN = 2000  # characters of a process's errors


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How a case ended: ok, refused (by us, as it may), failed, crashed or hung."""

    status: str
    message: str = ""

    @property
    def is_good(self) -> bool:
        return self.status in ("ok", "refused")

    @property
    def kind(self) -> str:
        """The same for failures that look alike: no numbers, first line only."""
        line = (self.message.strip().splitlines() or [""])[0]
        words = "".join(c for c in line if not c.isdigit())
        return f"{self.status}: {words[:120]}"


def run(case: Case) -> Outcome:
    """Runs a case in this process."""
    import fuzz_check

    try:
        programs = fuzz_check.build_case(case)
    except ValueError as error:
        if not is_ours(error):
            return Outcome("failed", _told("refused by a library below", error))
        if not case.spoiled:
            return Outcome("failed", _told("refused, though it is legal", error))
        return Outcome("refused", str(error))
    except Exception as error:
        return Outcome("failed", _told("build raised", error))
    try:
        fuzz_check.check(case, programs)
    except Exception as error:
        return Outcome("failed", _told("", error))
    return Outcome("ok")


def is_ours(error: BaseException) -> bool:
    """Whether code of this repository raised it, not jax for something of ours."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    inside = Path(last.filename).resolve()
    return any(
        inside.is_relative_to(ROOT / x) for x in ("sharding", "models", "trainer")
    )


def _told(what: str, error: BaseException) -> str:
    name = "" if isinstance(error, AssertionError) else f"{type(error).__name__}: "
    first = ": ".join(filter(None, (what, f"{name}{error}")))
    lines = traceback.format_exception(error)
    return f"{first}\n{''.join(lines)[-SHOWN:]}"


def serve() -> None:
    """Answers cases until its input ends."""
    import jax

    for line in sys.stdin:
        # Says where it hangs, and ends; nobody has to be there to end it.
        limit = float(os.environ["FUZZ_LIMIT"])
        faulthandler.dump_traceback_later(limit, exit=True)
        outcome = run(Case.from_json(line))
        faulthandler.cancel_dump_traceback_later()
        print(ANSWER + json.dumps(dataclasses.asdict(outcome)), flush=True)
        jax.clear_caches()


def set_up(num_devices: int) -> None:
    """What jax needs to be told before it starts."""
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {FLAGS}"
    # A thread for each collective that a device waits in, as the command line has it.
    os.environ["NPROC"] = str(max(4 * num_devices, os.cpu_count() or 1))
    import jax

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", num_devices)
    jax.config.update("jax_numpy_rank_promotion", "raise")
    jax.config.update("jax_enable_compilation_cache", False)
    jax.config.update("jax_traceback_filtering", "off")


class Worker:
    """A process for cases, started when needed and replaced when it is lost.

    Args:
      limit: seconds that a case may take.
      argv: starts the process that answers.
    """

    def __init__(
        self,
        limit: float = LIMIT,
        argv: Sequence[str] = (sys.executable, str(FOLDER), "--worker"),
    ):
        self._argv = list(argv)
        self._limit = limit
        self._process: subprocess.Popen | None = None
        self._errors: IO[bytes] | None = None
        self._num_cases = 0

    def run(self, case: Case) -> Outcome:
        if case.processes > 1:
            return run_processes(case, self._limit)
        process = self._started()
        assert process.stdin and process.stdout
        process.stdin.write(case.to_json().encode() + b"\n")
        process.stdin.flush()
        begin = time.monotonic()
        answer = self._answer(process)
        self._num_cases += 1
        if answer is not None:
            if self._num_cases >= MOST_CASES:
                self.close()
            return answer
        hung = time.monotonic() - begin >= self._limit
        what = f"no end after {self._limit:.0f} s" if hung else "the process crashed"
        assert self._errors
        self._errors.seek(0)
        tail = self._errors.read().decode(errors="replace")[-SHOWN:]
        self.close()
        return Outcome("hung" if hung else "crashed", f"{what}\n{tail}")

    def close(self) -> None:
        if self._process is None:
            return
        with contextlib.suppress(ProcessLookupError):  # it has ended by itself
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for file in (self._process.stdin, self._process.stdout, self._errors):
            assert file
            with contextlib.suppress(BrokenPipeError):  # a case that was not read
                file.close()
        self._process = self._errors = None

    def _started(self) -> subprocess.Popen:
        if self._process is None:
            self._num_cases = 0
            self._errors = tempfile.TemporaryFile()
            self._process = subprocess.Popen(
                self._argv,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                env=os.environ | {"FUZZ_LIMIT": str(self._limit)},
                start_new_session=True,
            )
        return self._process

    def _answer(self, process: subprocess.Popen) -> Outcome | None:
        """None where there is none in time."""
        assert process.stdout
        while select.select([process.stdout], [], [], self._limit + GRACE)[0]:
            line = process.stdout.readline().decode(errors="replace")
            if not line:
                process.wait()
                return None
            if line.startswith(ANSWER):
                return Outcome(**json.loads(line.removeprefix(ANSWER)))
        return None


def run_processes(case: Case, limit: float) -> Outcome:
    """Runs a case whose devices belong to several real processes."""
    import jobs

    each = case.layout.num_devices // case.processes
    argv = [sys.executable, str(FOLDER), "--process", case.to_json()]
    ended = jobs.run_job(case.processes, each, argv, limit)
    outcomes = []
    for process in ended:
        found = [x for x in process.stdout.splitlines() if x.startswith(ANSWER)]
        if not found:
            status = "hung" if process.status == -signal.SIGKILL else "crashed"
            outcomes.append(Outcome(status, process.stderr[-SHOWN:]))
        else:
            outcomes.append(Outcome(**json.loads(found[-1].removeprefix(ANSWER))))
    bad = [outcome for outcome in outcomes if not outcome.is_good]
    return bad[0] if bad else outcomes[0]
