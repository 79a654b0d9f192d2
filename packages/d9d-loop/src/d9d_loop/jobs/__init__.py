"""Jobs on text that a configuration file describes alone: fine-tuning, pretraining, classification and embeddings."""

from typing import TYPE_CHECKING

from d9d_dist.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from d9d_loop.jobs.job_config import (
        AdapterConfig,
        EmbeddingConfig,
        LanguageModelConfig,
        TextDataConfig,
        TextJobConfig,
    )
    from d9d_loop.jobs.starter_files import STARTERS, write_starter
    from d9d_loop.jobs.text_job import text_trainer
else:
    __getattr__, __dir__ = lazy_exports(__name__)

__all__ = [
    "STARTERS",
    "AdapterConfig",
    "EmbeddingConfig",
    "LanguageModelConfig",
    "TextDataConfig",
    "TextJobConfig",
    "text_trainer",
    "write_starter",
]
