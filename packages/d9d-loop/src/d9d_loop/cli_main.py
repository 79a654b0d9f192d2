"""Mapping of a script's exceptions to messages and exit codes."""

import os
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager, suppress

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from d9d_dist import StartupTimeoutError, UserError
from d9d_dist.errors import AddressInUseError
from d9d_loop.data_error import DataError
from d9d_loop.resilience import ExitCode, Stopped
from d9d_loop.user_frames import describe_frames, user_frames
from d9d_state import StateError

_SECONDS_FOR_FIRST = 5.0
_PUBLISHED = "d9d_published"  # `first_failure.PUBLISHED`, whose module imports torch


@contextmanager
def cli_main() -> Generator[None]:
    """Run the main part of a script in a `with` statement and map its exceptions to exit codes.

    These exceptions print a message to standard error; all others propagate with their traceback.

    - `UserError`: exit code 2. Printed by local rank 0, and after 5 seconds by other ranks that the launcher has not
      ended by then: rank 0 may be without the error. Each rank prints errors with notes at once, and so does
      the first rank that fails in a running job.
    - `DataError` because of a `UserError`, such as an invalid line in a file: exit code 2.
    - `StartupTimeoutError`: exit code 124, as for a rank that hangs. Printed on each rank.
    - A broken connection to another rank, which failed before: exit code 125. Printed on each rank.
    - `StateError`, such as a full disk, or a port in use: exit code 1. Printed on each rank that raises it.
    - pydantic's `ValidationError`, such as of `TrainerConfig(...)`: exit code 2, with a line for each invalid key.
    - `KeyboardInterrupt`: exit code 130. Its notes say what is saved.
    - `Stopped`, after a signal or because of a slow host: exit code 75 (`ExitCode.STOPPED`), or 130 for Ctrl-C.

    An exception in the user's own model, task or data prints the user's lines before the whole traceback.
    """
    try:
        yield
    except UserError as error:
        notes = "".join(f" ({note})" for note in getattr(error, "__notes__", ()))
        raise _user_error(f"{error}{notes}", everywhere=bool(notes) or _PUBLISHED in vars(error)) from None
    except StartupTimeoutError as error:
        _say(str(error), everywhere=True)
        raise SystemExit(ExitCode.HANG) from None
    except Stopped as stopped:
        _say(str(stopped))
        raise
    except KeyboardInterrupt as interrupt:
        _say(" ".join(["interrupted.", *getattr(interrupt, "__notes__", ())]))
        raise SystemExit(ExitCode.INTERRUPTED) from None
    except ValidationError as error:
        raise _user_error(
            "\n     ".join([f"{error.title} is invalid:", *map(_describe_invalid, error.errors())])
        ) from None
    except Exception as error:
        if (code := _explain(error)) is None:
            raise
        raise SystemExit(code) from None


def _user_error(message: str, *, everywhere: bool = False) -> SystemExit:
    """Print a user error and return the `SystemExit`; under Slurm, write the exit code to a file for the batch script.

    A launcher ends all ranks when the first has exited. So rank 0 gets the time to print what all ranks would print.
    """
    if not everywhere and not _is_first():
        with suppress(KeyboardInterrupt):
            time.sleep(_SECONDS_FOR_FIRST)
    _say(message, everywhere=True)
    if {"SLURM_PROCID", "D9D_NODE_FOLDER"} <= os.environ.keys() and "RANK" not in os.environ:
        from d9d_loop.resilience.node_files import write_user_error  # noqa: PLC0415 - imports torch

        write_user_error(ExitCode.USER_ERROR)
    return SystemExit(ExitCode.USER_ERROR)


def _explain(error: Exception) -> ExitCode | None:
    """Print what an exception of a running job means; return its exit code, or `None` to print the traceback too."""
    message = " ".join([str(error), *getattr(error, "__notes__", ())])
    if isinstance(error, DataError) and isinstance(error.__cause__, UserError):
        _say(str(error), everywhere=True)
        return ExitCode.USER_ERROR
    if _is_victim(error):
        _say(message, everywhere=True)
        return ExitCode.PEER_LOST
    if isinstance(error, StateError | AddressInUseError):
        _say(message, everywhere=True)
        return ExitCode.EXCEPTION
    if frames := user_frames(error):
        lines = [f"{type(error).__name__}: {error}", *describe_frames(frames), "The whole traceback:"]
        _say("\n".join(lines), everywhere=True)
    return None


def _is_victim(error: Exception) -> bool:
    """Return True if an exception is the consequence of another rank's failure."""
    if "torch" not in sys.modules:  # without torch there are no other ranks
        return False
    from d9d_dist.failures.first_failure import is_victim  # noqa: PLC0415 - imports torch

    return is_victim(error)


def _describe_invalid(details: ErrorDetails) -> str:
    name = ".".join(map(str, details["loc"]))
    message = details["msg"].replace("Input should be", "expected", 1)
    return f"{name} is missing" if details["type"] == "missing" else f"{name} = {details['input']!r:.60}; {message}"


def _say(message: str, *, everywhere: bool = False) -> None:
    """Print to standard error on local rank 0, or on every rank: launchers show the output of all ranks."""
    if everywhere or _is_first():
        print(f"d9d: {message}", file=sys.stderr)


def _is_first() -> bool:
    return os.environ.get("LOCAL_RANK", "0") == "0"
