"""Combination of several trackers."""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any, final

from pydantic import JsonValue

from d9d_metrics.trackers.tracker import Tracker
from d9d_metrics.trackers.values import Tracked, supported


@final
class MultiTracker:
    """Tracker that forwards every call to several trackers, in order; without trackers it does nothing."""

    def __init__(self, trackers: Sequence[Tracker]) -> None:
        self._trackers = tuple(trackers)

    def resume(self, step: int, state: Mapping[str, JsonValue] = {}) -> None:
        """Resume every tracker with its own state, found by its index."""
        for index, tracker in enumerate(self._trackers):
            own: Any = state.get(str(index), {})
            tracker.resume(step, own)

    def log_config(self, config: Mapping[str, JsonValue]) -> None:
        """Log the configuration to every tracker."""
        for tracker in self._trackers:
            tracker.log_config(config)

    def log(self, step: int, values: Mapping[str, Tracked]) -> None:
        """Log the supported values to every tracker."""
        values = supported(values)
        for tracker in self._trackers:
            tracker.log(step, values)

    def flush(self) -> None:
        """Flush every tracker."""
        for tracker in self._trackers:
            tracker.flush()

    def state_dict(self) -> dict[str, JsonValue]:
        """Return the nonempty states of the trackers by index."""
        states = {str(index): tracker.state_dict() for index, tracker in enumerate(self._trackers)}
        return {index: state for index, state in states.items() if state}

    def close(self) -> None:
        """Close every tracker in reverse order, even if one of them raises."""
        with ExitStack() as stack:
            for tracker in self._trackers:
                stack.callback(tracker.close)
