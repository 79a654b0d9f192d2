"""The contract of an experiment tracker: a training loop knows only this, never where the values end up."""

from collections.abc import Mapping
from typing import Protocol

from pydantic import JsonValue

from d9d_metrics.trackers.values import Tracked


class Tracker(Protocol):
    """Takes in the values that a run measures. One process of a job owns it; all calls come from one thread.

    The calls are `resume` first, if the run continues one that was interrupted; `log_config` once; any number of `log`
    with steps that never decrease, of `flush` and of `state_dict`; `resume` again, if the job goes back to a checkpoint
    of its own; `close` once. A tracker of one's own needs no base
    class and no registration; it may wait and it may raise, if a `BackgroundTracker` stands before it.
    """

    def resume(self, step: int, state: Mapping[str, JsonValue] = ...) -> None:
        """Continue a run.

        Args:
            step: Forget everything logged after it, because these steps will be taken again; -1 forgets every step.
            state: What `state_dict` returned in the run's last life; empty if that is not known.
        """
        ...

    def log_config(self, config: Mapping[str, JsonValue]) -> None:
        """Keep the resolved configuration of the run, with its secrets redacted."""
        ...

    def log(self, step: int, values: Mapping[str, Tracked]) -> None:
        """Take in values measured at a step; several calls for one step add up. What it cannot keep it leaves out."""
        ...

    def flush(self) -> None:
        """Write out what was logged, so that it survives the process, and the machine where the tracker can do that.

        Call it before a checkpoint is saved: a job that resumes from the checkpoint logs earlier steps no more.
        """
        ...

    def state_dict(self) -> dict[str, JsonValue]:
        """Return what finds the run again, such as its id; for a checkpoint of the job, after `flush`."""
        ...

    def close(self) -> None:
        """Write out what was logged, as `flush` does, and let go of files and connections."""
        ...
