"""Opens a file whose name somebody else wrote, so that what was checked is what is read.

A path that is checked first and opened later may have become another file in between. Here the file is opened without
following links and without waiting, looked at, and given on as a descriptor.
"""

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO

from d9d_dist import UserError
from d9d_state.errors import ProcessLimitError, describe, is_limit

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # opening a FIFO would wait for a writer


def open_member(folder: Path, name: str) -> int:
    """Open a regular file that is directly in a folder, for reading.

    Links are refused, save those of the Hugging Face cache: from `snapshots/<revision>/` into `blobs/` beside it.

    Args:
        folder: Where the file is; may itself be a link.
        name: Its name, from a manifest, an index or anything else that is not to be trusted.

    Returns:
        A descriptor, which the caller closes. What is asked of it (`os.fstat`, `os.pread`) is asked of this very file.

    Raises:
        UserError: If the name is not a plain one, or there is no regular file of that name, or it cannot be read.
        StateError: If a limit keeps this process from opening any file.
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
        advice = " The folder is incomplete; get it anew." if isinstance(error, FileNotFoundError) else ""
        raise UserError(f"{path} cannot be read: {error.strerror}.{advice}") from error
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        os.close(descriptor)
        raise _refusal(path, mode)
    return descriptor


def open_member_file(folder: Path, name: str) -> BinaryIO:
    """The same as a file object, which closes the descriptor."""
    return os.fdopen(open_member(folder, name), "rb")


def is_plain(name: str) -> bool:
    """Whether a name can only be that of an entry of the folder that it is looked up in."""
    return name not in ("", ".", "..") and not any(part in name for part in ("/", "\\", "\0"))


def _open_at(around: int, name: str, folder: Path) -> int:
    # Devices are not even opened, since that alone can have effects; the mode is looked at again after opening.
    mode = os.stat(name, dir_fd=around, follow_symlinks=False).st_mode
    if stat.S_ISLNK(mode):
        return _open_linked(around, name, folder)
    if not stat.S_ISREG(mode):
        raise _refusal(folder / name, mode)
    try:
        return os.open(name, _FILE, dir_fd=around)
    except OSError as error:
        if error.errno == errno.ELOOP:  # it has just become a link
            raise _refusal(folder / name, stat.S_IFLNK) from error
        raise


def _open_linked(around: int, name: str, folder: Path) -> int:
    """Open what a link of the Hugging Face cache means; refuse every other link."""
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
