"""How a job that did not come to its end leaves, for the scripts that start it: the code says what to do next."""

from enum import IntEnum


class ExitCode(IntEnum):
    """Exit codes of a process, besides 0 for a job that is done and 1 for an exception.

    A process that a signal was not waited for to be obeyed, because a second one came or the grace period was over,
    ends with 128 and the number of the signal, as a shell would show it: 143 for SIGTERM.
    """

    USER_ERROR = 2
    """What was asked for is impossible. Starting it again does not help."""

    STOPPED = 75
    """A signal asked the job to stop and it has saved a checkpoint: start it again, and it continues. (EX_TEMPFAIL)"""

    HANG = 124
    """A rank did not come; the standard error says which. Start it again, perhaps without that machine."""

    PEER_LOST = 125
    """Another rank failed or its process is gone, and this one could not leave by itself."""

    INTERRUPTED = 130
    """Ctrl-C."""
