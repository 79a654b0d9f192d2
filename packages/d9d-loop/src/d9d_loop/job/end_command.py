"""Commands of operators that a job runs when it fails or completes, such as a message to a chat."""

import os
import socket
import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from d9d_dist.failures.first_failure import NODE_FOLDER
from d9d_loop.config.trainer_config import RunConfig
from d9d_loop.report.run_status import read_status, write_failure
from d9d_loop.resilience.node_files import claims_report, write_job
from d9d_metrics.trackers.redaction import redact_text

_SECONDS = 60.0


@contextmanager
def early_failure_reported(run: RunConfig, rank: int) -> Generator[None]:
    """Report an exception before the process group starts; see `report_early_failure`. Nothing is written."""
    write_job(run.dir, run.on_failure)
    try:
        yield
    except Exception as error:
        report_early_failure(run, rank, error, writes_status=False)
        raise


def report_early_failure(run: RunConfig, rank: int, error: BaseException, *, writes_status: bool) -> None:
    """Report an exception other than an interrupt, before the journal of the job exists.

    The first failing rank of each node of `d9d-torchrun` reports it. With other launchers, the ranks cannot know which
    of them fail, and rank 0 reports it.
    """
    reports = rank == 0 or NODE_FOLDER in os.environ
    if reports and isinstance(error, Exception) and claims_report():
        cause = redact_text(describe_cause(error))
        report_failure(run.dir, run.on_failure, rank=rank, cause=cause, writes_status=writes_status)


def describe_cause(error: BaseException) -> str:
    """Return type, message and notes of an exception."""
    return "\n".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ())])


def report_failure(
    folder: Path, on_failure: str | None, *, rank: int, cause: str, first: str | None = None, writes_status: bool = True
) -> None:
    """Write the state "failed" to the status of a run, and run its command for failures."""
    if writes_status:
        write_failure(folder, cause, first=first)
    run_command(on_failure, folder, state="failed", rank=str(rank), host=socket.gethostname(), error=cause)


def run_command(command: str | None, folder: Path, **changes: str) -> None:
    """Run a shell command with the status of a run, and `changes`, as environment variables such as `D9D_STATE`.

    `D9D_RUN` is the run folder. The job does not depend on the command: a failure or a timeout of 60 seconds is only
    printed.
    """
    if command is None:
        return
    status = {**(read_status(folder) or {}), "run": str(folder.resolve()), **changes}
    environment = {f"D9D_{name.upper()}": _text(value) for name, value in status.items()}
    try:
        # In a session of its own, because launchers signal the process groups of failed jobs.
        subprocess.run(  # noqa: S602 - the user's own command
            command,
            shell=True,
            env={**os.environ, **environment},
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            timeout=_SECONDS,
            check=True,
        )
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        # The command may contain secrets, such as the address of a webhook.
        reason = (
            f"exit code {error.returncode}"
            if isinstance(error, subprocess.CalledProcessError)
            else type(error).__name__
        )
        print(f"d9d: the command for state {status.get('state')!r} failed: {reason}.", file=sys.stderr, flush=True)


def _text(value: object) -> str:
    return ",".join(map(str, value)) if isinstance(value, list) else "" if value is None else str(value)
