"""Turns what a configuration file says about trackers into trackers."""

from collections.abc import Sequence
from contextlib import ExitStack
from itertools import combinations
from pathlib import Path
from typing import Annotated

from pydantic import Field

from d9d_dist import UserError
from d9d_metrics.trackers.aim_repository import AimTrackerConfig
from d9d_metrics.trackers.console import ConsoleTrackerConfig
from d9d_metrics.trackers.jsonl import JsonlTrackerConfig
from d9d_metrics.trackers.multi import MultiTracker
from d9d_metrics.trackers.tensorboard_events import TensorBoardTrackerConfig
from d9d_metrics.trackers.tracker import Tracker
from d9d_metrics.trackers.weights_and_biases import WandbTrackerConfig

TrackerConfig = Annotated[
    JsonlTrackerConfig | ConsoleTrackerConfig | WandbTrackerConfig | AimTrackerConfig | TensorBoardTrackerConfig,
    Field(discriminator="kind"),
]
"""One of the trackers that a configuration file can name; its `kind` says which."""


def check_trackers(configs: Sequence[TrackerConfig]) -> None:
    """Refuse trackers that could not be built, without building any; for the start of a job.

    Raises:
        UserError: If the package of one is missing, with the command that installs it; or if two would share a file or
            a folder.
    """
    for config in configs:
        config.check()
    for first, second in combinations(configs, 2):
        if first.kind == second.kind and (first.kind != "jsonl" or first == second):
            raise UserError(
                f"got two trackers of the kind {first.kind!r}, which would share what they write; expected one. "
                "Leave one out, or give two jsonl trackers a file each."
            )


def build_trackers(configs: Sequence[TrackerConfig], run_dir: Path) -> MultiTracker:
    """Make the trackers that a configuration names, each behind a `BackgroundTracker`.

    Those that may be away keep what they could not deliver in `trackers/` in the run's folder. A tracker of one's own
    is put beside them: `MultiTracker([build_trackers(configs, run_dir), mine])`.

    Args:
        configs: The choices, in the order in which values are handed out.
        run_dir: Folder of the run, where trackers keep their files.

    Returns:
        One tracker that stands for all of them.

    Raises:
        UserError: As `check_trackers`; nothing is open then.
    """
    check_trackers(configs)
    with ExitStack() as opened:
        trackers: list[Tracker] = []
        for config in configs:
            trackers.append(config.build(run_dir))
            opened.callback(trackers[-1].close)
        opened.pop_all()
    return MultiTracker(trackers)
