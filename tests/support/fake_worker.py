"""A worker for the supervisor's tests: no jax, and it misbehaves as it is told.

`fake_worker.py FOLDER PLAN`, with PLAN a JSON object:

- steps: how many to do.
- faults: {attempt or "*": {worker: [what, step]}}: what the worker does once all have
  done that step: "kill" and "abort" end it by a signal, "hang" does nothing more,
  "leave" takes its time and exits with 75, a number is its exit status. The others then
  wait for ever, as in a collective.
- on_term: "leave" exits with 75, "step" reports one more step before and takes its
  time, "deaf" ignores it, else it is deadly.
- sizes: numbers of processes that are accepted; others are bad input.
- silent: reports no progress.  forgetful: starts each attempt at step 0.
- child: starts a process of its own.  seconds: sleeps before it is done.
- noise: bytes to print.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from meshloom.launch import progress_file

NUMBER = int(os.environ["MESHLOOM_PROCESS_ID"])
COUNT = int(os.environ["MESHLOOM_NUM_PROCESSES"])
ATTEMPT = os.environ["MESHLOOM_ATTEMPT"]


def main(folder: Path, plan: dict) -> int:
    if plan.get("on_term") == "leave":
        signal.signal(signal.SIGTERM, lambda *_: os._exit(75))
    elif plan.get("on_term") == "deaf":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    elif plan.get("on_term") == "step":
        signal.signal(signal.SIGTERM, lambda *_: step_and_leave())
    tell(folder, child=plan.get("child", False))
    if COUNT not in plan.get("sizes", [COUNT]):
        print(f"meshloom: the batch is not divided by {COUNT} devices", file=sys.stderr)
        return 2
    print(f"attempt {ATTEMPT}: worker {NUMBER} speaks" + "." * plan.get("noise", 0))
    if not plan.get("silent"):
        progress_file.write(Path(os.environ["MESHLOOM_PROGRESS"]), None)

    checkpoint = folder / "checkpoint"
    start = int(checkpoint.read_text()) if checkpoint.exists() else 0
    wait_for_all(folder, "started")
    if plan.get("forgetful"):
        start = 0
    faults = plan.get("faults", {})
    faults = faults.get(ATTEMPT, faults.get("*", {}))
    last = min([step for _, step in faults.values()], default=plan["steps"])
    for step in range(start + 1, last + 1):
        if not plan.get("silent"):
            progress_file.write(Path(os.environ["MESHLOOM_PROGRESS"]), step)
        if NUMBER == 0:
            checkpoint.write_text(str(step))
    wait_for_all(folder, "stepped")
    if faults:
        act(faults[str(NUMBER)][0] if str(NUMBER) in faults else "hang")
    time.sleep(plan.get("seconds", 0))
    return 0


def tell(folder: Path, child: bool) -> None:
    """What the tests want to know of this process, in a file of its own."""
    pids = [os.getpid()]
    if child:
        pids.append(subprocess.Popen(["sleep", "1000"]).pid)
    names = ("COORDINATOR", "NUM_PROCESSES", "PROCESS_ID", "ATTEMPT", "PROGRESS")
    env = {name: os.environ[f"MESHLOOM_{name}"] for name in names}
    env |= {name: os.environ.get(name) for name in ("NPROC", "JAX_NUM_CPU_DEVICES")}
    file = folder / f"seen-{ATTEMPT}-{NUMBER}.json"
    file.with_suffix(".new").write_text(json.dumps({"pids": pids, **env}))
    file.with_suffix(".new").rename(file)


def step_and_leave() -> None:
    progress_file.write(Path(os.environ["MESHLOOM_PROGRESS"]), 1000)
    time.sleep(0.5)
    os._exit(75)


def wait_for_all(folder: Path, where: str) -> None:
    (folder / f"{where}-{ATTEMPT}-{NUMBER}").touch()
    files = [folder / f"{where}-{ATTEMPT}-{number}" for number in range(COUNT)]
    while not all(file.exists() for file in files):
        time.sleep(0.005)


def act(what: str | int) -> None:
    if isinstance(what, int):
        sys.exit(what)
    if what == "leave":
        time.sleep(0.5)
        sys.exit(75)
    if what == "hang":
        while True:
            time.sleep(1)
    number = {"kill": signal.SIGKILL, "abort": signal.SIGABRT}[what]
    os.kill(os.getpid(), number)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), json.loads(sys.argv[2])))
