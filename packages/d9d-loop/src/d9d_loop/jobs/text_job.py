"""Trainer of a job on text, built only from its configuration."""

from importlib.util import find_spec
from typing import assert_never

from d9d_dist import UserError
from d9d_dist.install_hint import install_hint
from d9d_loop.config.component import import_function
from d9d_loop.data import DataProvider
from d9d_loop.events import ConfigReady, Finished
from d9d_loop.job.trainer import Trainer
from d9d_loop.jobs.adapted_model import AdaptedModel
from d9d_loop.jobs.job_config import EmbeddingConfig, TextJobConfig
from d9d_loop.jobs.text_data import Note, chat_rows, labeled_rows, packed_texts, text_tokenizer, text_windows
from d9d_loop.jobs.text_export import write_tokenizer
from d9d_loop.jobs.text_groups import text_groups
from d9d_loop.jobs.text_model import auto_class, own_model, padding_id, router_loss_factor, transformers_model
from d9d_loop.jobs.text_samples import TextSamples
from d9d_loop.jobs.text_tasks import Classify, Embed, NextToken
from d9d_loop.model.hugging_face_model import read_config
from d9d_loop.model.model_provider import ModelProvider
from d9d_loop.task import Task
from d9d_loop.tasks import NextTokenTask


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
    notes: list[str] = []
    data, task, model = _parts(config, notes.append)
    adapted = AdaptedModel(model, config.adapter) if config.adapter is not None else None
    compute = config.compute_metrics
    trainer = Trainer(
        config,
        model=adapted or model,
        data=data,
        task=task,
        compute_metrics=None if compute is None else import_function(compute, "compute_metrics"),
    )
    source = config.initial_weights or model.initial_weights
    trainer.events.on(ConfigReady, lambda ready: _print(notes, ready))
    if adapted is not None and config.export:
        if not config.run.from_scratch:
            trainer.events.on(ConfigReady, lambda ready: adapted.check_export(config.run.dir, source))
        trainer.events.on(Finished, lambda done: adapted.export(done, source))
    if config.prompts:
        trainer.events.subscribe(TextSamples(config))
    if config.export:
        trainer.events.on(Finished, lambda done: write_tokenizer(config, done))
    return trainer


def _print(notes: list[str], ready: ConfigReady) -> None:
    for note in notes if ready.ctx.is_main_process else []:
        print(f"d9d: {note}", flush=True)


def _check_folders(config: TextJobConfig) -> None:
    for key, path in (("folder", config.model.folder), ("tokenizer", config.model.tokenizer)):
        if path is not None and not path.exists():
            raise UserError(
                f"model.{key} = {path} does not exist; expected a folder in the Hugging Face layout. Nothing is "
                f"downloaded: hf download NAME --local-dir {path}"
            )
    folder = config.model.folder
    if folder is not None and not folder.is_dir():
        raise UserError(f"model.folder = {folder} is a file; expected its folder, with config.json.")
    if folder is not None and not config.dataset.packing:
        read_config(folder, auto_class(config.job), {})


def _parts(config: TextJobConfig, note: Note) -> tuple[DataProvider, Task, ModelProvider]:
    """Return the data, the task and the model of a job."""
    tokenizer = text_tokenizer(config)
    if config.dataset.packing:
        data: DataProvider = chat_rows(config, note) if config.job == "sft" else packed_texts(config, note)
        return data, NextTokenTask(), own_model(config, tokenizer)
    match config.job:
        case "sft" | "pretrain":
            data = chat_rows(config, note) if config.job == "sft" else text_windows(config, note)
            task: Task = NextToken(router_loss=router_loss_factor(config, tokenizer))
            return data, task, transformers_model(config, tokenizer)
        case "classify":
            data, classes = labeled_rows(config)
            entries = {**classes.entries(), "pad_token_id": padding_id(config, tokenizer)}
            return data, Classify(), transformers_model(config, tokenizer, entries)
        case "embed":
            chosen = config.embedding or EmbeddingConfig()
            task = Embed(num_pairs=chosen.group, pooling=chosen.pooling, temperature=chosen.temperature)
            return text_groups(config, chosen), task, transformers_model(config, tokenizer)
        case _:
            assert_never(config.job)
