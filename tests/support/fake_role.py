"""A coordinator, server or learner for the tests of fleets: does what it is told.

`fake_role.py FOLDER NAME ACTIONS`, with ACTIONS a JSON list: what it does at its first
start, its second, ...; the last one is repeated. FOLDER is the run folder. An action:

- step: is reported, as a learner's process does.  commit: a row of metrics.jsonl.
- commits: metrics.jsonl has all up to each of these in turn, long enough to be seen.
- final: writes final.json.  say: prints it.  child: starts a process of its own.
- beats: touches FOLDER/beat so many times, and then stops (SIGSTOP).
- until: waits for these files in FOLDER.
- end: an exit code, "kill", or "wait" (for SIGTERM, then exits with 75; "deaf" ignores
  it). Default: "wait".
- told: how it ends on SIGTERM, instead of 75.

Each start leaves FOLDER/seen/NAME-START.json; SIGTERM adds NAME to FOLDER/order.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from meshloom.launch import progress_file


def main(folder: Path, name: str, actions: list[dict]) -> int:
    seen = folder / "seen"
    start = len(list(seen.glob(f"{name}-[0-9].json")))
    action = actions[min(start, len(actions) - 1)]
    signal.signal(signal.SIGTERM, lambda *_: leave(folder, name, action))
    pids = [os.getpid()]
    if action.get("child"):
        pids.append(subprocess.Popen(["sleep", "1000"]).pid)
    if "step" in action:
        logs = folder / "learners" / name.split("-")[1] / "logs"
        logs.mkdir(parents=True, exist_ok=True)
        progress_file.write(logs / "progress-0.json", action["step"])
    if "commit" in action:
        with open(folder / "metrics.jsonl", "a") as rows:
            rows.write(json.dumps({"step": action["commit"], "loss": 1.0}) + "\n")
    for commit in action.get("commits", []):
        rows = (json.dumps({"step": n}) + "\n" for n in range(1, commit + 1))
        draft = folder / "metrics.new"
        draft.write_text("".join(rows))
        draft.replace(folder / "metrics.jsonl")
        time.sleep(0.3)
    if action.get("final"):
        (folder / "final.json").write_text("{}")
    if "say" in action:
        print(action["say"], flush=True)
    new = seen / f"{name}-{start}.new"
    new.write_text(json.dumps({"pids": pids}))
    new.rename(new.with_suffix(".json"))
    while not all((folder / file).exists() for file in action.get("until", [])):
        time.sleep(0.01)
    for _ in range(action.get("beats", 0)):
        (folder / "beat").touch()
        time.sleep(0.1)
    if "beats" in action:
        os.kill(os.getpid(), signal.SIGSTOP)
    end = action.get("end", "wait")
    if end == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    while end in ("wait", "deaf"):
        time.sleep(0.05)
    return end


def leave(folder: Path, name: str, action: dict) -> None:
    if action.get("end") == "deaf":
        return
    with open(folder / "order", "a") as order:
        order.write(f"{name}\n")
    os._exit(action.get("told", 75))


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3])))
