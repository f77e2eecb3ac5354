"""A process that `meshloom scale` starts: joins its job and answers requests."""

import json
import os
import sys


def main() -> None:
    spec = json.loads(sys.argv[1])
    # Only answers go to the pipe; whatever libraries print belongs in the log.
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    from ..config import files as config_files
    from ..job import joining
    from ..plan import run_forecast
    from ..plan.choosing import choose_here
    from ..run.prepare import Prepared
    from ..run.train import Config
    from ..verify.scale_jobs import serve
    from ..verify.scale_trial import Trials

    group = joining.join(os.environ)
    if group.size > 1:
        joining.connect()

    def foretell(prepared: Prepared) -> tuple[float | None, str]:
        found = run_forecast.forecast_run(prepared, 0)
        if found.forecast is None:
            return None, found.reason
        return found.forecast.roofline.step, ""

    config = config_files.load(spec["configs"], spec["sets"], root=Config).config
    trials = Trials(config, spec["meshes"], group, choose_here, foretell)
    serve(trials, sys.stdin, answers)


if __name__ == "__main__":
    main()
