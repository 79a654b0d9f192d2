"""Collects garbage at set steps, on all ranks together, instead of whenever one rank's allocations call for it."""

import gc
from types import TracebackType
from typing import Self, final

from d9d_loop.event_bus import handles
from d9d_loop.events import StepDone


@final
class GarbageCollection:
    """Within a `with` statement, Python collects cyclic garbage only after steps that are a multiple of `every`.

    A collection takes long where many objects live, and one slow rank keeps all others waiting: with a thousand ranks
    that each collect at a time of their own, some rank always does. What lives at the beginning (modules, the
    interpreter's own) is not looked at again until the end; what somebody has frozen before stays so.

    Args:
        every: Steps between collections; `None` leaves it to Python.
    """

    def __init__(self, every: int | None) -> None:
        self._every = every
        self._was_enabled, self._freezes = gc.isenabled(), False

    def __enter__(self) -> Self:
        """Take over from Python."""
        if self._every is not None:
            self._was_enabled = gc.isenabled()
            gc.disable()
            gc.collect()
            self._freezes = gc.get_freeze_count() == 0
            if self._freezes:
                gc.freeze()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """Leave it to Python again."""
        if self._every is not None:
            if self._freezes:
                gc.unfreeze()
            if self._was_enabled:
                gc.enable()

    @handles(StepDone)
    def collect(self, event: StepDone) -> None:
        """Collect, if it is this step's turn."""
        if self._every is not None and event.step % self._every == 0:
            gc.collect()
