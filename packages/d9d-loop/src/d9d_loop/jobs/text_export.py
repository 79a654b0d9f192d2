"""Tokenizer files of a job's export, from which `AutoTokenizer` reads the tokenizer of the job, and special ids."""

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from d9d_dist import UserError
from d9d_loop.data.text_tokenizer import (
    TEMPLATE_FOLDER,
    TOKENIZER_FILES,
    TextTokenizer,
    listed_ids,
    read_json,
    read_text_tokenizer,
)
from d9d_loop.events import Finished
from d9d_loop.jobs.job_config import CHAT_JOBS, GENERATING_JOBS, TextJobConfig
from d9d_loop.jobs.text_data import chat_tokenizer, text_tokenizer

_CONFIG, _GENERATION = "config.json", "generation_config.json"


def write_tokenizer(config: TextJobConfig, done: Finished) -> None:
    """Write the tokenizer of a job to `export/` and `adapters/` of its run, where they exist, and its special ids.

    The files are those of one folder: files of another tokenizer, which the base model had, are removed.
    """
    for folder in (done.result.run_dir / name for name in ("export", "adapters")):
        if done.ctx.is_main_process and folder.is_dir():
            _write_files(config, folder)
            if config.job in GENERATING_JOBS:
                _write_special_ids(config, folder)


def _write_files(config: TextJobConfig, folder: Path) -> None:
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


def end_ids(config: TextJobConfig) -> list[int]:
    """Return the ids of the tokens that end an answer or a text of the job's model.

    They are the model's end tokens, the token that ends each turn or text in training, and the tokenizer's end token.
    """
    folder, chat = config.model.folder, chat_tokenizer(config) if config.job in CHAT_JOBS else None
    tokenizer = text_tokenizer(config) if chat is None else chat.text_tokenizer
    known = [] if folder is None or _is_foreign(config, tokenizer) else _end_ids_of(folder)
    known = listed_ids(config.model.entries.get("eos_token_id")) or known
    end = config.dataset.end_token
    of_text = None if end is None else tokenizer.token_id(end)
    trained = of_text if chat is None else chat.end_of_turn()
    return listed_ids([*known, trained, tokenizer.end_id])


def _write_special_ids(config: TextJobConfig, folder: Path) -> None:
    """Write the special ids of a language model into a folder with its `config.json`, so that `generate` ends there.

    `generation_config.json` lists all end tokens. If `model.tokenizer` is set, its special ids replace those of the
    base model. Ids that the configuration of the job sets are kept.
    """
    model, ends = read_json(folder / _CONFIG), end_ids(config)
    kept = config.model.entries
    changed: dict[str, Any] = {
        name: number for name, number in _changes(config, model, ends).items() if name not in kept
    }
    if changed:
        _write(folder / _CONFIG, model | changed)
    generation = read_json(folder / _GENERATION)
    if "eos_token_id" not in kept and ends:
        changed["eos_token_id"] = ends if len(ends) > 1 else next(iter(ends), None)
        if not generation and set(_end_ids_of(folder)) != set(ends):
            names = ("bos_token_id", "pad_token_id", "eos_token_id")
            generation = {name: model.get(name) for name in names}
    if generation and generation | changed != generation:
        _write(folder / _GENERATION, generation | changed)


def _changes(config: TextJobConfig, model: Mapping[str, Any], ends: Sequence[int]) -> dict[str, int | None]:
    """Return the special ids of the job that differ from those of the model's configuration."""
    known = listed_ids(model.get("eos_token_id"))
    found: dict[str, int | None] = {}
    if config.model.folder is not None and config.model.tokenizer is not None:
        tokenizer = text_tokenizer(config)
        found = {"bos_token_id": tokenizer.bos_id, "pad_token_id": tokenizer.pad_id}
        found |= {} if tokenizer.end_id in known else {"eos_token_id": tokenizer.end_id}
        if not _is_foreign(config, tokenizer):
            found = {name: number for name, number in found.items() if number is not None}
    elif not known and ends:
        found["eos_token_id"] = ends[0]
    return {name: number for name, number in found.items() if model.get(name) != number}


def _is_foreign(config: TextJobConfig, tokenizer: TextTokenizer) -> bool:
    """Return True if the job's tokenizer is of another folder than its model, and has other tokens."""
    if config.model.folder is None or config.model.tokenizer is None:
        return False
    try:
        return read_text_tokenizer(config.model.folder).identity() != tokenizer.identity()
    except UserError:  # the folder has no tokenizer
        return False


def _end_ids_of(folder: Path) -> list[int]:
    """Return the end tokens of a model folder, as `generate` of `transformers` reads them."""
    file = _GENERATION if (folder / _GENERATION).is_file() else _CONFIG
    return listed_ids(read_json(folder / file).get("eos_token_id"))


def _write(file: Path, content: dict[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
