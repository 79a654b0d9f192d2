"""Exact distributed metrics and experiment trackers for PyTorch."""

from typing import TYPE_CHECKING

from d9d_dist.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from d9d_metrics.accumulator import Accumulator
    from d9d_metrics.aggregates import Max, Min, Sum, WeightedMean
    from d9d_metrics.auroc import BinaryAUROC
    from d9d_metrics.classification import (
        BinaryClassification,
        ConfusionMatrix,
        MulticlassClassification,
        MultilabelClassification,
    )
    from d9d_metrics.collector import MetricCollector
    from d9d_metrics.compose import Compose
    from d9d_metrics.confusion_scores import Average, ConfusionCounts, Score, accuracy, f_beta, precision, recall
    from d9d_metrics.flops import PEAK_FLOPS, ModelFlops, peak_flops, transformer_flops_per_token
    from d9d_metrics.language import BitsPerByte, Perplexity
    from d9d_metrics.metric import Metric, MetricValue
    from d9d_metrics.peak_memory import PeakMemory
    from d9d_metrics.plot import plot_metrics
    from d9d_metrics.step_clock import StepClock, StepSeconds
    from d9d_metrics.step_time import StepTime, Throughput
    from d9d_metrics.sync import MetricSync, PendingSync, compute_metrics, read_values, sync_metrics
    from d9d_metrics.trackers.aim_repository import AimTracker, AimTrackerConfig
    from d9d_metrics.trackers.background import BackgroundTracker
    from d9d_metrics.trackers.console import ConsoleTracker, ConsoleTrackerConfig
    from d9d_metrics.trackers.jsonl import JsonlTracker, JsonlTrackerConfig, read_metrics
    from d9d_metrics.trackers.multi import MultiTracker
    from d9d_metrics.trackers.redaction import redact_secrets
    from d9d_metrics.trackers.selection import TrackerConfig, build_trackers, check_trackers
    from d9d_metrics.trackers.tensorboard_events import TensorBoardTracker, TensorBoardTrackerConfig
    from d9d_metrics.trackers.tracker import Tracker
    from d9d_metrics.trackers.values import Histogram, Image, Text, Tracked
    from d9d_metrics.trackers.weights_and_biases import WandbTracker, WandbTrackerConfig
else:
    __getattr__, __dir__ = lazy_exports(__name__)

__all__ = [
    "PEAK_FLOPS",
    "Accumulator",
    "AimTracker",
    "AimTrackerConfig",
    "Average",
    "BackgroundTracker",
    "BinaryAUROC",
    "BinaryClassification",
    "BitsPerByte",
    "Compose",
    "ConfusionCounts",
    "ConfusionMatrix",
    "ConsoleTracker",
    "ConsoleTrackerConfig",
    "Histogram",
    "Image",
    "JsonlTracker",
    "JsonlTrackerConfig",
    "Max",
    "Metric",
    "MetricCollector",
    "MetricSync",
    "MetricValue",
    "Min",
    "ModelFlops",
    "MultiTracker",
    "MulticlassClassification",
    "MultilabelClassification",
    "PeakMemory",
    "PendingSync",
    "Perplexity",
    "Score",
    "StepClock",
    "StepSeconds",
    "StepTime",
    "Sum",
    "TensorBoardTracker",
    "TensorBoardTrackerConfig",
    "Text",
    "Throughput",
    "Tracked",
    "Tracker",
    "TrackerConfig",
    "WandbTracker",
    "WandbTrackerConfig",
    "WeightedMean",
    "accuracy",
    "build_trackers",
    "check_trackers",
    "compute_metrics",
    "f_beta",
    "peak_flops",
    "plot_metrics",
    "precision",
    "read_metrics",
    "read_values",
    "recall",
    "redact_secrets",
    "sync_metrics",
    "transformer_flops_per_token",
]
