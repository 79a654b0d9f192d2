"""Data of jobs on text: tokenized samples, padded to the longest sample of a batch.

B: samples, L: padded length.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias, final

import torch
from pydantic import JsonValue
from torch import Tensor
from torch.utils.data import default_collate

from d9d_dist import UserError
from d9d_loop.data import (
    ChatData,
    ChatTokenizer,
    DataProvider,
    DatasetProvider,
    DocumentStream,
    PackedSamples,
    PackedStream,
    SampleStream,
    TokenFile,
    TokenWindows,
    cached_token_file,
    pad_sequences,
    read_chat_tokenizer,
    read_conversation,
)
from d9d_loop.data.byte_tokenizer import ByteTokenizer
from d9d_loop.data.chat_stream import fit_tokens
from d9d_loop.data.contents import contents_of, sampled_digest
from d9d_loop.data.packed_stream import IGNORED_LABEL
from d9d_loop.data.samples import Collate, Samples
from d9d_loop.data.text_tokens import load_tokenizer
from d9d_loop.jobs.classes import Classes
from d9d_loop.jobs.job_config import TextDataConfig, TextJobConfig
from d9d_loop.jobs.text_files import open_checked, split_samples
from d9d_loop.jobs.text_model import padding_id


@final
class FileTokenizer:
    """Tokenizer of a model folder. `__call__` keeps the special tokens that the tokenizer adds."""

    def __init__(self, folder: Path) -> None:
        file = folder / "tokenizer.json" if folder.is_dir() else folder
        if not file.is_file():
            raise UserError(f"{file} does not exist; expected the tokenizer of the model. Set model.tokenizer.")
        self._tokenizer = load_tokenizer(file)
        self.vocab_size = max(self._tokenizer.get_vocab(with_added_tokens=True).values()) + 1
        self.name = f"tokenizer-{self.vocab_size}"
        self.bos_id = self.eos_id = self.pad_id = None
        if folder.is_dir() and (folder / "tokenizer_config.json").is_file():
            from transformers import AutoTokenizer

            auto: Any = AutoTokenizer.from_pretrained(folder)
            self.bos_id, self.eos_id, self.pad_id = auto.bos_token_id, auto.eos_token_id, auto.pad_token_id
        self.end_id = self.eos_id if self.eos_id is not None else self._tokenizer.token_to_id("<|endoftext|>")

    def __call__(self, text: str) -> list[int]:
        """Return the tokens of a text."""
        return self._tokenizer.encode(text).ids

    def prompt(self, text: str, *, special: bool) -> list[int]:
        """Tokenize a prompt; with `special`, include the tokenizer's special tokens."""
        return self._tokenizer.encode(text, add_special_tokens=special).ids

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of tokens."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=False)


TextTokenizer: TypeAlias = FileTokenizer | ByteTokenizer


def text_tokenizer(config: TextJobConfig) -> TextTokenizer:
    """Return the tokenizer of a job: from the configured folder, or a byte-level tokenizer without a folder."""
    folder = config.model.tokenizer or config.model.folder
    return ByteTokenizer() if folder is None else FileTokenizer(folder)


def dataset_of(
    training: Samples, evaluation: Samples | None, config: TextJobConfig, *, collate: Collate = default_collate
) -> DatasetProvider:
    """Return a data provider of a job's samples. Only the order of the samples is random."""
    options: dict[str, Any] = {"shuffle": config.data.shuffle, "epochs": config.epochs, "draws": False}
    return DatasetProvider(training, evaluation=evaluation, collate=collate, **options)


def _rows(
    training: Samples, evaluation: Samples | None, config: TextJobConfig, convert: Callable[[Any], dict[str, Tensor]]
) -> DatasetProvider:
    """Return a data provider that converts each sample to a row of tokens, of any length, when the sample is read."""
    held_out = None if evaluation is None else _Converted(evaluation, convert)
    pad = partial(_pad, padding=padding_id(config, text_tokenizer(config)))
    return dataset_of(_Converted(training, convert), held_out, config, collate=pad)


def _pad(samples: list[dict[str, Tensor]], *, padding: int) -> dict[str, Tensor]:
    """Pad each row to the longest one. Adds `attention_mask` [B, L], 0 for padding."""
    ids = [sample["input_ids"] for sample in samples]
    batch = {
        "input_ids": pad_sequences(ids, value=padding),
        "attention_mask": pad_sequences([torch.ones_like(row) for row in ids], value=0),
    }
    if samples[0]["labels"].dim():
        batch["labels"] = pad_sequences([sample["labels"] for sample in samples], value=IGNORED_LABEL)
    else:
        batch["labels"] = torch.stack([sample["labels"] for sample in samples])
    return batch


@final
class _Converted:
    def __init__(self, samples: Samples, convert: Callable[[Any], dict[str, Tensor]]) -> None:
        self._samples, self._convert = samples, convert

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return self._convert(self._samples[index])

    def contents_digest(self) -> JsonValue:
        """Return the contents of the samples, and the digest of some converted ones."""
        return [contents_of(self._samples), sampled_digest(self)]


def chat_rows(config: TextJobConfig) -> DataProvider:
    """Return the conversations of a job, packed if configured; only the assistant's turns contribute to the loss."""
    folder = config.model.tokenizer or config.model.folder
    if folder is None:
        raise UserError("job = sft needs a chat template; expected model.folder, or model.tokenizer. Set one of them.")
    tokenizer = read_chat_tokenizer(folder)
    training, evaluation = samples_of(config, read_conversation)
    if config.dataset.packing:
        return ChatData(
            training,
            tokenizer=tokenizer,
            row_length=config.dataset.length,
            held_out=evaluation,
            too_long=config.dataset.too_long,
            shuffle=config.data.shuffle,
            epochs=config.epochs,
        )
    return _rows(training, evaluation, config, partial(_chat_row, tokenizer, config.dataset))


def labeled_rows(config: TextJobConfig) -> tuple[DatasetProvider, Classes]:
    """Return the labeled texts of a job, and its classes. All labels are read once.

    A label is a text: the label 1 of JSON is the label "1" of a CSV file.
    """
    data, field = config.dataset, config.dataset.label_field

    def check(sample: Any) -> None:
        _text(sample, data.text_field)
        _label(sample, field)

    training, evaluation = samples_of(config, check)
    classes = Classes.of(config, {_label(training[index], field) for index in range(len(training))})
    held_out: Samples = [] if evaluation is None else evaluation
    for index in range(len(held_out)):
        classes.number(_label(held_out[index], field))
    convert = partial(_labeled_row, text_tokenizer(config), classes, config.dataset)
    return _rows(training, evaluation, config, convert), classes


def text_windows(config: TextJobConfig) -> DatasetProvider:
    """Return windows of equal length over all texts of a job, tokenized once into a cache in `run.folder`."""
    training, evaluation = _token_files(config)
    length = config.dataset.length
    held_out = None if evaluation is None else TokenWindows(evaluation, length=length)
    return dataset_of(TokenWindows(training, length=length), held_out, config)


@final
class PackedTexts(DataProvider):
    """Texts of a job packed into rows of equal length; longer texts are split without losing tokens."""

    draws = False

    def __init__(self, config: TextJobConfig) -> None:
        self._training, self._evaluation = _token_files(config)
        self._length, self._shuffle, self.epochs = config.dataset.length, config.data.shuffle, config.epochs

    def training(self, *, seed: int) -> SampleStream:
        """Return the packed rows of all epochs."""
        options: dict[str, Any] = {"seed": seed, "shuffle": self._shuffle, "epochs": self.epochs}
        documents = DocumentStream(self._training, max_length=self._length, **options)
        return PackedStream(documents, row_length=self._length, seed=seed)

    def evaluation(self) -> Samples | None:
        """Return the rows of the held-out texts."""
        return None if self._evaluation is None else PackedSamples(self._evaluation, row_length=self._length)


def _token_files(config: TextJobConfig) -> tuple[TokenFile, TokenFile | None]:
    data, tokenizer = config.dataset, text_tokenizer(config)

    def tokenized(samples: Samples) -> TokenFile:
        return cached_token_file(
            [_text(samples[index], data.text_field).encode() for index in range(len(samples))],
            config.run.folder / "tokens",
            tokenize=lambda text: tokenizer(text.decode()),
            name=tokenizer.name,
            vocab_size=tokenizer.vocab_size,
        )

    def tokens_of(paths: Sequence[Path], key: str) -> TokenFile:
        if _is_token_file(paths):
            return _open_tokens(paths, config, key=key)
        return tokenized(open_checked(paths, check, key=key, text_field=data.text_field))

    check = partial(_text, field=data.text_field)
    if data.evaluation_files:
        files = tokens_of(data.evaluation_files, "dataset.evaluation_files")
        return tokens_of(data.files, "dataset.files"), files
    if not _is_token_file(data.files):
        training, evaluation = samples_of(config, check)
        return tokenized(training), None if evaluation is None else tokenized(evaluation)
    if data.held_out:
        raise UserError(
            f"dataset.held_out = {data.held_out}, but {data.files[0]} is a token file, which is not split; expected a "
            "token file for evaluation. Write both with d9d-tokenize --held-out, and set dataset.evaluation_files."
        )
    return tokens_of(data.files, "dataset.files"), None


def _is_token_file(paths: Sequence[Path]) -> bool:
    return any((path / "manifest.json").is_file() for path in paths)


def _open_tokens(paths: Sequence[Path], config: TextJobConfig, *, key: str) -> TokenFile:
    """Open a token file; raise `UserError` if its tokenizer is not that of the model."""
    if len(paths) > 1:
        raise UserError(f"{key} names {len(paths)} token files or more; expected one. Write one token file.")
    file, about = TokenFile(paths[0]), TokenFile(paths[0]).manifest.about
    folder = config.model.tokenizer or config.model.folder
    written = about.get("tokenizer_sha256")
    if written is None:
        return file
    if folder is None:
        found = "the model has no tokenizer"
    elif file.has_masks:  # conversations
        found = "" if read_chat_tokenizer(folder).identity() == written else f"the model has that of {folder}"
    else:
        path = folder / "tokenizer.json" if folder.is_dir() else folder
        is_same = path.is_file() and hashlib.sha256(path.read_bytes()).hexdigest() == written
        found = "" if is_same else f"the model has {path}"
    if found:
        raise UserError(
            f"{key}: {paths[0]} was written with another tokenizer ({about.get('tokenizer', 'of conversations')}), "
            f"and {found}; expected equal tokenizers. Set model.tokenizer to the tokenizer of the token file, or write "
            "the token file again with d9d-tokenize."
        )
    return file


def samples_of(
    config: TextJobConfig, check: Callable[[Any], object] = lambda sample: None
) -> tuple[Samples, Samples | None]:
    """Return the training samples and the held-out samples of a job. `check` raises `UserError` for a bad sample."""
    data = config.dataset
    samples = open_checked(data.files, check, key="dataset.files", text_field=data.text_field)
    if not data.evaluation_files:
        return split_samples(samples, data.held_out, key="dataset.held_out")
    key = "dataset.evaluation_files"
    return samples, open_checked(data.evaluation_files, check, key=key, text_field=data.text_field)


def _field(sample: Mapping[str, Any], field: str) -> Any:
    if field not in sample:
        raise UserError(
            f"a sample has no field {field!r}; it has {', '.join(sample)}. Set dataset.text_field or "
            "dataset.label_field."
        )
    return sample[field]


def _text(sample: Mapping[str, Any], field: str) -> str:
    text = _field(sample, field)
    if not isinstance(text, str):
        raise UserError(
            f"a sample has {field} = {text!r:.60}; expected a text. Correct the sample, or set dataset.text_field."
        )
    return text


def _label(sample: Mapping[str, Any], field: str) -> str:
    label = _field(sample, field)
    if not isinstance(label, str | int) or label == "":
        raise UserError(
            f"a sample has {field} = {label!r:.60}; expected a class, which is a text or an integer. Correct the "
            "sample, or set dataset.label_field."
        )
    return str(label)


def _chat_row(tokenizer: ChatTokenizer, data: TextDataConfig, sample: Any) -> dict[str, Tensor]:
    chat = tokenizer(read_conversation(sample))
    dropped = chat.tokens[:2], [False] * 2
    tokens, mask = fit_tokens(chat, max_length=data.length, too_long=data.too_long) or dropped
    labels = torch.tensor(tokens[1:]).masked_fill(~torch.tensor(mask[1:]), IGNORED_LABEL)
    return {"input_ids": torch.tensor(tokens[:-1]), "labels": labels}


def _labeled_row(tokenizer: TextTokenizer, classes: Classes, data: TextDataConfig, sample: Any) -> dict[str, Tensor]:
    number = classes.number(_label(sample, data.label_field))
    return {"input_ids": fitted_ids(tokenizer, _text(sample, data.text_field), data), "labels": torch.tensor(number)}


def fitted_ids(tokenizer: TextTokenizer, text: str, data: TextDataConfig) -> Tensor:
    """Return at most `data.length` tokens of a text, int64 [n]; a longer text raises `UserError` if so configured."""
    tokens = tokenizer(text)
    if len(tokens) > data.length and data.too_long == "refuse":
        raise UserError(f"a text has {len(tokens)} tokens; expected at most dataset.length = {data.length}.")
    if not tokens:
        raise UserError(
            f"the tokenizer gives no tokens for the text {text!r:.60}; expected at least one. Remove such samples."
        )
    return torch.tensor(tokens[: data.length])
