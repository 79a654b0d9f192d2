"""Creation of trackers from their configurations."""

from collections.abc import Sequence
from contextlib import ExitStack
from itertools import combinations
from pathlib import Path
from typing import Annotated

from pydantic import Field

from d9d_dist import UserError
from d9d_metrics.trackers._extras import ExtraTrackerConfig
from d9d_metrics.trackers.aim_repository import AimTrackerConfig
from d9d_metrics.trackers.console import ConsoleTrackerConfig
from d9d_metrics.trackers.jsonl import JsonlTrackerConfig
from d9d_metrics.trackers.mlflow_run import MlflowTrackerConfig
from d9d_metrics.trackers.multi import MultiTracker
from d9d_metrics.trackers.prometheus_endpoint import PrometheusTrackerConfig
from d9d_metrics.trackers.tensorboard_events import TensorBoardTrackerConfig
from d9d_metrics.trackers.tracker import Tracker
from d9d_metrics.trackers.trackio_database import TrackioTrackerConfig
from d9d_metrics.trackers.weights_and_biases import WandbTrackerConfig

TrackerConfig = Annotated[
    JsonlTrackerConfig
    | ConsoleTrackerConfig
    | WandbTrackerConfig
    | AimTrackerConfig
    | MlflowTrackerConfig
    | TrackioTrackerConfig
    | TensorBoardTrackerConfig
    | PrometheusTrackerConfig,
    Field(discriminator="kind"),
]
"""Configuration of a tracker; its `kind` selects the type."""


def check_trackers(configs: Sequence[TrackerConfig]) -> None:
    """Check that trackers can be built, without building any; call it at the start of a job.

    Raises:
        UserError: If a package is missing, or two trackers would write to the same file or folder.
    """
    for config in configs:
        if isinstance(config, ExtraTrackerConfig):
            config.check()
    for first, second in combinations(configs, 2):
        if first.kind == second.kind and (first.kind != "jsonl" or first == second):
            raise UserError(
                f"got two trackers of kind {first.kind!r}, which would write to the same files; expected one. "
                "Remove one, or give each jsonl tracker its own file."
            )


def build_trackers(configs: Sequence[TrackerConfig], run_dir: Path) -> MultiTracker:
    """Create the trackers of a configuration, each wrapped in a `BackgroundTracker`; calls reach them in this order.

    Trackers that need a package spool undelivered values to `trackers/` in the run folder.
    Combine the result with a tracker of your own: `MultiTracker([build_trackers(configs, run_dir), mine])`.

    Raises:
        UserError: If `check_trackers` raises; no tracker is open then.
    """
    check_trackers(configs)
    with ExitStack() as opened:
        trackers: list[Tracker] = []
        for config in configs:
            trackers.append(config.build(run_dir))
            opened.callback(trackers[-1].close)
        opened.pop_all()
    return MultiTracker(trackers)
