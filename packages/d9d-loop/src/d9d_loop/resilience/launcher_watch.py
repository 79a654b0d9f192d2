"""Watch of the launcher: a rank whose launcher is gone must not train on as an orphan.

torchrun and `d9d-torchrun` end their ranks, unless they are killed themselves. Then nobody restarts the ranks or reads
their exit codes, but they hold their device and the lock of the run folder.
"""

import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Final, Self, final

from d9d_dist.failures.peers import process_state
from d9d_loop.resilience.exit_codes import ExitCode

LAUNCHER: Final = "D9D_LAUNCHER"
"""Environment variable with the process id of `d9d-torchrun`, which it sets for its ranks."""

_SECONDS = 0.25  # interval between two looks at the launcher's process
_GONE: Final = -1


def _find_launcher() -> int:
    """Return the torchrun that started this process or its wrapper; `_GONE` if it was killed since then.

    torchrun runs in Python, as the user of its ranks, and starts each rank in a session of its own. The parent of an
    orphan is init or a process of the system. Without torchrun, return the parent.
    """
    try:
        leader = Path("/proc", str(os.getsid(0)))
        if b"TORCHELASTIC_RUN_ID=" not in (leader / "environ").read_bytes():
            return os.getppid()
        parent = int((leader / "stat").read_bytes().rpartition(b")")[2].split()[1])
        return parent if "python" in Path(f"/proc/{parent}/exe").readlink().name else _GONE
    except PermissionError:  # a process of another user
        return _GONE
    except OSError:  # a system without /proc
        return os.getppid()


# Found at the import: if the launcher is killed later, another process becomes the parent.
_launchers = [_find_launcher()]
os.register_at_fork(after_in_child=lambda: _launchers.append(os.getppid()))


def launcher_process() -> int | None:
    """Return the process id of the launcher that started this rank; `None` without torchrun."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return None
    return int(os.environ.get(LAUNCHER, _launchers[-1]))


@final
class LauncherWatch:
    """Context manager that calls a function, in a thread, if the launcher of this rank is gone.

    By default, the function ends the process with `ExitCode.PEER_LOST`.
    """

    def __init__(self, on_loss: Callable[[], None] | None = None) -> None:
        self._on_loss = on_loss or end_orphan
        self._launcher = launcher_process()
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="d9d-launcher-watch", daemon=True)

    def __enter__(self) -> Self:
        if self._launcher is not None:
            self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Stop watching."""
        self._end.set()

    def hand_over(self) -> None:
        """Stop watching, because another watch follows. If the launcher is gone, call the function in this thread."""
        self.close()
        if self._is_gone():
            self._on_loss()

    def _watch(self) -> None:
        while not self._is_gone():
            if self._end.wait(_SECONDS):
                return
        self._on_loss()

    def _is_gone(self) -> bool:
        launcher = self._launcher
        return launcher is not None and (launcher == _GONE or process_state(launcher) == "is gone")


def end_orphan() -> None:
    """End this process, whose launcher is gone."""
    out = sys.__stderr__ or sys.stderr
    try:
        print("d9d: this rank exits without saving: its launcher is gone.", file=out, flush=True)
    finally:  # the launcher may have read the output
        os._exit(ExitCode.PEER_LOST)
