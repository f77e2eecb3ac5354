"""A stand-in for `meshloom train`: writes evaluations of a run with a given loss.

python fake_train.py FOLDER LOSS STEPS SECONDS: appends its start to FOLDER/starts, then
continues eval.jsonl up to STEPS. A LOSS of "bad" is bad input, "die" kills itself once.
"""

import json
import os
import pathlib
import signal
import sys
import time


def main(folder: pathlib.Path, loss: str, steps: int, seconds: float) -> int:
    folder.mkdir(exist_ok=True)
    with open(folder / "starts", "a") as file:
        file.write(f"{os.getpid()}\n")
    (folder / "config.gin").write_text(f"loss = {loss}\n")
    if loss == "bad":
        print("meshloom: this is wrong")
        return 2
    if loss == "die":
        if len((folder / "starts").read_text().splitlines()) == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        loss = "0.5"
    path = folder / "eval.jsonl"
    done = len(path.read_text().splitlines()) if path.exists() else 0
    for step in range(done + 1, steps + 1):
        time.sleep(seconds)
        value = loss if loss == "NaN" else float(loss) + 1 / step
        with open(path, "a") as file:
            file.write(json.dumps({"step": step, "loss": value, "time": 0}) + "\n")
    return 0


if __name__ == "__main__":
    name, loss, steps, seconds = sys.argv[1:]
    sys.exit(main(pathlib.Path(name), loss, int(steps), float(seconds)))
