"""Exit codes of unfinished jobs, by which a launch script decides what to do next."""

import os
import signal
from enum import IntEnum
from typing import final

QUIET_TORCHRUN = "D9D_TORCHRUN"
"""Environment variable that `d9d-torchrun` sets for its ranks."""

_IN_TORCHRUN = "TORCHELASTIC_RUN_ID"


class ExitCode(IntEnum):
    """Exit codes of a process, in addition to 0 for a finished job and 1 for an exception.

    A second signal or the end of the grace period ends a process without saving. It then exits with 128 plus the signal
    number, as shells report it: 143 for SIGTERM.
    """

    USER_ERROR = 2
    """Invalid configuration or input. Restarting does not help."""

    STOPPED = 75
    """The job saved a checkpoint and stopped after a signal, or to replace a slow host. A restart continues it.

    (EX_TEMPFAIL)
    """

    HANG = 124
    """No progress within the timeout; stderr names the missing rank. Restart the job, perhaps without its machine."""

    PEER_LOST = 125
    """Another rank failed or its process died, and this rank's main thread did not exit by itself."""

    INTERRUPTED = 130
    """Ctrl-C (SIGINT). The message says what is saved."""


@final
class Stopped(SystemExit):
    """Exception after the job has saved a checkpoint because of a signal, or to replace a slow host.

    Uncaught, it exits with `ExitCode.STOPPED`, or with `ExitCode.INTERRUPTED` if the signal was SIGINT (Ctrl-C).

    The signals stay ignored, so that another signal does not change the exit code. A caller that catches this exception
    and continues must set their handlers again with `signal.signal`.

    Attributes:
        by: The signal, or the slow host that a spare host replaces.
        step: Number of completed steps, all of which are saved.
    """

    def __init__(self, by: signal.Signals | str, *, step: int) -> None:
        super().__init__(int(ExitCode.INTERRUPTED if by is signal.SIGINT else ExitCode.STOPPED))
        self.by, self.step = by, step

    @property
    def cause(self) -> str:
        """Cause of the stop, in words."""
        if isinstance(self.by, signal.Signals):
            return f"stopped by {self.by.name}"
        return f"stopped to replace {self.by}, which is slow, with a spare host"

    def __str__(self) -> str:
        if not isinstance(self.by, signal.Signals):
            return f"{self.cause}, after step {self.step}, which is saved."
        by = "Ctrl-C (SIGINT)" if self.by is signal.SIGINT else self.by.name
        saved = f"stopped by {by} after step {self.step}, which is saved. The same command resumes the job."
        if _IN_TORCHRUN not in os.environ or QUIET_TORCHRUN in os.environ:
            return saved
        # torchrun raises the signal as an exception once all ranks have ended; ranks cannot prevent it.
        return f"{saved} torchrun ends with exit code 1 and a traceback of its own; d9d-torchrun prints none."
