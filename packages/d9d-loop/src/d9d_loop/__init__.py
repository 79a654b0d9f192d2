"""Training and inference loops that run on one CPU or on a cluster."""

from typing import TYPE_CHECKING

from d9d_dist.lazy_exports import lazy_exports
from d9d_loop.cli_main import cli_main

if TYPE_CHECKING:
    from d9d_loop.config.component import Component
    from d9d_loop.config.config_file import read_config_file
    from d9d_loop.config.config_source import validate_config
    from d9d_loop.config.engine_config import EngineConfig
    from d9d_loop.config.inference_config import InferenceConfig
    from d9d_loop.config.preset import InferencePresetConfig, PresetConfig
    from d9d_loop.config.profile_config import ProfileConfig
    from d9d_loop.config.schedule_config import ScheduleConfig
    from d9d_loop.config.section import Section
    from d9d_loop.config.trainer_config import (
        BatchConfig,
        CheckpointConfig,
        DataConfig,
        EvaluationConfig,
        GradientConfig,
        HostConfig,
        JobConfig,
        LoggingConfig,
        PipelineConfig,
        RunConfig,
        TrainerConfig,
        WorkerConfig,
    )
    from d9d_loop.data import DataProvider, DatasetProvider
    from d9d_loop.data.sample_order import SampleOrder
    from d9d_loop.data.samples import Collate, Samples
    from d9d_loop.engine.engine import Engine
    from d9d_loop.engine.train_step import StepResult
    from d9d_loop.event_bus import Events, on_event
    from d9d_loop.events import (
        BackwardDone,
        BadStepFound,
        CheckpointSaved,
        CheckpointStarted,
        ConfigReady,
        DataReady,
        EvaluationDone,
        EvaluationStarted,
        Event,
        Failed,
        Finished,
        GradientsReady,
        ModelExported,
        ModelReady,
        OptimizerDone,
        OptimizerReady,
        PartWritten,
        StateOffloaded,
        StateOnloaded,
        StepDone,
        StepStarted,
        TrainResult,
    )
    from d9d_loop.inference.inference import Inference, InferenceResult
    from d9d_loop.job.evaluation import Evaluator
    from d9d_loop.job.job import build_job, run_job
    from d9d_loop.job.job_parts import Job
    from d9d_loop.job.pipeline import Pipeline
    from d9d_loop.job.plan import JobPlan, plan_job
    from d9d_loop.job.preset_job import preset_inference, preset_trainer
    from d9d_loop.job.profiler import Profiler
    from d9d_loop.job.trainer import Trainer
    from d9d_loop.lr.lr_schedule import LrSchedule, LrScheduleConfig, PiecewiseConfig, WarmupCosineConfig, WsdConfig
    from d9d_loop.model.hugging_face_model import hugging_face_model
    from d9d_loop.model.model_provider import FunctionProvider, ModelProvider
    from d9d_loop.model.pretrained_model import PretrainedProvider, pretrained_model
    from d9d_loop.optimizers.optimizer import (
        AdamConfig,
        AdamWConfig,
        GroupConfig,
        LionConfig,
        MuonConfig,
        OptimizerConfig,
        OptimizerProvider,
        OptimizerSettings,
        ScheduleFreeAdamWConfig,
        SGDConfig,
        StochasticAdamWConfig,
    )
    from d9d_loop.resilience import ExitCode, ResilienceConfig, Stopped
    from d9d_loop.resilience.bad_steps import BadStepError
    from d9d_loop.task import BatchTask, InferenceTask, Loss, LossFunction, Task
else:
    __getattr__, __dir__ = lazy_exports(__name__)

__all__ = [
    "AdamConfig",
    "AdamWConfig",
    "BackwardDone",
    "BadStepError",
    "BadStepFound",
    "BatchConfig",
    "BatchTask",
    "CheckpointConfig",
    "CheckpointSaved",
    "CheckpointStarted",
    "Collate",
    "Component",
    "ConfigReady",
    "DataConfig",
    "DataProvider",
    "DataReady",
    "DatasetProvider",
    "Engine",
    "EngineConfig",
    "EvaluationConfig",
    "EvaluationDone",
    "EvaluationStarted",
    "Evaluator",
    "Event",
    "Events",
    "ExitCode",
    "Failed",
    "Finished",
    "FunctionProvider",
    "GradientConfig",
    "GradientsReady",
    "GroupConfig",
    "HostConfig",
    "Inference",
    "InferenceConfig",
    "InferencePresetConfig",
    "InferenceResult",
    "InferenceTask",
    "Job",
    "JobConfig",
    "JobPlan",
    "LionConfig",
    "LoggingConfig",
    "Loss",
    "LossFunction",
    "LrSchedule",
    "LrScheduleConfig",
    "ModelExported",
    "ModelProvider",
    "ModelReady",
    "MuonConfig",
    "OptimizerConfig",
    "OptimizerDone",
    "OptimizerProvider",
    "OptimizerReady",
    "OptimizerSettings",
    "PartWritten",
    "PiecewiseConfig",
    "Pipeline",
    "PipelineConfig",
    "PresetConfig",
    "PretrainedProvider",
    "ProfileConfig",
    "Profiler",
    "ResilienceConfig",
    "RunConfig",
    "SGDConfig",
    "SampleOrder",
    "Samples",
    "ScheduleConfig",
    "ScheduleFreeAdamWConfig",
    "Section",
    "StateOffloaded",
    "StateOnloaded",
    "StepDone",
    "StepResult",
    "StepStarted",
    "StochasticAdamWConfig",
    "Stopped",
    "Task",
    "TrainResult",
    "Trainer",
    "TrainerConfig",
    "WarmupCosineConfig",
    "WorkerConfig",
    "WsdConfig",
    "build_job",
    "cli_main",
    "hugging_face_model",
    "on_event",
    "plan_job",
    "preset_inference",
    "preset_trainer",
    "pretrained_model",
    "read_config_file",
    "run_job",
    "validate_config",
]
