"""The contract of an experiment tracker: a training loop knows only this, never where the values end up."""

from collections.abc import Mapping
from typing import Protocol

from pydantic import JsonValue


class Tracker(Protocol):
    """Takes in the values that a run measures. One process of a job owns it; all calls come from one thread.

    The calls are `resume` once, if the run continues one that was interrupted; `log_config` once; any number of `log`
    with steps that never decrease; `close` once. A tracker of one's own needs no base class and no registration.
    """

    def resume(self, step: int) -> None:
        """Forget everything logged after `step`, because these steps will be taken again; -1 forgets every step."""
        ...

    def log_config(self, config: Mapping[str, JsonValue]) -> None:
        """Keep the resolved configuration of the run."""
        ...

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Take in values measured at a step; several calls for one step add up."""
        ...

    def close(self) -> None:
        """Write out what is still on its way, and let go of files and connections."""
        ...
