"""Tokenizer files of a job's export, from which `AutoTokenizer` reads the tokenizer of the job, and special ids."""

import shutil
from pathlib import Path

from d9d_loop.data.text_tokenizer import TEMPLATE_FOLDER, TOKENIZER_FILES, read_text_tokenizer
from d9d_loop.events import Finished
from d9d_loop.jobs.job_config import GENERATING_JOBS, TextJobConfig
from d9d_loop.jobs.special_ids import write_special_ids
from d9d_loop.jobs.text_data import text_tokenizer


def write_tokenizer(config: TextJobConfig, done: Finished) -> None:
    """Write the tokenizer of a job to `export/` and `adapters/` of its run, where they exist, and its special ids.

    The files are those of one folder: files of another tokenizer, which the base model had, are removed.
    """
    for folder in (done.result.run_dir / name for name in ("export", "adapters")):
        if done.ctx.is_main_process and folder.is_dir():
            _write(config, folder)
            if config.job in GENERATING_JOBS:
                write_special_ids(config, folder)


def _write(config: TextJobConfig, folder: Path) -> None:
    tokenizer, source = text_tokenizer(config), config.model.tokenizer or config.model.folder
    if source is not None and source.name == "tokenizer.json":
        source = source.parent
    copy_tokenizer(source, folder)
    if source is not None and source.is_dir() and read_text_tokenizer(folder).identity() == tokenizer.identity():
        return
    # The settings of the source, or their absence, select another tokenizer beside this model's config.json.
    tokenizer.save(folder)


def copy_tokenizer(source: Path | None, folder: Path) -> None:
    """Replace the tokenizer files of a folder by those of another one, if it is a folder."""
    for name in TOKENIZER_FILES:
        (folder / name).unlink(missing_ok=True)
    shutil.rmtree(folder / TEMPLATE_FOLDER, ignore_errors=True)
    if source is None or not source.is_dir():
        return
    for name in TOKENIZER_FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, folder / name)
    if (source / TEMPLATE_FOLDER).is_dir():
        shutil.copytree(source / TEMPLATE_FOLDER, folder / TEMPLATE_FOLDER)
