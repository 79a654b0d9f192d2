"""Temporary folder that is renamed into place when complete. Folders of killed processes are removed later.

A writer holds a `flock` on its folder, which the operating system releases when the writer dies. On a file system
without locks, no folder is removed. Since locks may be local to a machine, a process removes only folders whose name
contains its own host name.
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
    """New, empty temporary folder (`path`) in the parent folder of `target`, its final path.

    The constructor also removes the temporary folders of killed processes of this machine.
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
            except FileNotFoundError:  # another process has already removed the folder
                continue
            with suppress(OSError):  # the file system does not support locks
                fcntl.flock(self._descriptor, fcntl.LOCK_EX)
            if self.path.exists():
                return
            os.close(self._descriptor)  # another process removed the folder before this one locked it

    def publish(self) -> None:
        """Rename the folder to its final path. Raise `OSError` if that path is a file or a non-empty folder."""
        self.path.chmod(0o755)  # mkdtemp creates it with mode 0o700
        self.path.rename(self._target)

    def close(self) -> None:
        """Remove the folder unless it was published, and release the lock."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._descriptor)


def _remove_abandoned(folder: Path) -> None:
    """Remove a folder if its lock is free, which means that its writer has ended."""
    with suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
        finally:
            os.close(descriptor)
