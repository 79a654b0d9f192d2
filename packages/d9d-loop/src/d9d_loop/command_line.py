"""How a script ends: a mistake is one message and code 2, a full disk one and 1, Ctrl-C 130, a bug a traceback."""

import os
import sys
from collections.abc import Generator
from contextlib import contextmanager

from d9d_dist import UserError
from d9d_loop.resilience import Stopped
from d9d_state import StateError


@contextmanager
def command_line() -> Generator[None]:
    """Run a script's main part in a `with` statement, and end the process as its outcome deserves.

    A `UserError` is printed as one message to the standard error, once on each node, and ends the process with exit
    code 2; a `StateError`, such as that of a full disk, is printed on every rank, with exit code 1. Ctrl-C ends it with
    130: what was saved is kept, and the same command continues from there. A job that a signal asked to stop says so,
    and ends it with 75 (`ExitCode.STOPPED`).
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
        _say("interrupted. The same command continues from the last checkpoint.")
        raise SystemExit(130) from None


def _say(message: str, *, everywhere: bool = False) -> None:
    """Print to the standard error, once on each node: a launcher shows what every process prints."""
    if everywhere or os.environ.get("LOCAL_RANK", "0") == "0":
        print(f"d9d: {message}", file=sys.stderr)
