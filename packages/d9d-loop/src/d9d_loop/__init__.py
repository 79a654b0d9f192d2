"""A Trainer that reads top to bottom and runs on one CPU or a cluster."""

from d9d_loop.batches import Collate, Samples
from d9d_loop.command_line import command_line
from d9d_loop.config import (
    BatchConfig,
    CheckpointConfig,
    DataConfig,
    EvaluationConfig,
    GradientConfig,
    LoggingConfig,
    PipelineConfig,
    RunConfig,
    Section,
    TrainerConfig,
)
from d9d_loop.config_source import read_config_file, validate_config
from d9d_loop.evaluation import Evaluator
from d9d_loop.events import CheckpointSaved, EvaluationDone, Events, Finished, GradientsReady, ModelExported, StepDone
from d9d_loop.lr_schedule import LrSchedule, LrScheduleConfig, WarmupCosineConfig
from d9d_loop.model_provider import FunctionProvider, ModelProvider
from d9d_loop.optimizer import AdamWConfig, OptimizerConfig, OptimizerProvider
from d9d_loop.pipeline import Pipeline
from d9d_loop.pipeline_schedule import ScheduleConfig
from d9d_loop.sample_order import SampleOrder
from d9d_loop.task import Loss, Task
from d9d_loop.train_result import TrainResult
from d9d_loop.train_step import StepOutcome, TrainStep
from d9d_loop.trainer import Trainer
from d9d_pipeline import Inputs

__all__ = [
    "AdamWConfig",
    "BatchConfig",
    "CheckpointConfig",
    "CheckpointSaved",
    "Collate",
    "DataConfig",
    "EvaluationConfig",
    "EvaluationDone",
    "Evaluator",
    "Events",
    "Finished",
    "FunctionProvider",
    "GradientConfig",
    "GradientsReady",
    "Inputs",
    "LoggingConfig",
    "Loss",
    "LrSchedule",
    "LrScheduleConfig",
    "ModelExported",
    "ModelProvider",
    "OptimizerConfig",
    "OptimizerProvider",
    "Pipeline",
    "PipelineConfig",
    "RunConfig",
    "SampleOrder",
    "Samples",
    "ScheduleConfig",
    "Section",
    "StepDone",
    "StepOutcome",
    "Task",
    "TrainResult",
    "TrainStep",
    "Trainer",
    "TrainerConfig",
    "WarmupCosineConfig",
    "command_line",
    "read_config_file",
    "validate_config",
]
