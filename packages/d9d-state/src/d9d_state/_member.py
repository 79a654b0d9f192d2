"""Opening of a regular file whose name comes from an untrusted index or manifest."""

import os
import stat
from pathlib import Path
from typing import BinaryIO

from d9d_dist import UserError
from d9d_state.errors import ProcessLimitError, describe, is_limit

_KINDS = {stat.S_IFLNK: "a symlink", stat.S_IFDIR: "a folder", stat.S_IFIFO: "a FIFO", stat.S_IFSOCK: "a socket"}


def open_member(folder: Path, name: str) -> int:
    """Open a regular file directly inside a folder for reading; return its descriptor, which the caller closes.

    Symlinks are refused, except those of the Hugging Face cache: from `snapshots/<revision>/` to `blobs/` beside it.
    Raises `UserError`, or `StateError` at a process or system limit such as open files.
    """
    if not is_plain(name):
        raise UserError(f"{folder} names the file {name[:200]!r}; expected the plain name of a file in that folder.")
    path = folder / name
    try:
        file = _cached(path) if path.is_symlink() else path
        mode = file.lstat().st_mode  # before opening, because opening a device or a FIFO has side effects
        if stat.S_ISREG(mode):
            return os.open(file, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        if is_limit(error):
            raise ProcessLimitError(f"{path} cannot be opened: {describe(error)}") from error
        advice = " The folder is incomplete; download or copy it again." if isinstance(error, FileNotFoundError) else ""
        raise UserError(f"{path} cannot be read: {error.strerror}.{advice}") from error
    kind = _KINDS.get(stat.S_IFMT(mode), "a special file")
    raise UserError(f"{file} is {kind}; expected a regular file.")


def open_member_file(folder: Path, name: str) -> BinaryIO:
    """Open a regular file directly inside a folder as a binary file object; see `open_member`."""
    return os.fdopen(open_member(folder, name), "rb")


def is_plain(name: str) -> bool:
    """Return True if a name is a plain file name: no path separators, not empty, not `.` or `..`."""
    return name not in ("", ".", "..") and not any(part in name for part in ("/", "\\", "\0"))


def _cached(link: Path) -> Path:
    """Return the target of a Hugging Face cache symlink; return any other symlink itself."""
    target = link.readlink()
    snapshots = link.parent.resolve().parent
    blobs = snapshots.parent / "blobs"
    is_cached = snapshots.name == "snapshots" and target.parent in (Path("../../blobs"), blobs)
    return blobs / target.name if is_cached and is_plain(target.name) and not blobs.is_symlink() else link
