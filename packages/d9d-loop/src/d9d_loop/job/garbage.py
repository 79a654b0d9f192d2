"""Python garbage collection at fixed steps, on all ranks together."""

import gc
from collections.abc import Callable, Generator
from contextlib import contextmanager


@contextmanager
def garbage_collection(every: int | None) -> Generator[Callable[[int], None]]:
    """Disable automatic garbage collection; yield a function of the step that collects after every `every`-th step.

    A collection takes long if many objects are alive, and every rank waits for the slowest rank. With automatic
    collection, at almost any time one of a thousand ranks is collecting. Objects that are alive on entry, such as
    modules, are frozen (`gc.freeze`) until exit. Nothing is frozen if the process has already frozen objects or
    disabled automatic collection. `every=None` keeps automatic collection. The rehearsal has collected all generations
    while it waited, so entry collects only younger objects. The first collection in the body includes frozen ones,
    which may have died since.
    """
    freezes, is_first = False, True

    def collect(step: int) -> None:
        nonlocal is_first
        if every is None or step % every:
            return
        if freezes and is_first:
            gc.unfreeze()
        gc.collect()
        if freezes and is_first:
            gc.freeze()
        is_first = False

    if every is None:
        yield collect
        return
    was_enabled = gc.isenabled()
    gc.disable()
    gc.collect(1)
    freezes = was_enabled and gc.get_freeze_count() == 0  # counting takes 40 ms for 350k objects
    if freezes:
        gc.freeze()
    try:
        yield collect
    finally:
        if freezes:
            gc.unfreeze()
        if was_enabled:
            gc.enable()
