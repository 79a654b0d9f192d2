"""Common jobs on text that a configuration file describes alone: fine-tuning, pretraining and classification."""

from d9d_loop.jobs.job_config import AdapterConfig, LanguageModelConfig, TextDataConfig, TextJobConfig
from d9d_loop.jobs.starter_files import STARTERS, write_starter
from d9d_loop.jobs.text_job import text_trainer

__all__ = [
    "STARTERS",
    "AdapterConfig",
    "LanguageModelConfig",
    "TextDataConfig",
    "TextJobConfig",
    "text_trainer",
    "write_starter",
]
