"""Time and rank at the start of each line of a job's log."""

import sys
from collections.abc import Generator
from contextlib import contextmanager
from datetime import datetime
from typing import Any, TextIO, final


@contextmanager
def stamped_output(rank: int, *, enabled: bool) -> Generator[None]:
    """Prepend local time and rank to each line of standard output and standard error, unless they are terminals."""
    before = sys.stdout, sys.stderr
    if enabled:
        sys.stdout, sys.stderr = (each if each.isatty() else _Stamped(each, rank) for each in before)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before


@final
class _Stamped:
    """Text stream that forwards to another one, with a stamp before each line."""

    def __init__(self, stream: TextIO, rank: int) -> None:
        self._stream, self._rank, self._is_at_start = stream, rank, True

    def write(self, text: str) -> int:
        if not text:
            return 0
        stamp = f"{datetime.now().astimezone().isoformat(timespec='seconds')} rank {self._rank} "
        lines = text.splitlines(keepends=True)
        first = stamp if self._is_at_start else ""
        self._is_at_start = text.endswith("\n")
        self._stream.write(first + stamp.join(lines))
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
