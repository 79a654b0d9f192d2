"""Brings files and the entries of folders to the disk, so that they survive a power loss."""

import os
from pathlib import Path


def replace_file(path: Path, content: bytes) -> None:
    """Put a new file in the place of an old one, durably; a kill leaves either the old one or the new one."""
    partial = path.with_name(f".{path.name}.partial")
    with partial.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)
    sync(path.parent)


def make_folder(path: Path) -> None:
    """Create a folder and the missing ones above it, with their entries on the disk."""
    if not path.is_dir():
        make_folder(path.parent)
        path.mkdir(exist_ok=True)
        sync(path.parent)


def sync(path: Path) -> None:
    """Bring the content of a file, or the entries of a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
