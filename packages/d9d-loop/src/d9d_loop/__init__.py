"""Training and inference loops that run on one CPU or on a cluster."""

from typing import TYPE_CHECKING

from d9d_dist.lazy_exports import lazy_exports
from d9d_loop.cli_main import cli_main as cli_main

if TYPE_CHECKING:
    from d9d_loop.config.config_file import read_config_file as read_config_file
    from d9d_loop.config.config_source import validate_config as validate_config
    from d9d_loop.config.engine_config import EngineConfig as EngineConfig
    from d9d_loop.config.inference_config import InferenceConfig as InferenceConfig
    from d9d_loop.config.preset import InferencePresetConfig as InferencePresetConfig
    from d9d_loop.config.schedule_config import ScheduleConfig as ScheduleConfig
    from d9d_loop.config.trainer_config import BatchConfig as BatchConfig
    from d9d_loop.config.trainer_config import CheckpointConfig as CheckpointConfig
    from d9d_loop.config.trainer_config import GradientConfig as GradientConfig
    from d9d_loop.config.trainer_config import RunConfig as RunConfig
    from d9d_loop.config.trainer_config import TrainerConfig as TrainerConfig
    from d9d_loop.data import DataProvider as DataProvider
    from d9d_loop.engine.engine import Engine as Engine
    from d9d_loop.event_bus import Events as Events
    from d9d_loop.event_bus import on_event as on_event
    from d9d_loop.events import BackwardDone as BackwardDone
    from d9d_loop.events import BadStepFound as BadStepFound
    from d9d_loop.events import CheckpointSaved as CheckpointSaved
    from d9d_loop.events import CheckpointStarted as CheckpointStarted
    from d9d_loop.events import ConfigReady as ConfigReady
    from d9d_loop.events import DataReady as DataReady
    from d9d_loop.events import EvaluationDone as EvaluationDone
    from d9d_loop.events import EvaluationStarted as EvaluationStarted
    from d9d_loop.events import Failed as Failed
    from d9d_loop.events import Finished as Finished
    from d9d_loop.events import GradientsReady as GradientsReady
    from d9d_loop.events import ModelExported as ModelExported
    from d9d_loop.events import ModelReady as ModelReady
    from d9d_loop.events import OptimizerDone as OptimizerDone
    from d9d_loop.events import OptimizerReady as OptimizerReady
    from d9d_loop.events import PartWritten as PartWritten
    from d9d_loop.events import StateOffloaded as StateOffloaded
    from d9d_loop.events import StateOnloaded as StateOnloaded
    from d9d_loop.events import StepDone as StepDone
    from d9d_loop.events import StepStarted as StepStarted
    from d9d_loop.events import TrainResult as TrainResult
    from d9d_loop.inference.inference import Inference as Inference
    from d9d_loop.job.evaluation import Evaluator as Evaluator
    from d9d_loop.job.job import build_job as build_job
    from d9d_loop.job.job_run import run_job as run_job
    from d9d_loop.job.plan import plan_job as plan_job
    from d9d_loop.job.profiler import Profiler as Profiler
    from d9d_loop.job.trainer import Trainer as Trainer
    from d9d_loop.model.hugging_face_model import hugging_face_model as hugging_face_model
    from d9d_loop.model.model_provider import FunctionProvider as FunctionProvider
    from d9d_loop.model.model_provider import ModelProvider as ModelProvider
    from d9d_loop.model.pretrained_model import pretrained_model as pretrained_model
    from d9d_loop.optimizers.ema import Ema as Ema
    from d9d_loop.optimizers.optimizer import AdamWConfig as AdamWConfig
    from d9d_loop.preset_job import preset_inference as preset_inference
    from d9d_loop.resilience import Stopped as Stopped
    from d9d_loop.resilience.bad_steps import BadStepError as BadStepError
    from d9d_loop.section import Section as Section
    from d9d_loop.task import BatchTask as BatchTask
    from d9d_loop.task import InferenceTask as InferenceTask
    from d9d_loop.task import Loss as Loss
    from d9d_loop.task import Task as Task
else:
    __getattr__, __dir__ = lazy_exports(__name__)
