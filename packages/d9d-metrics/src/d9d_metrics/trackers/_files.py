"""Durable writes of files and folder entries, which survive a power loss."""

import os
from pathlib import Path

from d9d_dist.durable_files import replacing_files, sync


def replace_file(path: Path, content: bytes) -> None:
    """Replace a file atomically and durably. If it is a symbolic link, the file that it points to is replaced."""
    with replacing_files(path.resolve()) as (file,):
        file.write(content)


def make_folder(path: Path) -> None:
    """Create a folder and its missing parents durably."""
    if not path.is_dir():
        make_folder(path.parent)
        path.mkdir(exist_ok=True)
        sync(path.parent)


def open_complete_lines(path: Path) -> tuple[int, int]:
    """Open a file for reading and appending, without an incomplete last line; return the descriptor and the size."""
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
    size = path.read_bytes().rfind(b"\n") + 1
    os.ftruncate(file, size)
    return file, size
