"""Exit statuses, messages and run folders agree with what really happened."""

import errno
import os

import pytest
from test_failed_steps import events, run
from tiny_runs import digest, main, sets_of, train

from meshloom.launch.exit_codes import BAD_INPUT, UNREACHABLE
from meshloom.trainer.checkpoint import manager
from meshloom.trainer.commands import forecast_observer, report
from meshloom.trainer.job import preemption
from meshloom.trainer.record import failures


@pytest.mark.parametrize(
    ("code", "status"),
    [
        (errno.ENOSPC, BAD_INPUT),
        (errno.EROFS, BAD_INPUT),
        (errno.EACCES, BAD_INPUT),
        (errno.ENOENT, BAD_INPUT),
        (errno.EIO, UNREACHABLE),
        (errno.ESTALE, UNREACHABLE),
        (errno.ETIMEDOUT, UNREACHABLE),
        (errno.ECONNRESET, UNREACHABLE),
    ],
)
def test_only_what_the_user_must_fix_is_never_retried(monkeypatch, capfd, code, status):
    def fail(args):
        raise OSError(code, os.strerror(code), "/somewhere")

    monkeypatch.setattr(report, "_report", fail)
    assert main(["report", "/somewhere"]) == status
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith(f"meshloom: /somewhere: {os.strerror(code)}")
    assert ("run the same command again" in line) == (
        code == errno.ENOSPC or status == UNREACHABLE
    )


def test_an_os_error_quoted_by_a_library_is_recognized():
    quoted = ValueError("INTERNAL: writing x [OS error 28: ENOSPC No space left]")
    assert failures.errno_of(quoted) == errno.ENOSPC
    assert failures.errno_of("rename failed: Read-only file system") == errno.EROFS
    assert failures.errno_of("no such thing") is None


def test_insisting_in_vain_changes_nothing(tmp_path, capfd):
    folder = tmp_path / "run"
    assert main(train(folder)) == 0
    (folder / ".lock").unlink()
    before = digest(folder)
    insist = train(folder, "--steps", "8", "--insist", *sets_of("model.d_ff=48"))
    assert main(insist) == BAD_INPUT
    assert "does not fit this config" in capfd.readouterr().err
    (folder / ".lock").unlink()
    del before[str(folder)]  # its time changes with the lock
    after = digest(folder)
    del after[str(folder)]
    assert after == before
    assert main(train(folder)) == 0  # the original config is still accepted


def test_a_report_that_fails_does_not_fail_a_finished_run(tmp_path, capfd, monkeypatch):
    def fail(folder):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(forecast_observer, "write_report", fail)
    assert main(train(tmp_path)) == 0
    out = capfd.readouterr().out
    assert "warning: could not write the report" in out and "complete and saved" in out
    (warning,) = events(tmp_path, "warning")
    assert "No space left on device" in warning["text"]


def test_a_stop_among_failed_steps_saves_the_step_it_reports(tmp_path):
    # Batches 4 to 8 fail; the run is asked to stop after step 6.
    with pytest.raises(preemption.Preempted, match="saved at step 6"):
        run(tmp_path, bad=range(4, 9), should_stop=lambda step: step == 6)
    assert manager.committed_steps(tmp_path / "checkpoints") == [4, 6]
    assert [row["step"] for row in events(tmp_path, "preempted")] == [6]
