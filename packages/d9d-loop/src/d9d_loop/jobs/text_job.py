"""Trainer of a job on text, built only from its configuration."""

import shutil
from collections.abc import Mapping
from difflib import get_close_matches
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from d9d_dist import UserError
from d9d_dist.install_hint import install_hint
from d9d_loop.data import DataProvider
from d9d_loop.events import Finished
from d9d_loop.job.trainer import Trainer
from d9d_loop.jobs.adapted_model import AdaptedModel
from d9d_loop.jobs.job_config import EmbeddingConfig, TextJobConfig
from d9d_loop.jobs.text_data import PackedTexts, chat_rows, labeled_rows, text_tokenizer, text_windows
from d9d_loop.jobs.text_groups import text_groups
from d9d_loop.jobs.text_samples import TextSamples
from d9d_loop.jobs.text_tasks import Classify, Embed, NextToken
from d9d_loop.model.hugging_face_model import hugging_face_model, read_config
from d9d_loop.model.model_provider import ModelProvider
from d9d_loop.model.pretrained_model import pretrained_model
from d9d_loop.task import Task
from d9d_loop.tasks import NextTokenTask

_NEW_HEADS = ("score.*", "classifier.*", "*.classifier.*")
_OTHER_HEADS = ("lm_head.*", "cls.*")
_POOLERS = ("pooler.*",)
_ALL_HEADS = (*_NEW_HEADS, *_OTHER_HEADS)
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")


def text_trainer(config: TextJobConfig) -> Trainer:
    """Build the Trainer of a job on text. `transformers` can load the exported folder with its tokenizer.

    Raises:
        UserError: If a file or folder is missing or does not fit the job, or a package is not installed.
    """
    if find_spec("transformers") is None:
        raise UserError(
            f"job = {config.job} needs the package transformers, which is not installed. Install it: "
            f"{install_hint('d9d-loop', 'transformers')}"
        )
    _check_folders(config)
    data, task, model = _parts(config)
    adapted = AdaptedModel(model, config.adapter) if config.adapter is not None else None
    settings = config if adapted is None else config.model_copy(update={"export": False})
    trainer = Trainer(settings, model=adapted or model, data=data, task=task)
    source = config.initial_weights or model.initial_weights
    if adapted is not None and config.export:
        trainer.events.on(Finished, lambda done: adapted.export(done, source))
    if config.prompts:
        trainer.events.subscribe(TextSamples(config))
    tokenizer = config.model.tokenizer
    if tokenizer is not None and config.export:
        trainer.events.on(Finished, lambda done: _copy_tokenizer(done, tokenizer))
    return trainer


def _check_folders(config: TextJobConfig) -> None:
    for key, path in (("folder", config.model.folder), ("tokenizer", config.model.tokenizer)):
        if path is not None and not path.exists():
            raise UserError(
                f"model.{key} = {path} does not exist; expected a folder in the Hugging Face layout. Nothing is "
                f"downloaded: hf download NAME --local-dir {path}"
            )
    if config.model.folder is not None and not config.model.folder.is_dir():
        raise UserError(f"model.folder = {config.model.folder} is a file; expected its folder, with config.json.")


def _parts(config: TextJobConfig) -> tuple[DataProvider, Task, ModelProvider]:
    """Return the data, the task and the model of a job."""
    data: DataProvider
    task: Task = NextToken()
    model: ModelProvider
    if config.dataset.packing:
        data, model = chat_rows(config) if config.job == "sft" else PackedTexts(config), _own_model(config)
        task = NextTokenTask()
    elif config.job == "sft":
        data, model = chat_rows(config), _model(config, "AutoModelForCausalLM")
    elif config.job == "pretrain":
        data, model = text_windows(config), _model(config, "AutoModelForCausalLM")
    elif config.job == "embed":
        embedding = config.embedding or EmbeddingConfig()
        data, model = text_groups(config, embedding), _model(config, "AutoModel", new=_POOLERS, unused=_ALL_HEADS)
        task = Embed(num_pairs=embedding.group, pooling=embedding.pooling, temperature=embedding.temperature)
    else:
        data, classes = labeled_rows(config)
        task = Classify()
        model = _model(config, "AutoModelForSequenceClassification", classes, new=_NEW_HEADS, unused=_OTHER_HEADS)
    return data, task, model


def _model(config: TextJobConfig, auto_class: str, classes: list[str] | None = None, **heads: Any) -> ModelProvider:
    """Return the provider of the job's model; `heads` are the arguments `new` and `unused` of `hugging_face_model`."""
    import transformers

    auto, chosen = getattr(transformers, auto_class), config.model
    options: dict[str, Any] = {
        "dtype": None if chosen.dtype is None else getattr(torch, chosen.dtype),
        "tp_plan": chosen.tensor_parallel_plan,
    }
    entries = chosen.entries
    if classes is not None:
        numbered = dict(enumerate(classes))
        labels = {"id2label": numbered, "label2id": {name: number for number, name in numbered.items()}}
        entries = {"num_labels": len(classes), **labels, "pad_token_id": 0, **entries}
    if config.embedding is not None and config.embedding.attention == "bidirectional":
        entries = {"is_causal": False, **entries}
    if chosen.folder is not None:
        _check_fit(config, read_config(chosen.folder, auto, entries))
        return hugging_face_model(chosen.folder, auto, **heads, **options, **entries)
    found = _new_config(config, entries)
    _check_fit(config, found)
    return hugging_face_model(found, auto, **options)


def _own_model(config: TextJobConfig) -> ModelProvider:
    """Return the provider of d9d's own decoder for the job's family, which supports packed rows and pipelines."""
    chosen = config.model
    found = chosen.folder or _new_config(config, chosen.entries).to_dict()
    try:
        model = pretrained_model(found)
    except ModuleNotFoundError as error:
        raise UserError(f"dataset.packing = true: {error}.") from None
    if not model.recognized.is_causal:
        raise _bidirectional(config)
    return model


def _check_fit(config: TextJobConfig, model_config: Any) -> None:
    """Raise `UserError` if a job on next tokens has a bidirectional model, or samples may exceed learned positions."""
    from transformers import MODEL_FOR_MASKED_LM_MAPPING

    is_encoder = type(model_config) in MODEL_FOR_MASKED_LM_MAPPING and not model_config.is_encoder_decoder
    if config.job in ("sft", "pretrain") and is_encoder and not getattr(model_config, "is_decoder", False):
        raise _bidirectional(config)
    length, limit = config.dataset.length, getattr(model_config, "max_position_embeddings", None)
    is_rotary = any(hasattr(model_config, name) for name in ("rope_parameters", "rope_theta"))
    is_learned = isinstance(limit, int) and not is_rotary and getattr(model_config, "position_biased_input", True)
    if is_learned and length > limit:
        raise UserError(
            f"dataset.length = {length}, but the model has {limit} learned positions (max_position_embeddings); "
            "expected at most that many. Lower the length, or choose a model with rotary positions."
        )


def _bidirectional(config: TextJobConfig) -> UserError:
    return UserError(
        f"job = {config.job} predicts the next token, but the model is bidirectional: each position sees the next "
        "one; expected a causal model. Choose another model, or job = classify or embed."
    )


def _new_config(config: TextJobConfig, entries: Mapping[str, Any]) -> Any:
    """Return the configuration of a new model of a `transformers` family, for the job's tokenizer."""
    from transformers import CONFIG_MAPPING, AutoConfig

    family = str(config.model.family)
    if family not in CONFIG_MAPPING:
        raise UserError(f"model.family = {family!r} is unknown; expected a model_type of transformers, such as qwen3.")
    defaults = AutoConfig.for_model(family)
    known = {*defaults.to_dict(), *defaults.attribute_map}
    for name in (name for name in config.model.entries if not hasattr(defaults, name)):
        near = get_close_matches(name, known, n=1)
        raise UserError(
            f"model.{name} is not an entry of {family}'s config.json" + (f"; did you mean {near[0]}?" if near else ".")
        )
    try:
        found = AutoConfig.for_model(family, **{**_vocabulary(config), **entries})
    except Exception as error:  # transformers validates with exception classes of its own
        cause = str(error.__cause__ or error).strip()
        raise UserError(f"[model] is not a valid configuration of {family}: {cause}. Correct the entry.") from None
    heads, groups = (getattr(found, name, None) for name in ("num_attention_heads", "num_key_value_heads"))
    if isinstance(heads, int) and isinstance(groups, int) and heads % groups:
        raise UserError(
            f"model.num_key_value_heads = {groups} does not divide num_attention_heads = {heads}; expected a divisor. "
            "Change one of them."
        )
    return found


def _vocabulary(config: TextJobConfig) -> dict[str, Any]:
    tokenizer = text_tokenizer(config)
    return {"vocab_size": tokenizer.vocab_size, "bos_token_id": None, "eos_token_id": tokenizer.vocab_size - 1}


def _copy_tokenizer(done: Finished, tokenizer: Path) -> None:
    export = done.result.run_dir / "export"
    if not done.ctx.is_main_process or not export.is_dir():  # adapters of a quantized base are not merged
        return
    folder = tokenizer if tokenizer.is_dir() else tokenizer.parent
    for name in _TOKENIZER_FILES:
        if (folder / name).is_file():
            shutil.copyfile(folder / name, export / name)
