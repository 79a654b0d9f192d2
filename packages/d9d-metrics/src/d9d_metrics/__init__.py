"""Exact distributed metrics and experiment trackers for PyTorch."""

from typing import TYPE_CHECKING

from d9d_dist.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from d9d_metrics.accumulator import Accumulator as Accumulator
    from d9d_metrics.aggregates import Max as Max
    from d9d_metrics.aggregates import Min as Min
    from d9d_metrics.aggregates import Sum as Sum
    from d9d_metrics.aggregates import WeightedMean as WeightedMean
    from d9d_metrics.auroc import BinaryAUROC as BinaryAUROC
    from d9d_metrics.classification import BinaryClassification as BinaryClassification
    from d9d_metrics.classification import ConfusionMatrix as ConfusionMatrix
    from d9d_metrics.classification import MulticlassClassification as MulticlassClassification
    from d9d_metrics.classification import MultilabelClassification as MultilabelClassification
    from d9d_metrics.collector import MetricCollector as MetricCollector
    from d9d_metrics.compose import Compose as Compose
    from d9d_metrics.confusion_scores import accuracy as accuracy
    from d9d_metrics.confusion_scores import f_beta as f_beta
    from d9d_metrics.confusion_scores import precision as precision
    from d9d_metrics.confusion_scores import recall as recall
    from d9d_metrics.flops import ModelFlops as ModelFlops
    from d9d_metrics.flops import peak_flops as peak_flops
    from d9d_metrics.flops import transformer_flops_per_token as transformer_flops_per_token
    from d9d_metrics.language import BitsPerByte as BitsPerByte
    from d9d_metrics.language import Perplexity as Perplexity
    from d9d_metrics.metric import Metric as Metric
    from d9d_metrics.peak_memory import PeakMemory as PeakMemory
    from d9d_metrics.plot import plot_metrics as plot_metrics
    from d9d_metrics.step_clock import StepClock as StepClock
    from d9d_metrics.step_time import StepTime as StepTime
    from d9d_metrics.step_time import Throughput as Throughput
    from d9d_metrics.sync import compute_metrics as compute_metrics
    from d9d_metrics.trackers.aim_repository import AimTracker as AimTracker
    from d9d_metrics.trackers.aim_repository import AimTrackerConfig as AimTrackerConfig
    from d9d_metrics.trackers.background import BackgroundTracker as BackgroundTracker
    from d9d_metrics.trackers.console import ConsoleTracker as ConsoleTracker
    from d9d_metrics.trackers.console import ConsoleTrackerConfig as ConsoleTrackerConfig
    from d9d_metrics.trackers.jsonl import JsonlTracker as JsonlTracker
    from d9d_metrics.trackers.jsonl import JsonlTrackerConfig as JsonlTrackerConfig
    from d9d_metrics.trackers.jsonl import read_metrics as read_metrics
    from d9d_metrics.trackers.mlflow_run import MlflowTracker as MlflowTracker
    from d9d_metrics.trackers.mlflow_run import MlflowTrackerConfig as MlflowTrackerConfig
    from d9d_metrics.trackers.multi import MultiTracker as MultiTracker
    from d9d_metrics.trackers.prometheus_endpoint import PrometheusTracker as PrometheusTracker
    from d9d_metrics.trackers.prometheus_endpoint import PrometheusTrackerConfig as PrometheusTrackerConfig
    from d9d_metrics.trackers.selection import TrackerConfig as TrackerConfig
    from d9d_metrics.trackers.selection import build_trackers as build_trackers
    from d9d_metrics.trackers.tensorboard_events import TensorBoardTracker as TensorBoardTracker
    from d9d_metrics.trackers.tensorboard_events import TensorBoardTrackerConfig as TensorBoardTrackerConfig
    from d9d_metrics.trackers.tracker import Tracker as Tracker
    from d9d_metrics.trackers.trackio_database import TrackioTracker as TrackioTracker
    from d9d_metrics.trackers.trackio_database import TrackioTrackerConfig as TrackioTrackerConfig
    from d9d_metrics.trackers.values import Histogram as Histogram
    from d9d_metrics.trackers.values import Image as Image
    from d9d_metrics.trackers.values import Text as Text
    from d9d_metrics.trackers.weights_and_biases import WandbTracker as WandbTracker
    from d9d_metrics.trackers.weights_and_biases import WandbTrackerConfig as WandbTrackerConfig
else:
    __getattr__, __dir__ = lazy_exports(__name__)
