"""Turns what a configuration file says about trackers into trackers."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from pydantic import Field

from d9d_metrics.trackers.console import ConsoleTrackerConfig
from d9d_metrics.trackers.jsonl import JsonlTrackerConfig
from d9d_metrics.trackers.multi import MultiTracker

TrackerConfig = Annotated[JsonlTrackerConfig | ConsoleTrackerConfig, Field(discriminator="kind")]
"""One of the trackers that a configuration file can name; its `kind` says which."""


def build_trackers(configs: Sequence[TrackerConfig], run_dir: Path) -> MultiTracker:
    """Open the trackers that a configuration names.

    A tracker of one's own is put beside them: `MultiTracker([build_trackers(configs, run_dir), mine])`.

    Args:
        configs: The choices, in the order in which values are handed out.
        run_dir: Folder of the run, where trackers keep their files.

    Returns:
        One tracker that stands for all of them.
    """
    return MultiTracker([config.build(run_dir) for config in configs])
