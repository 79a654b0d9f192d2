"""Lock between the processes of a host, for work that one of them does at a time."""

import fcntl
import os
import tempfile
import zlib
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def host_lock(kind: str, key: str) -> Generator[None]:
    """Hold a file lock, which the operating system releases with the process.

    `key` selects one of 256 lock files of a `kind`. They are never deleted, because deletion would be a race. Two keys
    that share a file only wait for each other.
    """
    path = Path(tempfile.gettempdir()) / f"d9d-{kind}-{os.getuid()}-{zlib.crc32(key.encode()) % 256}.lock"
    descriptor = os.open(path, os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
