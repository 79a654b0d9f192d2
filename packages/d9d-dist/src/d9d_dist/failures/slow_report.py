"""Message about code that takes longer than expected."""

import sys
import threading
from collections.abc import Generator
from contextlib import contextmanager


@contextmanager
def reported_if_slow(message: str, *, seconds: float) -> Generator[None]:
    """Print a message on standard error if the body takes longer than `seconds`."""
    timer = threading.Timer(seconds, lambda: print(f"d9d: {message}", file=sys.stderr, flush=True))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
