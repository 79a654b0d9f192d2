"""Every change to a file system that this package makes, so that a test can kill it at each of them.

Nothing here is atomic by itself but `rename`; the callers build commits from these steps. Calls are those of `os`, so
that what a test puts in their place sees each of them.
"""

import ctypes
import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from d9d_state._digests import Digests, PartRecord

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2
_BLOCK = 1 << 22  # bytes hashed and written at a time


def write_file(path: Path, parts: Iterable[bytes | memoryview]) -> tuple[PartRecord, ...]:
    """Create a file that does not exist yet, with its bytes on the disk when this returns.

    Digests are computed by threads beside this one, which alone touches the file.

    Args:
        path: The file.
        parts: What it holds, one part after the other. The memory of a part must stay as it is until this returns.

    Returns:
        Size and digest of each part.
    """
    with Digests() as digests:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        try:
            for part in parts:
                view = memoryview(part).cast("B")
                digests.start_part()
                for start in range(0, len(view), _BLOCK):
                    block = view[start : start + _BLOCK]
                    digests.add(block)
                    _write_all(descriptor, block)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    return digests.records()


def make_folder(path: Path) -> None:
    """Create a folder and the ones above it, with their entries on the disk. One that exists stays as it is."""
    if not path.is_dir():
        make_folder(path.parent)
        os.mkdir(path)  # noqa: PTH102
        fsync_folder(path.parent)


def fsync_folder(path: Path) -> None:
    """Bring the entries of a folder to the disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def rename(src: Path, dst: Path) -> None:
    """Give a file or folder its final name; a file with that name is replaced in one step."""
    os.rename(src, dst)  # noqa: PTH104


def exchange(one: Path, other: Path) -> None:
    """Swap two folders of one file system in one step, so that there is no moment in which either name is missing.

    Where the system cannot do that, the moment is short, and the folder that was replaced is left as `.old`.
    """
    exchanged = _renameat2(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE)
    if exchanged != 0:
        aside = other.with_name(f"{other.name}.old")
        rename(other, aside)
        rename(one, other)
        rename(aside, one)


def remove_file(path: Path) -> None:
    """Delete a file, if it exists."""
    with suppress(FileNotFoundError):
        os.unlink(path)  # noqa: PTH108


def remove_folder(path: Path) -> None:
    """Delete a folder and what is in it. A symlink, in it or in its place, is deleted, not followed."""
    if path.is_symlink():
        remove_file(path)
        return
    for entry in sorted(path.iterdir()):
        if entry.is_dir() and not entry.is_symlink():
            remove_folder(entry)
        else:
            remove_file(entry)
    os.rmdir(path)  # noqa: PTH106


def _renameat2(*arguments: int | bytes) -> int:
    """Linux's `renameat2`, which Python does not offer; -1 where it does not exist or the file system refuses."""
    try:
        return int(ctypes.CDLL(None, use_errno=True).renameat2(*arguments))
    except (AttributeError, OSError, TypeError):
        return -1


def _write_all(descriptor: int, block: memoryview) -> None:
    while block:
        block = block[os.write(descriptor, block) :]
