"""Language model of a run's export or of a Hugging Face folder, with its tokenizer, loaded by `transformers`."""

from dataclasses import dataclass
from datetime import date
from importlib.util import find_spec
from pathlib import Path
from typing import Any, final

import torch

from d9d_dist import UserError
from d9d_dist.install_hint import install_hint
from d9d_loop.data import TextTokenizer
from d9d_loop.data.chat_template import ChatTemplate, NoChatTemplateError, read_chat_template
from d9d_loop.data.image_processor import read_processor
from d9d_loop.data.text_tokenizer import NUM_BYTES, TOKENIZER_FILES, listed_ids, read_json, read_text_tokenizer
from d9d_loop.result.adapted_base import ADAPTER_CONFIG, AdaptedBase, BaseWeights, find_base, load_adapted, load_model


@final
@dataclass(frozen=True)
class LoadedResult:
    """Language model and tokenizer.

    Attributes:
        model: Model of `transformers`, in evaluation mode.
        tokenizer: Tokenizer of the folder, or one of bytes.
        chat: Chat template of the folder, which prints the date of today; None if there is no template.
        stop_tokens: Token ids that end an answer.
        max_context: Largest number of tokens that the model supports; None if its configuration has no limit.
        adapted: The adapters and their base, if the folder holds adapters.
        processor: Processor of images; None for a model of texts.
    """

    folder: Path
    model: Any
    tokenizer: TextTokenizer
    chat: ChatTemplate | None
    stop_tokens: tuple[int, ...]
    max_context: int | None
    adapted: AdaptedBase | None = None
    processor: Any = None


def load_result(
    path: str | Path, *, device: torch.device, base: Path | None = None, weights: BaseWeights = "trained"
) -> LoadedResult:
    """Load the model and tokenizer of a run folder, whose export is used, or of a folder in Hugging Face layout.

    A run that exported only adapters, and a folder of adapters, are loaded with their base model: `base`, or the folder
    that the adapters or the run name. `weights` chooses the weights of the base. A folder without tokenizer is accepted
    if the vocabulary has 256 tokens, which are bytes, or 257, with an end token. Nothing is downloaded. The parameters
    have the dtype of the files.

    Raises:
        UserError: If the folder has no model, the base of adapters is missing, there is no tokenizer although the
            vocabulary needs one, or the chat template has a syntax error.
        ModuleNotFoundError: If `transformers` is not installed.
    """
    folder = find_export(Path(path))
    require_transformers()
    from transformers import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

    adapted = None
    if (folder / ADAPTER_CONFIG).is_file():
        adapted = find_base(folder, base=base, weights=weights)
        model = load_adapted(adapted)
    else:
        model = load_model(folder)
    if not model.can_generate():
        raise UserError(
            f"{folder} holds a {type(model).__name__}, which predicts no tokens; expected a language model."
        )
    config = model.config
    own = tokenizer_folder(folder, adapted)
    has_processor = any((own / f"{name}_config.json").is_file() for name in ("processor", "preprocessor"))
    has_images = type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING and has_processor
    processor = read_processor(own) if has_images else None
    vocab_size = config.get_text_config().vocab_size
    text_tokenizer, chat, stops = _read_tokenizer(own, vocab_size=vocab_size, has_parts=has_images)
    model.to(device).eval()
    stops += listed_ids(model.generation_config.eos_token_id)
    stops += listed_ids(read_json(own / "generation_config.json").get("eos_token_id"))
    max_context = getattr(config.get_text_config(), "max_position_embeddings", None)
    stops = list(dict.fromkeys(stops))
    return LoadedResult(folder, model, text_tokenizer, chat, tuple(stops), max_context, adapted, processor)


def tokenizer_folder(folder: Path, adapted: AdaptedBase | None) -> Path:
    """Return the folder of the tokenizer: that of the adapters if it has one, else that of their base."""
    has_own = any((folder / name).is_file() for name in TOKENIZER_FILES)
    return folder if adapted is None or has_own else adapted.base


def require_transformers() -> None:
    """Raise `ModuleNotFoundError` with the command that installs `transformers`, if it is missing."""
    if find_spec("transformers") is None:
        raise ModuleNotFoundError(
            f"a result is loaded by transformers, which is missing. Install it: "
            f"{install_hint('d9d-loop', 'transformers')}"
        )


def find_export(path: Path) -> Path:
    """Return the folder of a model in Hugging Face layout, or of adapters.

    This is the export of a run folder, or its adapters without an export, or the path itself. The `config.json` of a
    run folder is the configuration of the job; that of a model names its `model_type`.

    Raises:
        UserError: If there is no such folder.
    """
    if (path / ADAPTER_CONFIG).is_file():
        return path
    is_run = any((path / name).is_dir() for name in ("checkpoints", "export", "adapters"))
    for folder, name in ((path / "export", "config.json"), (path / "adapters", ADAPTER_CONFIG), (path, "config.json")):
        if (folder / name).is_file() and not (is_run and folder == path and "model_type" not in read_json(path / name)):
            return folder
    if not path.is_dir():
        raise UserError(f"{path} does not exist; expected the folder of a run or of a model.")
    if is_run:
        raise UserError(
            f"{path} is a run without an export; expected {path / 'export' / 'config.json'}. Finish the run with "
            "export enabled and a model that writes config.json (ModelProvider.export_files)."
        )
    raise UserError(
        f"{path} has no config.json; expected a folder in Hugging Face layout, or a run folder with such an export."
    )


def _read_tokenizer(
    folder: Path, *, vocab_size: int, has_parts: bool
) -> tuple[TextTokenizer, ChatTemplate | None, list[int]]:
    """Return the tokenizer, the chat template if there is one, and the end tokens."""
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        if vocab_size in (NUM_BYTES, NUM_BYTES + 1):
            has_end = vocab_size > NUM_BYTES
            return TextTokenizer.of_bytes(with_end=has_end), None, [NUM_BYTES] * has_end
        raise UserError(
            f"{folder} has no tokenizer ({', '.join(TOKENIZER_FILES[:4])}), and its vocabulary of {vocab_size} tokens "
            "is not the byte vocabulary; expected tokenizer files. Copy them from the base model into the folder."
        )
    tokenizer = read_text_tokenizer(folder)
    try:
        options: dict[str, Any] = {"special_tokens": tokenizer.special_tokens, "has_parts": has_parts}
        chat = read_chat_template(folder, today=date.today(), **options)
    except NoChatTemplateError:
        chat = None
    ends = listed_ids(tokenizer.eos_id)
    return tokenizer, chat, ends if chat is None else [*ends, *_turn_end(tokenizer, chat)]


def _turn_end(tokenizer: TextTokenizer, chat: ChatTemplate) -> list[int]:
    """Return the special token with which the template ends an answer, which may differ from the end token of texts."""
    answer = "An answer."
    try:
        text = chat.render([{"role": "user", "content": "A question."}, {"role": "assistant", "content": answer}])
    except UserError:  # a template of other roles
        return []
    end, special = text.rpartition(answer)[2], tokenizer.special_ids()
    # An unknown token is special, too, but not in the text.
    ids = tokenizer.encode_offsets(end).ids
    return [token for token in ids if token in special and (tokenizer.token(token) or "") in end][:1]
