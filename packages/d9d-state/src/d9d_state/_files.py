"""File operations of checkpoints and exports: write with fsync, replace, rename and delete.

Only `rename`, `exchange` and `replace_file` are atomic; callers combine these functions into commits. For paths in an
object store, `make_folder` and `fsync` do nothing. The functions call `os` directly, not `pathlib`, so that
tests can intercept each call to fail it or to kill the process.
"""

import ctypes
import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor
from xxhash import xxh3_128

from d9d_state._digests import PartRecord
from d9d_state._member import AnyPath
from d9d_state.object_path import ObjectPath

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2
_BLOCK = 1 << 22  # bytes hashed and written at a time; blocks of 256 KiB would take 1.4 times the CPU time


def write_file(path: AnyPath, parts: Iterable[bytes | memoryview]) -> tuple[PartRecord, ...]:
    """Create a new file and fsync it; return the size and digest of each part.

    The disk writes each block while the next one is hashed and copied.
    """
    if isinstance(path, ObjectPath):
        return path.upload(parts)
    records: list[PartRecord] = []
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    position = 0
    try:
        for part in parts:
            view, digest = memoryview(part).cast("B"), xxh3_128()
            for start in range(0, len(view), _BLOCK):
                block = view[start : start + _BLOCK]
                digest.update(block)
                _write_all(descriptor, block)
                # This advice starts the write-back of dirty pages now; otherwise fsync() would start it at the end.
                os.posix_fadvise(descriptor, position, len(block), os.POSIX_FADV_DONTNEED)
                position += len(block)
            records.append(PartRecord(len(view), digest.hexdigest()))
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return tuple(records)


def replace_file(path: AnyPath, data: bytes) -> None:
    """Create or replace a file atomically, and fsync it."""
    if isinstance(path, ObjectPath):
        path.upload([data])
        return
    new = path.with_name(f"{path.name}.new")
    remove_file(new)
    write_file(new, [data])
    rename(new, path)


def map_file(path: Path, size: int) -> Tensor:
    """Create a file of `size` bytes, or resize it; return its bytes as a shared mapping: writes change the file.

    The space is allocated here, because a write to a mapping on a full disk would end the process.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        if os.fstat(descriptor).st_size > size:
            os.ftruncate(descriptor, size)
        os.posix_fallocate(descriptor, 0, size)
    finally:
        os.close(descriptor)
    return torch.from_file(str(path), shared=True, size=size, dtype=torch.uint8)


def make_folder(path: AnyPath) -> None:
    """Create a folder and its missing parents, and fsync each new directory entry."""
    if isinstance(path, Path) and not path.is_dir():
        make_folder(path.parent)
        try:
            os.mkdir(path)  # noqa: PTH102
        except FileExistsError:  # another rank of this host created the folder first
            if not path.is_dir():
                raise
        fsync(path.parent)


def fsync(path: AnyPath) -> None:
    """Fsync the directory entries of a folder, or a file, including bytes that were written through a mapping."""
    if isinstance(path, ObjectPath):
        return
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def rename(src: Path, dst: Path) -> None:
    """Rename a file or folder atomically; an existing file at `dst` is replaced."""
    os.rename(src, dst)  # noqa: PTH104


def exchange(one: Path, other: Path) -> None:
    """Swap two folders of one file system atomically, so that both names exist at every moment.

    Without `renameat2`, three renames are used, which are not atomic: if the process is killed between them, the
    replaced folder is left as `<name>.old`.
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
    """Delete a folder recursively. Symlinks, including `path` itself, are deleted but not followed."""
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
    """Call Linux's `renameat2` through ctypes; return 0 on success and -1 if it is missing or fails."""
    try:
        return int(ctypes.CDLL(None, use_errno=True).renameat2(*arguments))
    except (AttributeError, OSError, TypeError):
        return -1


def _write_all(descriptor: int, block: memoryview) -> None:
    while block:
        block = block[os.write(descriptor, block) :]
