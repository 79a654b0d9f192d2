"""Durable writes of files and folder entries, which survive a power loss."""

import os
from collections.abc import Generator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import BinaryIO


@contextmanager
def replacing_files(*paths: Path) -> Generator[Sequence[BinaryIO]]:
    """Yield a new file for each path of one folder; after the body fsync all, then rename them to the paths in order.

    Each rename is atomic: if the process is killed, a path has the old or the new content. If the body or an fsync
    raises, no path is replaced, and the new files are removed.
    """
    partials = [path.with_name(f".{path.name}.partial") for path in paths]
    try:
        with ExitStack() as opened:
            files = [opened.enter_context(partial.open("wb")) for partial in partials]
            yield files
            for file in files:
                file.flush()
                os.fsync(file.fileno())
        for partial, path in zip(partials, paths, strict=True):
            partial.replace(path)
    finally:
        for partial in partials:
            with suppress(OSError):
                partial.unlink(missing_ok=True)
    sync(paths[0].parent)


def sync(path: Path) -> None:
    """Fsync a file, or the entries of a folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
