"""Language model of a run's export or of a Hugging Face folder, with its tokenizer, loaded by `transformers`."""

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol, final

import torch

from d9d_dist import UserError
from d9d_dist.install_hint import install_hint
from d9d_loop.data.byte_tokenizer import NUM_BYTES, ByteTokenizer

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")


class TextTokenizer(Protocol):
    """Tokenizer of plain text."""

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of token ids, without special tokens."""
        ...


@final
@dataclass(frozen=True)
class LoadedResult:
    """Language model and tokenizer.

    Attributes:
        model: Model of `transformers`, in evaluation mode.
        tokenizer: Tokenizer of the folder, or `ByteTokenizer`.
        chat: Tokenizer of `transformers` with a chat template; None if there is no template.
        stop_tokens: Token ids that end an answer.
        max_context: Largest number of tokens that the model supports; None if its configuration has no limit.
    """

    folder: Path
    model: Any
    tokenizer: TextTokenizer
    chat: Any | None
    stop_tokens: tuple[int, ...]
    max_context: int | None


def load_result(path: str | Path, *, device: torch.device) -> LoadedResult:
    """Load the model and tokenizer of a run folder, whose export is used, or of a folder in Hugging Face layout.

    A folder without tokenizer is accepted if the vocabulary has 256 tokens, which are bytes, or 257, with an end token.
    Nothing is downloaded. The parameters have the dtype of the files.

    Raises:
        UserError: If the folder has no model, holds only adapters, or has no tokenizer although it needs one.
        ModuleNotFoundError: If `transformers` is not installed.
    """
    folder = find_export(Path(path))
    if find_spec("transformers") is None:
        raise ModuleNotFoundError(
            f"a result is loaded by transformers, which is missing. Install it: "
            f"{install_hint('d9d-loop', 'transformers')}"
        )
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(folder, local_files_only=True)
    text_tokenizer, chat, stops = _read_tokenizer(folder, vocab_size=config.get_text_config().vocab_size)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto", local_files_only=True)
    model.to(device).eval()
    ends = model.generation_config.eos_token_id
    stops += [] if ends is None else [ends] if isinstance(ends, int) else list(ends)
    max_context = getattr(config.get_text_config(), "max_position_embeddings", None)
    return LoadedResult(folder, model, text_tokenizer, chat, tuple(dict.fromkeys(stops)), max_context)


def find_export(path: Path) -> Path:
    """Return the folder with `config.json`: the path itself, or the export of a run folder.

    Raises:
        UserError: If there is no such folder, or the path holds only adapters.
    """
    for folder in (path, path / "export"):
        if (folder / "config.json").is_file():
            return folder
    if (path / "adapter_config.json").is_file():
        raise UserError(
            f"{path} contains adapters without their base model; expected a whole model. Merge them "
            "(d9d_peft.load_adapters, then merge_) and export the model."
        )
    if not path.is_dir():
        raise UserError(f"{path} does not exist; expected the folder of a run or of a model.")
    if (path / "checkpoints").is_dir():
        raise UserError(
            f"{path} is a run without an export; expected {path / 'export' / 'config.json'}. Finish the run with "
            "export enabled and a model that writes config.json (ModelProvider.export_files)."
        )
    raise UserError(
        f"{path} has no config.json; expected a folder in Hugging Face layout, or a run folder with such an export."
    )


def _read_tokenizer(folder: Path, *, vocab_size: int) -> tuple[TextTokenizer, Any | None, list[int]]:
    """Return the text tokenizer, the `transformers` tokenizer if it has a chat template, and the end tokens."""
    if not any((folder / name).is_file() for name in _TOKENIZER_FILES):
        if vocab_size == NUM_BYTES:
            return ByteTokenizer(), None, []
        if vocab_size == ByteTokenizer.vocab_size:
            return ByteTokenizer(), None, [NUM_BYTES]
        raise UserError(
            f"{folder} has no tokenizer ({', '.join(_TOKENIZER_FILES)}), and its vocabulary of {vocab_size} tokens is "
            "not the byte vocabulary; expected tokenizer files. Copy them from the base model into the folder."
        )
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    if (folder / "tokenizer_config.json").is_file():
        tokenizer: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    else:
        tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    ends = [] if tokenizer.eos_token_id is None else [int(tokenizer.eos_token_id)]
    return _PlainText(tokenizer), tokenizer if tokenizer.chat_template else None, ends


@final
class _PlainText:
    """`TextTokenizer` of a tokenizer of `transformers`."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def encode(self, text: str) -> list[int]:
        return list(self._tokenizer(text).input_ids)

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=True))
