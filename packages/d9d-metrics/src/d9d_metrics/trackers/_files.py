"""Durable writes of files and folder entries, which survive a power loss."""

import os
from pathlib import Path


def replace_file(path: Path, content: bytes) -> None:
    """Replace a file atomically and durably: if the process is killed, the file has the old or the new content.

    If the path is a symbolic link, the file that it points to is replaced.
    """
    path = path.resolve()
    partial = path.with_name(f".{path.name}.partial")
    try:
        with partial.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)  # after a full disk
    sync(path.parent)


def free_path(path: Path, why: str) -> Path:
    """Return the first of `NAME-WHY-1.SUFFIX`, `NAME-WHY-2.SUFFIX` and so on that does not exist."""
    number = 1
    while (aside := path.with_name(f"{path.stem}-{why}-{number}{path.suffix}")).exists():
        number += 1
    return aside


def make_folder(path: Path) -> None:
    """Create a folder and its missing parents durably."""
    if not path.is_dir():
        make_folder(path.parent)
        path.mkdir(exist_ok=True)
        sync(path.parent)


def sync(path: Path) -> None:
    """Fsync a file, or the entries of a folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def open_complete_lines(path: Path) -> tuple[int, int]:
    """Open a file for reading and appending, without an incomplete last line; return the descriptor and the size."""
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
    size = path.read_bytes().rfind(b"\n") + 1
    os.ftruncate(file, size)
    return file, size
