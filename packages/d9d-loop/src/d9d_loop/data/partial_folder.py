"""A folder under another name until it is complete; what a killed process left of one, the next process takes away.

A writer holds a lock on its folder, which the system gives back however the writer dies. Where a file system has no
locks nothing is taken away; where its locks are of one machine only, neither is what others write: names say whose
folder it is.
"""

import fcntl
import os
import shutil
import socket
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import final

_SUFFIX = ".d9d-partial"


@final
class PartialFolder:
    """A new folder beside its final place, which holds no files yet.

    What processes of this machine left beside it when they were killed is removed.

    Args:
        target: Its final place.

    Attributes:
        path: Where it is until then.
    """

    def __init__(self, target: Path) -> None:
        self._target = target
        here = f".{socket.gethostname()}."
        target.parent.mkdir(parents=True, exist_ok=True)
        for left in target.parent.glob(f".*{_SUFFIX}"):
            if here in left.name:
                _remove_abandoned(left)
        while True:
            self.path = Path(tempfile.mkdtemp(prefix=f".{target.name}{here}", suffix=_SUFFIX, dir=target.parent))
            try:
                self._descriptor = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            except FileNotFoundError:  # another process took it away already
                continue
            with suppress(OSError):  # no locks here
                fcntl.flock(self._descriptor, fcntl.LOCK_EX)
            if self.path.exists():
                return
            os.close(self._descriptor)  # another process took it away before it was locked

    def publish(self) -> None:
        """Give the folder its place.

        Raises:
            OSError: If something is there.
        """
        self.path.chmod(0o755)  # a temporary folder is for its owner alone
        self.path.rename(self._target)

    def close(self) -> None:
        """Remove it, unless it has its place."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._descriptor)


def _remove_abandoned(folder: Path) -> None:
    """Remove a folder whose lock can be had: nobody writes to it."""
    with suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
        finally:
            os.close(descriptor)
