"""Jobs on text, defined entirely by a configuration file: fine-tuning, pretraining, classification, embeddings."""

from typing import TYPE_CHECKING

from d9d_dist.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from d9d_loop.jobs.job_config import AdapterConfig as AdapterConfig
    from d9d_loop.jobs.job_config import EmbeddingConfig as EmbeddingConfig
    from d9d_loop.jobs.job_config import LanguageModelConfig as LanguageModelConfig
    from d9d_loop.jobs.job_config import TextDataConfig as TextDataConfig
    from d9d_loop.jobs.job_config import TextJobConfig as TextJobConfig
    from d9d_loop.jobs.starter_files import STARTERS as STARTERS
    from d9d_loop.jobs.starter_files import write_starter as write_starter
    from d9d_loop.jobs.text_job import text_trainer as text_trainer
    from d9d_loop.jobs.text_tasks import LabelScores as LabelScores
    from d9d_loop.jobs.text_tasks import NextToken as NextToken
    from d9d_loop.jobs.vision_data import image_chats as image_chats
else:
    __getattr__, __dir__ = lazy_exports(__name__)
