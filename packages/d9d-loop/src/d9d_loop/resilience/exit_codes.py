"""Exit codes of unfinished jobs, by which a launch script decides what to do next."""

from enum import IntEnum


class ExitCode(IntEnum):
    """Exit codes of a process, in addition to 0 for a finished job and 1 for an exception.

    A second signal or the end of the grace period ends a process without saving. It then exits with 128 plus the signal
    number, as shells report it: 143 for SIGTERM.
    """

    USER_ERROR = 2
    """Invalid configuration or input. Restarting does not help."""

    STOPPED = 75
    """The job saved a checkpoint and stopped after a signal. A restart continues it. (EX_TEMPFAIL)"""

    HANG = 124
    """No progress within the timeout; stderr names the missing rank. Restart the job, perhaps without its machine."""

    PEER_LOST = 125
    """Another rank failed or its process died, and this rank's main thread did not exit by itself."""

    INTERRUPTED = 130
    """Ctrl-C (SIGINT). The message says what is saved."""
