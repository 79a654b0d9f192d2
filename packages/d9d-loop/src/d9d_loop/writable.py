"""Check of a folder to write to, before a job starts, and replacement of files."""

import os
from pathlib import Path

from d9d_dist import UserError
from d9d_state import StateError


def check_writable(folder: Path, *, section: str = "run") -> None:
    """Raise `UserError` if a folder, or its nearest existing parent, is a file or not writable. Creates nothing.

    Raises `StateError` if the file system is mounted read-only.
    """
    existing = folder.absolute()
    # os.access returns False if a parent folder is not searchable; Path.exists would raise.
    while not os.access(existing, os.F_OK):
        existing = existing.parent
    if os.statvfs(existing).f_flag & os.ST_RDONLY:  # such as a disk after an error: a restart may help
        raise StateError(f"{section} folder {folder}: {existing} is on a file system that is mounted read-only.")
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        reason = "is not writable" if existing.is_dir() else "is a file, not a folder"
        raise UserError(
            f"{section} folder {folder}: {existing} {reason}. Choose another folder with --{section}.folder, or change "
            "permissions."
        )


def replace_text(path: Path, text: str) -> None:
    """Replace a text file atomically. If that fails, such as on a full disk, the earlier file stays."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
