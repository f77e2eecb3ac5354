"""The doctor's subprocess: prints one line of JSON, unless it crashes.

`probe devices` starts jax. `probe config NAMES SETS`, both JSON lists, loads a config
and opens its data as `train --dry-run` does, but does not check the devices: this host
may have only some of the job's.
"""

import json
import sys
from typing import Any

MARK = "meshloom-doctor: "


def devices() -> dict[str, Any]:
    import jax

    local = jax.local_devices()
    kind = local[0].device_kind
    return {"count": len(local), "kind": kind, "platform": local[0].platform}


def config(names: list[str], sets: list[str]) -> dict[str, Any]:
    from ..config import files as config_files
    from ..record import metrics, storage
    from ..run.train import Config

    try:
        loaded = config_files.load(names, sets, root=Config).config
        metrics.check_installed(loaded.writers)
        storage.check(loaded.checkpoint_folder)
        storage.check_installed(loaded.checkpoint_folder)
        data = loaded.data.open("train")
        about = {str(k): str(v) for k, v in data.describe().items()}
        answer = {"data": about, "checkpoint_folder": loaded.checkpoint_folder}
        if loaded.checkpoint_folder and storage.is_remote(loaded.checkpoint_folder):
            answer["exists"] = storage.location(loaded.checkpoint_folder).exists()
        return answer
    except (ValueError, OSError) as error:
        return {"error": str(error)}


def main(argv: list[str]) -> None:
    name, *given = argv
    answer = devices() if name == "devices" else config(*map(json.loads, given))
    print(MARK + json.dumps(answer), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
