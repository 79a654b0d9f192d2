"""Replaces a file as a whole, so that a kill leaves either the old one or the new one."""

import os
from pathlib import Path


def replace_file(path: Path, content: bytes) -> None:
    """Put a new file in the place of an old one, at once and for good."""
    partial = path.with_name(f".{path.name}.partial")
    with partial.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)
    descriptor = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
