"""Commands of operators that a job runs when it fails or completes, such as a message to a chat."""

import os
import subprocess
import sys
from pathlib import Path

from d9d_loop.report.run_status import read_status

_SECONDS = 60.0


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
        # In an own session, because launchers signal the process groups of failed jobs.
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
