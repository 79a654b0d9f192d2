"""The training job of a configuration file, for `d9d-train` and `d9d-plan`."""

from collections.abc import Sequence
from pathlib import Path

import d9d_loop
from d9d_dist import UserError
from d9d_loop import jobs
from d9d_loop.config.component import Component
from d9d_loop.config.config_file import read_config_file
from d9d_loop.config.config_source import split_words
from d9d_loop.config.preset import JobFileConfig, PresetConfig, look_beside_preset
from d9d_loop.jobs.job_config import TextJobConfig


def read_job(
    words: Sequence[str], *, world_size: int | None = None, reads_data: bool = True
) -> "tuple[d9d_loop.Trainer, JobFileConfig]":
    """Build the Trainer of the file and the overrides on a command line: a job on text, or a preset.

    Errors of the configuration come before the import of torch: with `world_size`, also a batch or degrees that do not
    fit that number of ranks. If `reads_data` is False, the Trainer can only export.
    """
    if _is_text_job(words):
        text_config = TextJobConfig.from_cli(arguments=words)
        if world_size is not None:
            text_config.split_over(world_size)
        return jobs.text_trainer(text_config, reads_data=reads_data), text_config
    config = PresetConfig.from_cli(arguments=words)
    if world_size is not None:
        config.split_over(world_size)
    if not reads_data:
        config = config.model_copy(update={"dataset": Component(use="builtins:list"), "evaluation_dataset": None})
    look_beside_preset(words)
    from d9d_loop.preset_job import preset_trainer  # noqa: PLC0415 - imports torch

    return preset_trainer(config), config


def _is_text_job(words: Sequence[str]) -> bool:
    if "--help" in words or "-h" in words:
        files = [word for word in words if not word.startswith("-") and Path(word).is_file()]
        return bool(files) and "job" in read_config_file(files[0])
    if "--schema" in words:
        return False
    file, overrides = split_words(words)
    if file is None:
        raise UserError(
            "no configuration file; expected d9d-train FILE.toml. d9d-train --init lists files to start from."
        )
    return "job" in read_config_file(file) or any(key == "job" for key, _ in overrides)
