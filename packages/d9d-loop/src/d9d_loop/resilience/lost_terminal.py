"""Standard output and error of a process whose terminal was closed: each print would raise an exception."""

import os
from collections.abc import Sequence


def terminals() -> list[int]:
    """Return the descriptors of standard output and error that are a terminal."""
    return [each for each in (1, 2) if os.isatty(each)]


def drop_lost_terminal(descriptors: Sequence[int]) -> None:
    """Redirect descriptors that were a terminal, and no longer are, to the null device."""
    for descriptor in descriptors:
        if not os.isatty(descriptor):
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, descriptor)
            os.close(null)
