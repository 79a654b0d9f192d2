"""Mapping of the exceptions of a script to messages and exit codes."""

import os
import sys
from collections.abc import Generator
from contextlib import contextmanager

from d9d_dist import UserError
from d9d_loop.resilience import Stopped
from d9d_state import StateError


@contextmanager
def cli_main() -> Generator[None]:
    """Run the main part of a script in a `with` statement and map its exceptions to exit codes.

    These exceptions print a message to standard error; all others propagate with their traceback.

    - `UserError`: exit code 2. Printed once per node, or on each rank that raises it if it has notes.
    - `StateError`, such as a full disk: exit code 1. Printed on each rank that raises it.
    - `KeyboardInterrupt`: exit code 130. Checkpoints are kept; the same command resumes from the newest one.
    - `Stopped`, after a signal asked the job to stop: exit code 75 (`ExitCode.STOPPED`).
    """
    try:
        yield
    except UserError as error:
        notes = "".join(f" ({note})" for note in getattr(error, "__notes__", ()))
        _say(f"{error}{notes}", everywhere=bool(notes))
        raise SystemExit(2) from None
    except StateError as error:
        _say(" ".join([str(error), *getattr(error, "__notes__", ())]), everywhere=True)
        raise SystemExit(1) from None
    except Stopped as stopped:
        _say(str(stopped))
        raise
    except KeyboardInterrupt:
        _say("interrupted. The same command resumes from the last checkpoint.")
        raise SystemExit(130) from None


def _say(message: str, *, everywhere: bool = False) -> None:
    """Print to standard error on local rank 0, or on every rank: launchers show the output of all ranks."""
    if everywhere or os.environ.get("LOCAL_RANK", "0") == "0":
        print(f"d9d: {message}", file=sys.stderr)
