"""Time and rank at the start of each line of a job's log."""

import sys
from collections.abc import Generator
from contextlib import contextmanager
from datetime import datetime
from typing import TextIO


@contextmanager
def stamped_output(rank: int, *, enabled: bool) -> Generator[None]:
    """Prepend local time and rank to each line that is printed in the body, unless this process prints to a terminal.

    Standard output and standard error are changed in place, because handlers of `logging` keep the streams. If the body
    raises, their lines are stamped until the process ends: the traceback belongs to the log. Streams that replace the
    process's own ones, such as in a notebook or under pytest, are not changed.
    """
    _remove_stamps()
    for stream, own in ((sys.stdout, sys.__stdout__), (sys.stderr, sys.__stderr__)):
        if own is not None and enabled and stream is own and not own.isatty():
            _stamp(own, rank)
    yield
    _remove_stamps()


def _remove_stamps() -> None:
    for own in (sys.__stdout__, sys.__stderr__):
        if own is not None:
            vars(own).pop("write", None)


def _stamp(stream: TextIO, rank: int) -> None:
    write, is_at_start = stream.write, True

    def write_stamped(text: str) -> int:
        nonlocal is_at_start
        if text:
            stamp = f"{datetime.now().astimezone().isoformat(timespec='seconds')} rank {rank} "
            # One write per call, and only "\n" ends a line: a progress bar writes "\r" to draw over its line.
            write((stamp if is_at_start else "") + text[:-1].replace("\n", f"\n{stamp}") + text[-1])
            is_at_start = text[-1] == "\n"
        return len(text)

    vars(stream)["write"] = write_stamped
