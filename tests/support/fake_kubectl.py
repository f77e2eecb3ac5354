"""A kubectl that answers from a script, for want of a cluster.

The program, put first on the PATH, notes each call in calls.jsonl and goes through
`moments`: what the cluster holds, one after the other, a new one with each look at the
job. The shapes are those of the published objects.
"""

import json
import os
import stat
import sys
from pathlib import Path

PROGRAM = """#!{python}
import json, pathlib, sys
here = pathlib.Path({folder!r})
moments = json.loads((here / "moments.json").read_text())
calls = here / "calls.jsonl"
past = calls.read_text().splitlines() if calls.exists() else []
words = sys.argv[1:]
given = sys.stdin.read() if "apply" in words else ""
with open(calls, "a") as file:
    file.write(json.dumps({{"words": words, "given": given}}) + "\\n")
looks = [c for c in past if "get" in json.loads(c)["words"] and "pods" not in c]
verb = words[2]
if verb == "get":
    of_pods = "pods" in words
    now = moments[min(len(looks) - of_pods, len(moments) - 1)]
    if "error" in now:
        sys.exit("Error from server: " + now["error"])
    conditions = {{"conditions": now.get("conditions", [])}}
    print(json.dumps({{"items": now["pods"]}} if of_pods else {{"status": conditions}}))
elif verb == "logs":
    print("log of", words[-1], *[w for w in words if w.startswith("--tail")])
"""


def make(folder: Path, moments: list[dict]) -> Path:
    """Makes the program; returns the folder it is in."""
    folder.mkdir()
    (folder / "moments.json").write_text(json.dumps(moments))
    program = folder / "kubectl"
    program.write_text(PROGRAM.format(python=sys.executable, folder=str(folder)))
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    return folder


def calls(folder: Path) -> list[dict]:
    lines = (folder / "calls.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def path_with(folder: Path) -> str:
    return f"{folder}:{os.environ['PATH']}"


def pod(name: str, phase: str, made: str = "2026-01-01T00:00:00Z", why: str = ""):
    waiting = (
        [{"type": "PodScheduled", "status": "False", "message": why}] if why else []
    )
    return {
        "metadata": {"name": name, "creationTimestamp": made},
        "status": {"phase": phase, "conditions": waiting},
    }


def ended(kind: str, reason: str = "", message: str = "") -> list[dict]:
    return [{"type": kind, "status": "True", "reason": reason, "message": message}]
