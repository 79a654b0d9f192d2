"""Exact distributed metrics and experiment trackers for PyTorch."""

from d9d_metrics.accumulator import Accumulator
from d9d_metrics.aggregates import Max, Min, Sum, WeightedMean
from d9d_metrics.language import BitsPerByte, Perplexity
from d9d_metrics.metric import Metric
from d9d_metrics.plot import plot_metrics
from d9d_metrics.sync import compute_metrics, sync_metrics
from d9d_metrics.trackers.console import ConsoleTracker, ConsoleTrackerConfig
from d9d_metrics.trackers.jsonl import JsonlTracker, JsonlTrackerConfig, read_metrics
from d9d_metrics.trackers.multi import MultiTracker
from d9d_metrics.trackers.selection import TrackerConfig, build_trackers
from d9d_metrics.trackers.tracker import Tracker

__all__ = [
    "Accumulator",
    "BitsPerByte",
    "ConsoleTracker",
    "ConsoleTrackerConfig",
    "JsonlTracker",
    "JsonlTrackerConfig",
    "Max",
    "Metric",
    "Min",
    "MultiTracker",
    "Perplexity",
    "Sum",
    "Tracker",
    "TrackerConfig",
    "WeightedMean",
    "build_trackers",
    "compute_metrics",
    "plot_metrics",
    "read_metrics",
    "sync_metrics",
]
