"""Interface of an experiment tracker."""

from collections.abc import Mapping
from typing import Protocol

from pydantic import JsonValue

from d9d_metrics.trackers.values import Tracked


class Tracker(Protocol):
    """Destination of the values that a run measures. One process of a job calls the tracker from one thread.

    Order of calls: `resume` first, if the run continues an interrupted one; `log_config` once; any number of `log`
    with non-decreasing steps, `flush` and `state_dict`; `resume` again if the job rolls back to a checkpoint; `close`
    once.

    A custom tracker needs no base class. As a base class, `Tracker` does nothing in `log_config`, `flush` and `close`,
    and has an empty state. Wrapped in a `BackgroundTracker`, a tracker may block and raise.
    """

    def resume(self, step: int, state: Mapping[str, JsonValue] = ...) -> None:
        """Continue a run.

        Args:
            step: Last step to keep: later steps run again. -1 discards every step.
            state: The `state_dict` of the interrupted run; empty if unknown.
        """
        ...

    def log_config(self, config: Mapping[str, JsonValue]) -> None:
        """Log the resolved configuration of the run, with secrets redacted; values that JSON lacks become text."""
        return

    def log(self, step: int, values: Mapping[str, Tracked]) -> None:
        """Log values of a step; several calls for one step are combined. Unsupported values are skipped."""
        ...

    def flush(self) -> None:
        """Write logged values durably: they must survive the process, and a power loss if the tracker supports it.

        Call `flush` before saving a checkpoint: a job that resumes from it does not log earlier steps again.
        """
        return

    def state_dict(self) -> dict[str, JsonValue]:
        """Return the state that identifies the run, such as its id, for a checkpoint; call it after `flush`."""
        return {}

    def close(self) -> None:
        """Write logged values durably, like `flush`, and close files and connections."""
        return
