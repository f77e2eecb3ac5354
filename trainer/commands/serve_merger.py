"""`meshloom serve --upstream`: adds up the contributions of the learners below it."""

import argparse
import os
import time
from importlib import metadata
from pathlib import Path

from ...launch.atomic_file import replace_text
from ...launch.exit_codes import DONE, PREEMPTED
from ...launch.stop_signals import StopSignals
from .serve_events import Events

LOOK_SECONDS = 0.5
# Flags of those who hold parameters or decide, and what they are without being given.
OTHERS = {
    **{"role": "both", "coordinator": None, "servers": None, "store": None},
    **{"save_every": 100, "metrics": None},
}


def check(args: argparse.Namespace) -> None:
    """Refuses flags that mean nothing here."""
    for name, default in OTHERS.items():
        if getattr(args, name) != default:
            flag = "--" + name.replace("_", "-")
            raise ValueError(
                f"{flag} with --upstream {args.upstream}: a process with --upstream "
                f"holds no parameters and decides nothing. Remove {flag}, or give it "
                "to the service above"
            )


def run(
    args: argparse.Namespace,
    address_file: Path,
    signals: StopSignals,
    events: Events,
    token,
    tls,
) -> int:
    """Serves until told to stop; with --once, until its learners are done."""
    from ...service.merger.merger import MergerProcess

    merger = MergerProcess(
        args.bind,
        args.upstream,
        version=metadata.version("meshloom"),
        clock=time.monotonic,
        token=token,
        tls=tls,
    )
    try:
        replace_text(address_file, merger.address + "\n")
        text = f"merger at {merger.address}, upstream {args.upstream}"
        events.say(text, "started", address=merger.address)
        while not signals.told:
            if address_file.exists():  # you may have deleted it
                os.utime(address_file)
            if args.once and merger.merger.is_over():
                events.say("all learners are done", "finished")
                return DONE
            time.sleep(LOOK_SECONDS)
        return PREEMPTED
    finally:
        address_file.unlink(missing_ok=True)
        merger.close()
