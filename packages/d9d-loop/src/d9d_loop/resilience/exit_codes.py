"""Exit codes of unfinished jobs, by which a launch script decides what to do next."""

import os
import signal
from enum import Enum, IntEnum
from typing import Literal, TypeAlias, final

QUIET_TORCHRUN = "D9D_TORCHRUN"
"""Environment variable that `d9d-torchrun` sets for its ranks."""

_IN_TORCHRUN = "TORCHELASTIC_RUN_ID"


Restart: TypeAlias = Literal["never", "always", "limited"]
"""Policy of a scheduler after an exit code. "limited": restart a limited number of times."""


class ExitCode(IntEnum):
    """Exit codes of a process, in addition to 0 for a finished job.

    A killed process exits with 128 plus the signal number, as shells report it: 137 for SIGKILL. The same holds after a
    second signal, or at the end of the grace period.
    """

    EXCEPTION = 1
    """An exception, such as a full disk or an error in the model. stderr has its traceback or message."""

    USER_ERROR = 2
    """Invalid configuration or input. Restarting does not help."""

    STOPPED = 75
    """The job saved a checkpoint and stopped after a signal, or to replace a slow host. A restart continues it.

    (EX_TEMPFAIL)
    """

    HANG = 124
    """No progress within the timeout; stderr names the missing rank. Restart the job, perhaps without its machine."""

    PEER_LOST = 125
    """Another rank failed or its process died, so this rank could not continue. Or the launcher is gone."""

    INTERRUPTED = 130
    """Ctrl-C (SIGINT). The message says what is saved."""


NOT_RESTARTED = (ExitCode.USER_ERROR, ExitCode.INTERRUPTED)
"""Exit codes after which a restart does not help, or was not wanted."""


def restart_policy(code: int) -> Restart:
    """Return how a scheduler restarts a job that ended with an exit code: the table of `docs/resilience.md`."""
    if code == 0 or code in NOT_RESTARTED:
        return "never"
    return "always" if code == ExitCode.STOPPED else "limited"


class Lost(Enum):
    """Process whose loss stops a job."""

    LAUNCHER = 127
    """torchrun or `d9d-torchrun`. The value is above the numbers of signals."""


@final
class Stopped(SystemExit):
    """Exit of a job that saved a checkpoint and stopped: on a signal or a lost launcher, or to replace a host.

    Uncaught, it exits with `ExitCode.STOPPED`; with `ExitCode.INTERRUPTED` if the signal was SIGINT (Ctrl-C), or with
    `ExitCode.PEER_LOST` if the launcher is gone.

    The signals stay ignored, so that another signal does not change the exit code. A caller that catches this exception
    and continues must set their handlers again with `signal.signal`.

    Attributes:
        by: The signal, the lost launcher, or the slow host that a spare host replaces.
        step: Number of completed steps, all of which are saved.
    """

    def __init__(self, by: signal.Signals | Lost | str, *, step: int) -> None:
        codes = {signal.SIGINT: ExitCode.INTERRUPTED, Lost.LAUNCHER: ExitCode.PEER_LOST}
        super().__init__(int(codes.get(by, ExitCode.STOPPED)))
        self.by, self.step = by, step

    @property
    def cause(self) -> str:
        """Cause of the stop, in words."""
        if isinstance(self.by, signal.Signals):
            return f"stopped by {self.by.name}"
        if isinstance(self.by, Lost):
            return "stopped because the launcher is gone"
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
