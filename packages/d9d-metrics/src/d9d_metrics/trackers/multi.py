"""Lets a run have several trackers where the loop sees one."""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import final

from pydantic import JsonValue

from d9d_metrics.trackers.tracker import Tracker


@final
class MultiTracker:
    """Hands everything to each of several trackers, in order; with none, it keeps nothing."""

    def __init__(self, trackers: Sequence[Tracker]) -> None:
        self._trackers = tuple(trackers)

    def resume(self, step: int) -> None:
        """Let every tracker forget what came after a step."""
        for tracker in self._trackers:
            tracker.resume(step)

    def log_config(self, config: Mapping[str, JsonValue]) -> None:
        """Give the configuration to every tracker."""
        for tracker in self._trackers:
            tracker.log_config(config)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Give the values to every tracker."""
        for tracker in self._trackers:
            tracker.log(step, values)

    def close(self) -> None:
        """Close every tracker, the last one first, even if one of them raises."""
        with ExitStack() as stack:
            for tracker in self._trackers:
                stack.callback(tracker.close)
