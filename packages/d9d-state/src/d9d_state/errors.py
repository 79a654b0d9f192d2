"""Errors that are not the user's mistake: damaged files, full disks, rank failures, process limits, other versions."""

import errno
import resource
from collections.abc import Generator
from contextlib import contextmanager
from typing import TypeAlias

from d9d_dist import UserError

Errors: TypeAlias = type[Exception] | tuple[type[Exception], ...]


class StateError(RuntimeError):
    """Failure to read or write state, or damaged state. The message names the file and the failing ranks."""


class UnreadableError(StateError):
    """State that may be intact but cannot be read, e.g. because of a limit on open files or an unreachable store."""


class VersionError(UserError):
    """Intact state in a format of another version of this package. Restarting the job does not help."""


@contextmanager
def as_state_error(what: str = "", errors: Errors = (OSError, UnreadableError)) -> Generator[None]:
    """Raise `errors` of the body as `StateError`, with the text `what: error`, or only the error without `what`."""
    try:
        yield
    except errors as error:
        raise StateError(f"{what}: {describe(error)}" if what else describe(error)) from error


def describe(error: BaseException) -> str:
    """Return the error text. If the limit on open files is the cause, add its value and how to raise it."""
    if isinstance(error, OSError) and error.errno == errno.EMFILE:
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        return f"{error}; the limit of this process is {limit} open files. Raise the limit (ulimit -n)."
    return str(error)
