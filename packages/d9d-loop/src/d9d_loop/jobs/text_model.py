"""Model of a job on text: a `transformers` model, or d9d's own model of the family for packed rows."""

from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any, assert_never

import torch
from torch import nn

from d9d_dist import UserError
from d9d_loop.data.text_tokenizer import TextTokenizer
from d9d_loop.jobs.job_config import GENERATING_JOBS, JobKind, TextJobConfig
from d9d_loop.model.hugging_face_model import check_entries, hugging_face_model, read_config, rope_error, rope_limit
from d9d_loop.model.model_provider import ModelProvider
from d9d_loop.model.pretrained_model import pretrained_model

_SPECIAL_IDS = {"bos_token_id": "bos_id", "eos_token_id": "end_id", "pad_token_id": "pad_id"}
_ROUTER_FACTORS = ("router_aux_loss_coef", "aux_loss_coef")


def transformers_model(
    config: TextJobConfig, tokenizer: TextTokenizer, entries: Mapping[str, Any], *, disable_dropout: bool
) -> ModelProvider:
    """Return the provider of the `transformers` model of a job; `entries` change its configuration.

    Parameters are float32 unless `model.dtype` is set; the export then keeps the dtypes of the folder. A job that
    classifies or embeds may start from a folder with another head.
    """
    chosen, auto = config.model, auto_class(config.job)
    changes = {**chosen.entries, **entries}
    if config.embedding is not None and config.embedding.attention == "bidirectional":
        changes = {"is_causal": False, **changes}
    found = model_config(config, tokenizer, changes)
    check_fit(config, found)
    check_vocabulary(tokenizer, found)
    options: dict[str, Any] = {
        "disable_dropout": disable_dropout,
        "dtype": getattr(torch, chosen.dtype or "float32"),
        "keep_dtypes": chosen.dtype is None,
    }
    if chosen.folder is None:
        return hugging_face_model(found, auto, **options)
    new_head = config.job in ("classify", "embed", "reward")
    return hugging_face_model(chosen.folder, auto, new_head=new_head, **options, **changes)


def auto_class(job: JobKind) -> Any:
    """Return the `transformers` class that builds the model of a job."""
    import transformers

    match job:
        case "sft" | "dpo" | "pretrain":
            return transformers.AutoModelForCausalLM
        case "vision":
            return transformers.AutoModelForImageTextToText
        case "classify" | "reward":
            return transformers.AutoModelForSequenceClassification
        case "embed":
            return transformers.AutoModel
        case _:
            assert_never(job)


def own_model(config: TextJobConfig, tokenizer: TextTokenizer) -> ModelProvider:
    """Return the provider of d9d's own decoder for the job's family, which supports packed rows and pipelines.

    Parameters are float32; the export keeps the dtypes of the folder.
    """
    chosen = config.model
    whole = model_config(config, tokenizer, chosen.entries)
    check_vocabulary(tokenizer, whole)
    found = chosen.folder or whole.to_dict()
    try:
        model = pretrained_model(found, keep_dtypes=True)
    except ModuleNotFoundError as error:
        raise UserError(f"dataset.packing = true: {error}.") from None
    if not model.recognized.is_causal:
        raise _bidirectional(config)
    return model


def model_config(config: TextJobConfig, tokenizer: TextTokenizer, changes: Mapping[str, Any]) -> Any:
    """Return the `transformers` configuration for the folder or the family, with changes."""
    if config.model.folder is None:
        return _new_config(config, tokenizer, changes)
    return read_config(config.model.folder, auto_class(config.job), changes)


def router_loss_factor(config: TextJobConfig, tokenizer: TextTokenizer) -> float:
    """Return the factor of the balance loss of experts, which `transformers` adds if `output_router_logits` is set."""
    found = model_config(config, tokenizer, config.model.entries).get_text_config()
    if not getattr(found, "output_router_logits", False):
        return 0.0
    factors = {name: getattr(found, name) for name in _ROUTER_FACTORS if hasattr(found, name)}
    if not factors:
        raise UserError(
            f"the configuration of {found.model_type} has output_router_logits = true, but none of "
            f"{', '.join(_ROUTER_FACTORS)}; expected the factor of the balance loss. Set model.output_router_logits to "
            "false to train without it."
        )
    return float(next(iter(factors.values())))


def padding_id(config: TextJobConfig, tokenizer: TextTokenizer) -> int:
    """Return the id of the padding token: that of the model, else of the tokenizer, else the end token.

    Classifiers find the end of a text by its padding, so the id is also that of their export.

    Raises:
        UserError: If a job that classifies has no such id, or different ones in the model and the tokenizer.
    """
    given = config.model.entries.get("pad_token_id")
    if given is not None:
        return int(given)
    own = getattr(model_config(config, tokenizer, config.model.entries), "pad_token_id", None)
    own = None if own is None or own < 0 else own
    found = next((each for each in (own, tokenizer.pad_id, tokenizer.end_id) if each is not None), None)
    if config.job in ("classify", "reward") and tokenizer.pad_id not in (None, found):
        raise UserError(
            f"config.json of the model has pad_token_id = {own}, but its tokenizer pads with {tokenizer.pad_id}; "
            "expected equal ids, because a classifier finds the end of a text by its padding. Set model.pad_token_id."
        )
    if config.job in ("classify", "reward") and found is None:
        raise UserError(
            "the model has no pad_token_id, and its tokenizer has neither a padding token nor an end token; expected "
            "a token that pads the texts of a batch to equal length. Set model.pad_token_id."
        )
    return found or 0


def check_fit(config: TextJobConfig, model_config: Any) -> None:
    """Raise `UserError` if a job on next tokens has a bidirectional model, or samples may exceed learned positions."""
    from transformers import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, MODEL_FOR_MASKED_LM_MAPPING

    text, names = model_config.get_text_config(), ("cross_attention_layers", "cross_layer_interval")
    if config.job == "vision":
        is_crossed = model_config.is_encoder_decoder or any(hasattr(text, name) for name in names)
        takes_images = type(model_config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
        if is_crossed or not takes_images:
            raise UserError(
                f"job = vision, but {config.model.folder} is a {model_config.model_type}, which "
                f"{'has cross attention or an encoder' if takes_images else 'takes no images'}; expected a decoder "
                "that AutoModelForImageTextToText loads, without cross attention. Choose another folder, or job = sft."
            )
    is_encoder = type(model_config) in MODEL_FOR_MASKED_LM_MAPPING and not model_config.is_encoder_decoder
    if config.job in GENERATING_JOBS and is_encoder and not getattr(model_config, "is_decoder", False):
        raise _bidirectional(config)
    length, limit = config.dataset.length, num_learned_positions(model_config)
    if limit is not None and length > limit:
        raise UserError(
            f"dataset.length = {length}, but the model has {limit} learned positions (max_position_embeddings"
            f"{'' if limit == model_config.max_position_embeddings else ', without those up to the padding id'}); "
            "expected at most that many. Lower the length, or choose a model with rotary positions."
        )
    if (rope := rope_limit(text)) and length > rope[1]:
        raise rope_error(f"dataset.length = {length}, but the model is one", rope)


def check_vocabulary(tokenizer: TextTokenizer, model_config: Any) -> None:
    """Raise `UserError` if the tokenizer has tokens that the embedding of the model lacks."""
    rows = getattr(model_config.get_text_config(), "vocab_size", None)
    if rows is not None and tokenizer.vocab_size > rows:
        raise UserError(
            f"the tokenizer has {tokenizer.vocab_size} tokens, but the embedding of the model has {rows}; expected at "
            "least as many. Use the tokenizer of the model, or a new model without model.vocab_size."
        )


def num_learned_positions(model_config: Any) -> int | None:
    """Return the largest length that a table of positions supports; `None` without a table.

    RoBERTa and its relatives count positions from the padding id + 1; their tables have a `padding_idx`.
    """
    from transformers import AutoModel

    limit = getattr(model_config, "max_position_embeddings", None)
    is_rotary = any(hasattr(model_config, name) for name in ("rope_parameters", "rope_theta"))
    if not isinstance(limit, int) or limit < 1 or is_rotary or not getattr(model_config, "position_biased_input", True):
        return None
    with torch.device("meta"):
        model = AutoModel.from_config(model_config)
    words = model.get_input_embeddings()
    tables = [each for each in model.modules() if isinstance(each, nn.Embedding) and each is not words]
    starts = [each.padding_idx + 1 for each in tables if each.num_embeddings == limit and each.padding_idx is not None]
    return limit - max(starts, default=0)


def _bidirectional(config: TextJobConfig) -> UserError:
    return UserError(
        f"job = {config.job} predicts the next token, but the model is bidirectional: each position sees the next "
        "one; expected a causal model. Choose another model, or job = classify or embed."
    )


def _new_config(config: TextJobConfig, tokenizer: TextTokenizer, entries: Mapping[str, Any]) -> Any:
    """Return the configuration of a new model of a `transformers` family, for the job's tokenizer."""
    from transformers import CONFIG_MAPPING, AutoConfig

    family = str(config.model.family)
    if family not in CONFIG_MAPPING:
        raise UserError(f"model.family = {family!r} is unknown; expected a model_type of transformers, such as qwen3.")
    defaults = AutoConfig.for_model(family)
    check_entries(defaults, config.model.entries)
    known = {*defaults.to_dict(), *defaults.attribute_map}
    for name in (name for name in config.model.entries if not hasattr(defaults, name)):
        near = get_close_matches(name, known, n=1)
        raise UserError(
            f"model.{name} is not an entry of {family}'s config.json" + (f"; did you mean {near[0]}?" if near else ".")
        )
    # Special tokens are those of the tokenizer: the defaults of a family are ids of another vocabulary.
    special = {name: getattr(tokenizer, each) for name, each in _SPECIAL_IDS.items()}
    try:
        found = AutoConfig.for_model(family, **{"vocab_size": tokenizer.vocab_size, **special, **entries})
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
