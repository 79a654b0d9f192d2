"""Opening of a regular file whose name comes from an untrusted index or manifest."""

import errno
import os
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias, final

from d9d_dist import UserError
from d9d_state.errors import UnreadableError, describe
from d9d_state.object_path import ObjectPath

AnyPath: TypeAlias = Path | ObjectPath
"""Path in a file system or an object store."""

_LIMITS = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)
_OBJECT_STAMP = ("size", "ETag", "e_tag", "etag", "generation", "LastModified", "last_modified", "mtime")
_KINDS = {stat.S_IFLNK: "a symlink", stat.S_IFDIR: "a folder", stat.S_IFIFO: "a FIFO", stat.S_IFSOCK: "a socket"}


def open_member(folder: Path, name: str) -> int:
    """Open a regular file directly inside a folder for reading; return its descriptor, which the caller closes.

    Symlinks are errors, except in the Hugging Face cache, from `snapshots/<revision>/` to `blobs/` beside `snapshots`.
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
        if error.errno in _LIMITS:
            raise UnreadableError(f"{path} cannot be opened: {describe(error)}") from error
        raise _unreadable(path, error) from error
    kind = _KINDS.get(stat.S_IFMT(mode), "a special file")
    raise UserError(f"{file} is {kind}; expected a regular file.")


def read_member(folder: AnyPath, name: str, limit: int | None = None) -> bytes:
    """Read a regular file directly inside a folder, or its first `limit` bytes; errors are those of `open_member`."""
    if isinstance(folder, Path):
        with os.fdopen(open_member(folder, name), "rb") as file:
            return file.read(limit)
    path = _plain_object(folder, name)
    try:
        return path.read_bytes()[:limit]
    except OSError as error:
        raise _unreadable(path, error) from error


@final
@dataclass(frozen=True, slots=True)
class MemberReader:
    """Reader of byte ranges of a file directly inside a folder.

    Attributes:
        size: Size of the file in bytes.
        stamp: Value that differs from that of an earlier reader if the file was replaced or written since.
    """

    size: int
    stamp: tuple[object, ...]
    source: int | ObjectPath

    def read_into(self, buffer: memoryview, position: int) -> int:
        """Read up to `len(buffer)` bytes from a position; return their number."""
        if isinstance(self.source, ObjectPath):
            return self.source.read_into(buffer, position)
        return os.preadv(self.source, [buffer], position)

    def read(self, size: int, position: int) -> bytes:
        """Read up to `size` bytes from a position."""
        if isinstance(self.source, int):
            return os.pread(self.source, size, position)  # without a copy of the bytes
        buffer = memoryview(bytearray(size))
        return bytes(buffer[: self.read_into(buffer, position)])

    def close(self) -> None:
        """Close the file."""
        if isinstance(self.source, int):
            os.close(self.source)


def open_reader(folder: AnyPath, name: str) -> MemberReader:
    """Open a regular file directly inside a folder for reads of ranges; errors are those of `open_member`."""
    if isinstance(folder, Path):
        descriptor = open_member(folder, name)
        found = os.fstat(descriptor)
        return MemberReader(found.st_size, stamp_of(found), descriptor)
    path = _plain_object(folder, name)
    try:
        info = path.info()
        return MemberReader(int(info["size"]), tuple(map(info.get, _OBJECT_STAMP)), path)
    except OSError as error:
        raise _unreadable(path, error) from error


def stamp_of(found: os.stat_result) -> tuple[int, ...]:
    """Return a value that changes if a file or folder is replaced or written."""
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


def _plain_object(folder: ObjectPath, name: str) -> ObjectPath:
    if not is_plain(name):
        raise UserError(f"{folder} names the file {name[:200]!r}; expected the plain name of a file in that folder.")
    return folder / name


def _unreadable(path: AnyPath, error: OSError) -> UserError:
    advice = " The folder is incomplete; download or copy it again." if isinstance(error, FileNotFoundError) else ""
    return UserError(f"{path} cannot be read: {error.strerror or error}.{advice}")


def as_folder(folder: str | AnyPath) -> AnyPath:
    """Return the path of a folder, or of a URL such as `s3://bucket/run`."""
    if isinstance(folder, ObjectPath):
        return folder
    return ObjectPath.open(folder) if "://" in str(folder) and isinstance(folder, str) else Path(folder)


def as_local(path: AnyPath) -> Path:
    """Return a path in the file system; raise `UserError` for a path in an object store."""
    if isinstance(path, ObjectPath):
        raise UserError(
            f"{path} is in an object store; expected a local folder. Use `root`, or copy the folder to a disk."
        )
    return path


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
