"""Takes up a job where its log ends, or where its newest usable checkpoint is.

If every server still has the newest version of the log, or the one before, nothing is
lost: the log is replayed and the last commit is applied again. Otherwise all servers
load the newest checkpoint that they can, and the log gets an entry that abandons what
came after it. A finished job is loaded once a learner returns to it, and not before.
"""

from ..wire.errors import Refused
from . import snapshots
from .checkpoints import Checkpoint
from .history import History, make_history
from .job import Job
from .servers import BlocksLost


def start(job: Job) -> None:
    """Brings the servers, the engine and the files of a job to its newest version."""
    history = _read(job)
    job.files.create(job.spec.message)
    if not history.is_initialized:
        job.servers.create(job.spec.message)
        _take_up(job, history)
    elif _is_held(job, history):
        try:
            _take_up(job, history)
        except Refused as error:
            _roll_back(job, str(error))
    elif history.placement is None and _is_only_saved(job, history):
        job.is_held = False
        _take_up(job, history)
    else:
        _roll_back(job, "the servers do not have its newest version")


def load_again(job: Job) -> None:
    """Loads the blocks of a finished job, for a learner that returns to it."""
    history, version = _read(job), job.engine.version
    if list(history.servers) == job.servers.names:
        try:
            _load(job, version)
        except Refused as error:
            _roll_back(job, f"version {version} cannot be loaded: {error}")
    else:
        _roll_back(job, f"other servers than {', '.join(history.servers)} are here")
    job.is_held = True
    text = f"{job.spec.job}: loaded again, for a learner that has returned"
    job.around.say(text, "loaded", version=job.engine.version)


def restart(job: Job, error: BlocksLost) -> None:
    """Goes on from a checkpoint with the servers that are left; all join again."""
    if not job.is_initialized or not job.servers.is_left:
        raise error
    _roll_back(job, str(error))


def _read(job: Job) -> History:
    return make_history(job.around.log.read(job.spec.job))


def _is_held(job: Job, history: History) -> bool:
    """Returns whether the servers have what the log says, but for the last commit."""
    expected = {history.version, history.version - 1} - {-1}
    if history.placement is not None:
        return job.servers.resume(history.placement, expected)
    if list(history.servers) != job.servers.names:
        return False
    try:
        answers = job.servers.all("Status", {})
    except Refused:  # a server that does not know the job
        return False
    return all(answer["version"] in expected for answer in answers)


def _take_up(job: Job, history: History) -> None:
    job.reset(history)
    if history.snapshot is not None:
        snapshots.put_back(job, history.snapshot)
    if not job.is_held:
        job._newest_logged = -1  # its commit is not applied once more
    job.saved = max((c.version for c in usable(job, history)), default=-1)
    job.files.restore(history)
    job.replay(history)


def _roll_back(job: Job, reason: str) -> None:
    """Loads the newest checkpoint that all servers can load, and says so."""
    history, spec, say = _read(job), job.spec, job.around.say
    say(f"{spec.job}: {reason}; looking for its newest checkpoint")
    if spec.copies > 1:
        job.servers.reform()
    for fault in job.checkpoints.find()[1]:
        say(f"{spec.job}: not usable as a checkpoint: {fault}", "unusable")
    for checkpoint in usable(job, history):
        version = checkpoint.version
        # In the log first: a kill during the load must not leave servers at a version
        # that the log would take for the one before its newest.
        body = {"version": version, "cut": checkpoint.cut, "reason": reason}
        job.around.log.append(spec.job, "rollback", body)
        servers = {"spec": spec.message, "servers": job.servers.names}
        job.around.log.append(spec.job, "spec", servers)
        try:
            _load(job, version)
        except Refused as error:
            text = f"{spec.job}: version {version} cannot be loaded: {error}"
            say(text, "unusable", version=version)
            continue
        lost = history.version - version
        text = f"{spec.job}: continues from version {version}; {lost} commits abandoned"
        say(text, "rolled_back", version=version, abandoned=lost, reason=reason)
        _take_up(job, _read(job))
        return
    raise ValueError(
        f"job {spec.job!r}: no checkpoint in {job.checkpoints.folder} can be loaded "
        "(see above). Restore one from a copy, or start the job under another name."
    )


def _load(job: Job, version: int) -> None:
    """Makes all servers load a checkpoint."""
    job.servers.create(job.spec.message)
    folder = job.checkpoints.folder / str(version)
    job.servers.all("Load", {"folder": str(folder), "version": version})


def _is_only_saved(job: Job, history: History) -> bool:
    """Returns whether the job is finished and its newest version is a checkpoint."""
    found = (c.version == history.version for c in usable(job, history))
    return history.is_finished and any(found)


def usable(job: Job, history: History) -> list[Checkpoint]:
    """Returns complete checkpoints of this history and model, newest first."""
    return [
        checkpoint
        for checkpoint in job.checkpoints.find()[0]
        if history.cuts.get(checkpoint.version) == checkpoint.cut
        and checkpoint.layout == job.spec.layout.digest
    ]
