"""What goes wrong with state although nobody asked for anything impossible: damage, full disks, a failing rank."""

import errno
import resource

_LIMITS = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)


class StateError(RuntimeError):
    """State could not be written, or what was written is damaged. The message names the file and the rank."""


class ProcessLimitError(StateError):
    """This process could not open a file because of a limit, which says nothing about the file."""


def is_limit(error: OSError) -> bool:
    """Return whether a limit of the process or the system caused an error, whatever the file is."""
    return error.errno in _LIMITS


def describe(error: BaseException) -> str:
    """Return the text of an error, with the number of files that may be open where that limit is the cause."""
    if isinstance(error, OSError) and error.errno == errno.EMFILE:
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        return f"{error}; this process may have {limit} files open. Raise the limit (ulimit -n)."
    return str(error)
