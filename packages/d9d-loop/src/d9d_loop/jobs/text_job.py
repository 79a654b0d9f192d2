"""Trainer of a job on text, built only from its configuration."""

from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from typing import Any, assert_never

from d9d_dist import UserError
from d9d_dist.install_hint import install_hint
from d9d_loop.config.component import import_function
from d9d_loop.data import DataProvider
from d9d_loop.engine.code_digest import source_digests
from d9d_loop.engine.reference import Reference
from d9d_loop.events import ConfigReady, Finished
from d9d_loop.job.trainer import Trainer
from d9d_loop.jobs.adapted_model import AdaptedModel
from d9d_loop.jobs.job_config import EmbeddingConfig, PreferenceConfig, RewardConfig, TextJobConfig
from d9d_loop.jobs.text_data import Note, chat_rows, labeled_rows, packed_texts, text_tokenizer, text_windows
from d9d_loop.jobs.text_export import write_tokenizer
from d9d_loop.jobs.text_groups import text_groups
from d9d_loop.jobs.text_model import auto_class, own_model, padding_id, router_loss_factor, transformers_model
from d9d_loop.jobs.text_pairs import pair_rows
from d9d_loop.jobs.text_samples import TextSamples
from d9d_loop.jobs.text_tasks import Classify, Embed, NextToken, Prefer, Reward
from d9d_loop.jobs.vision_data import for_images, image_chats, packed_image_chats
from d9d_loop.losses import PreferenceLoss, RewardLoss
from d9d_loop.model.hugging_face_model import read_config, takes_positions
from d9d_loop.model.model_provider import ModelProvider
from d9d_loop.task import Task
from d9d_loop.tasks import NextTokenTask, PreferenceTask

_PEFT_TASKS = {
    "AutoModel": "FEATURE_EXTRACTION",
    "AutoModelForCausalLM": "CAUSAL_LM",
    "AutoModelForImageTextToText": None,
    "AutoModelForSequenceClassification": "SEQ_CLS",
}
"""Tasks of `peft`, by which its auto classes choose the class of the model, by class of `transformers`."""


def text_trainer(config: TextJobConfig, *, reads_data: bool = True) -> Trainer:
    """Build the Trainer of a job on text. `transformers` can load the exported folder with its tokenizer.

    If `reads_data` is False, it can only export; only `job = classify` reads its data, for the classes.

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
    of_model = for_images(config)
    data, task, model = _parts(config, of_model, notes.append, reads_data=reads_data)
    if isinstance(task, NextToken | Prefer):
        task.label_logits = takes_positions(model)
    task_type = _PEFT_TASKS[auto_class(of_model.job).__name__]
    adapted = None if config.adapter is None else AdaptedModel(model, config.adapter, task_type=task_type)
    compute = config.compute_metrics
    trainer = Trainer(
        config,
        model=adapted or model,
        data=data,
        task=task,
        reference=_reference(config, adapted),
        compute_metrics=None if compute is None else import_function(compute, "compute_metrics"),
    )
    source = config.initial_weights or model.initial_weights
    trainer.events.on(ConfigReady, lambda ready: _print(notes, ready))
    if adapted is not None and config.export:
        digests = source_digests(source, has_adapters=True)
        if not config.run.from_scratch:
            trainer.events.on(ConfigReady, lambda ready: adapted.check_export(config.run.dir, source))
        trainer.events.on(Finished, lambda done: adapted.export(done, source, digests))
    if config.prompts:
        trainer.events.subscribe(TextSamples(of_model))
    if config.export:
        trainer.events.on(Finished, lambda done: write_tokenizer(of_model, done))
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
    if folder is None:
        return
    if not folder.is_dir():
        raise UserError(f"model.folder = {folder} is a file; expected its folder, with config.json.")
    if (folder / "adapter_config.json").is_file() and not list(folder.glob("model*.safetensors")):
        raise UserError(
            f"model.folder = {folder} has adapters; expected a model. Set it to the export of the job that trained "
            "them, or to the model that d9d-export writes from them."
        )
    if not config.has_own_model:
        read_config(folder, auto_class(config.job), {})


def _parts(
    config: TextJobConfig, of_model: TextJobConfig, note: Note, *, reads_data: bool
) -> tuple[DataProvider | tuple[()], Task, ModelProvider]:
    """Return the data, the task and the model of a job. `of_model` is the configuration `for_images`."""
    tokenizer, packing = text_tokenizer(config), config.dataset.packing
    entries: dict[str, Any] = {}
    data: Callable[[], DataProvider]
    task: Task
    match config.job:
        case "sft" | "pretrain":
            task = NextTokenTask() if packing else NextToken(router_loss=router_loss_factor(config, tokenizer))
            texts = packed_texts if packing else text_windows
            data = partial(chat_rows if config.job == "sft" else texts, config, note)
        case "vision":
            task = NextToken(counts_skipped=True)
            data = partial(packed_image_chats if packing else partial(image_chats, in_bytes=True), config, note)
        case "dpo" if of_model.job == "vision":
            task = _preference_task(config, counts_skipped=True)
            data = partial(image_chats, of_model, note, pairs=True, in_bytes=True)
        case "dpo":
            task = _preference_task(config, router_loss=0.0 if packing else router_loss_factor(config, tokenizer))
            data = partial(pair_rows, config, note)
        case "reward":
            chosen = config.reward or RewardConfig()
            task = Reward(RewardLoss(centering=chosen.centering, margin=chosen.margin))
            data = partial(pair_rows, config, note)
            entries = {"num_labels": 1, "pad_token_id": padding_id(config, tokenizer)}
        case "classify":
            task = Classify()
            rows, classes = labeled_rows(config)
            data = lambda: rows  # noqa: E731
            entries = {**classes.entries, "pad_token_id": padding_id(config, tokenizer)}
        case "embed":
            pairs = config.embedding or EmbeddingConfig()
            task = Embed(num_pairs=pairs.group, pooling=pairs.pooling, temperature=pairs.temperature)
            data = partial(text_groups, config, pairs)
        case _:
            assert_never(config.job)
    read = data() if reads_data else ()
    if of_model.job == "vision" and router_loss_factor(of_model, tokenizer):
        raise UserError(
            "the configuration of the model has output_router_logits = true, but jobs with images have no balance loss "
            "of experts; expected false. Set it in config.json of the folder."
        )
    if config.has_own_model:  # without dropout
        return read, task, own_model(config, tokenizer)
    disable_dropout = config.job in ("dpo", "reward")  # as TRL
    return read, task, transformers_model(of_model, tokenizer, entries, disable_dropout=disable_dropout)


def _preference_task(config: TextJobConfig, *, router_loss: float = 0.0, counts_skipped: bool = False) -> Task:
    chosen = config.preference or PreferenceConfig()
    loss = PreferenceLoss(**chosen.model_dump(exclude={"reference"}))
    if config.dataset.packing:
        return PreferenceTask(loss, has_reference=chosen.reference)
    return Prefer(loss, has_reference=chosen.reference, router_loss=router_loss, counts_skipped=counts_skipped)


def _reference(config: TextJobConfig, adapted: AdaptedModel | None) -> Reference | None:
    """Return the reference of a job: the model without its adapters, or a copy of the initial trained weights."""
    if config.job != "dpo" or not (config.preference or PreferenceConfig()).reference:
        return None
    full = None if config.adapter is None else config.adapter.full
    return "initial" if adapted is None or full is not None else adapted.without_adapters
