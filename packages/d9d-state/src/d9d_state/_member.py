"""Safe opening of a file whose name comes from an untrusted index or manifest.

A path that is checked first and opened later may name another file by then. Here the file is opened with `O_NOFOLLOW`
and `O_NONBLOCK`, checked with `fstat`, and returned as a descriptor.
"""

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO

from d9d_dist import UserError
from d9d_state.errors import ProcessLimitError, describe, is_limit

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_FILE = (
    os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
)  # without O_NONBLOCK, opening a FIFO blocks until a writer opens it


def open_member(folder: Path, name: str) -> int:
    """Open a regular file directly inside a folder, for reading.

    Symlinks are refused, except those of the Hugging Face cache: from `snapshots/<revision>/` to `blobs/` beside it.

    Args:
        folder: Folder of the file; may itself be a symlink.
        name: File name from an untrusted source such as a manifest or an index.

    Returns:
        A file descriptor, which the caller closes. `os.fstat` and `os.pread` on it refer to the file that was checked.

    Raises:
        UserError: If the name is not a plain file name, or the file does not exist, is not regular or cannot be read.
        StateError: If a limit of the process or the system, such as the number of open files, prevents opening.
    """
    if not is_plain(name):
        raise UserError(f"{folder} names the file {name[:200]!r}; expected the plain name of a file in that folder.")
    path = folder / name
    try:
        around = os.open(folder, _FOLDER)
        try:
            descriptor = _open_at(around, name, folder)
        finally:
            os.close(around)
    except OSError as error:
        if is_limit(error):
            raise ProcessLimitError(f"{path} cannot be opened: {describe(error)}") from error
        advice = " The folder is incomplete; download or copy it again." if isinstance(error, FileNotFoundError) else ""
        raise UserError(f"{path} cannot be read: {error.strerror}.{advice}") from error
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        os.close(descriptor)
        raise _refusal(path, mode)
    return descriptor


def open_member_file(folder: Path, name: str) -> BinaryIO:
    """Open a regular file directly inside a folder as a binary file object; see `open_member`."""
    return os.fdopen(open_member(folder, name), "rb")


def is_plain(name: str) -> bool:
    """Return True if a name is a plain file name: no path separators, not empty, not `.` or `..`."""
    return name not in ("", ".", "..") and not any(part in name for part in ("/", "\\", "\0"))


def _open_at(around: int, name: str, folder: Path) -> int:
    # Opening a device can have side effects, so the mode is checked before opening, and again afterwards.
    mode = os.stat(name, dir_fd=around, follow_symlinks=False).st_mode
    if stat.S_ISLNK(mode):
        return _open_linked(around, name, folder)
    if not stat.S_ISREG(mode):
        raise _refusal(folder / name, mode)
    try:
        return os.open(name, _FILE, dir_fd=around)
    except OSError as error:
        if error.errno == errno.ELOOP:  # it became a symlink after the stat
            raise _refusal(folder / name, stat.S_IFLNK) from error
        raise


def _open_linked(around: int, name: str, folder: Path) -> int:
    """Open the target of a Hugging Face cache symlink; refuse every other symlink."""
    target = Path(os.readlink(name, dir_fd=around))
    snapshots = folder.resolve().parent
    blobs = snapshots.parent / "blobs"
    is_cached = (
        snapshots.name == "snapshots" and target.parent in (Path("../../blobs"), blobs) and is_plain(target.name)
    )
    if not is_cached:
        raise _refusal(folder / name, stat.S_IFLNK)
    beside = os.open(blobs, _FOLDER | os.O_NOFOLLOW)
    try:
        mode = os.stat(target.name, dir_fd=beside, follow_symlinks=False).st_mode
        if not stat.S_ISREG(mode):
            raise _refusal(blobs / target.name, mode)
        return os.open(target.name, _FILE, dir_fd=beside)
    finally:
        os.close(beside)


def _refusal(path: Path, mode: int) -> UserError:
    kinds = {stat.S_IFLNK: "a symlink", stat.S_IFDIR: "a folder", stat.S_IFIFO: "a FIFO", stat.S_IFSOCK: "a socket"}
    kind = kinds.get(stat.S_IFMT(mode), "a special file")
    return UserError(f"{path} is {kind}; expected a regular file.")
