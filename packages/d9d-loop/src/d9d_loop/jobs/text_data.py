"""Data of jobs on text: tokenized samples, padded to the longest sample of a batch.

B: samples, L: padded length.
"""

import hashlib
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias, TypeVar, final

import torch
from pydantic import JsonValue
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import default_collate

from d9d_dist import UserError
from d9d_loop.data import (
    ChatTokenizer,
    DataProvider,
    DatasetProvider,
    DocumentStream,
    PackedStream,
    SampleStream,
    TokenFile,
    TokenWindows,
    open_tokens,
    read_chat_tokenizer,
    read_conversation,
    tokenize_chats,
    tokenize_text,
)
from d9d_loop.data.contents import contents_of, sampled_digest
from d9d_loop.data.conversation import read_margin, read_pair
from d9d_loop.data.image_chat import has_media
from d9d_loop.data.packed_provider import PackedProvider
from d9d_loop.data.packed_stream import IGNORED_LABEL, shifted
from d9d_loop.data.sample_files import DataFiles
from d9d_loop.data.sample_stream import Collate, Samples
from d9d_loop.data.stored_tokens import TokenDocuments
from d9d_loop.data.text_tokenizer import TextTokenizer, read_text_tokenizer
from d9d_loop.data.text_tokens import end_token_id
from d9d_loop.data.token_file_writer import open_or_write
from d9d_loop.data.token_formats import token_format
from d9d_loop.jobs.classes import Classes
from d9d_loop.jobs.job_config import TextDataConfig, TextJobConfig
from d9d_loop.jobs.text_files import open_checked, split_samples
from d9d_loop.jobs.text_model import padding_id
from d9d_loop.jobs.text_tasks import POSITIONS, label_positions

_T = TypeVar("_T")

_logger = logging.getLogger(__name__)

Note: TypeAlias = Callable[[str], object]
"""Function that tells the user what happens to the data, in one sentence."""


def text_tokenizer(config: TextJobConfig) -> TextTokenizer:
    """Return the tokenizer of a job: from the configured folder, or a byte-level tokenizer without a folder."""
    folder = config.model.tokenizer or config.model.folder
    return TextTokenizer.of_bytes() if folder is None else read_text_tokenizer(folder)


def chat_tokenizer(config: TextJobConfig) -> ChatTokenizer:
    """Return the tokenizer and chat template of a job."""
    folder = config.model.tokenizer or config.model.folder
    if folder is None:
        raise UserError(
            f"job = {config.job} needs a chat template; expected model.folder, or model.tokenizer. Set one of them."
        )
    data = config.dataset
    options: dict[str, Any] = {"today": data.date, "labels": data.labels, "text_pairs": data.text_pairs}
    return read_chat_tokenizer(folder, has_parts=config.job == "vision", **options)


def dataset_of(
    training: Samples, evaluation: Samples | None, config: TextJobConfig, *, collate: Collate = default_collate
) -> DatasetProvider:
    """Return a data provider of a job's samples. Only the order of the samples is random."""
    options: dict[str, Any] = {"shuffle": config.data.shuffle, "epochs": config.epochs, "draws": False}
    return DatasetProvider(training, evaluation=evaluation, collate=collate, **options)


def pad_rows(samples: list[dict[str, Tensor]], *, padding: int) -> dict[str, Tensor]:
    """Pad each row to the longest one; rows may have no labels.

    Adds `attention_mask` [B, L], 0 for padding, and `label_positions` [B, K] for labels of tokens.
    """
    ids = [sample["input_ids"] for sample in samples]
    batch = {
        "input_ids": pad_sequence(ids, batch_first=True, padding_value=padding),
        "attention_mask": pad_sequence([torch.ones_like(row) for row in ids], batch_first=True),
    }
    labels = [sample["labels"] for sample in samples if "labels" in sample]
    if labels and labels[0].dim():
        batch["labels"] = pad_sequence(labels, batch_first=True, padding_value=IGNORED_LABEL)
        batch[POSITIONS] = label_positions(batch["labels"])
    elif labels:
        batch["labels"] = torch.stack(labels)
    return batch


def pad_groups(groups: list[list[dict[str, Tensor]]], *, padding: int) -> dict[str, Tensor]:
    """Pad the rows of groups of equal size as `pad_rows` does; values are [groups, rows of a group, L]."""
    rows = pad_rows([row for group in groups for row in group], padding=padding)
    return {name: values.unflatten(0, (len(groups), -1)) for name, values in rows.items()}


@final
class Mapped:
    """Samples of a dataset, which `convert` converts when they are read. `identity` is that of the conversion."""

    def __init__(self, samples: Samples, convert: Callable[[Any], Any], identity: JsonValue = None) -> None:
        self._samples, self._convert, self._identity = samples, convert, identity

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int) -> Any:
        return self._convert(self._samples[index])

    def contents_digest(self) -> JsonValue:
        """Return the identity of the conversion, the contents of the samples, and the digest of some converted ones."""
        return [self._identity, contents_of(self._samples), sampled_digest(self)]


def cache_folder(config: TextJobConfig, kind: str, *, settings: str, samples: Iterable[str]) -> Path:
    """Return a folder in `run.folder`, named for `kind` and a digest of the settings and samples that are cached."""
    digest = hashlib.sha256(settings.encode())
    for sample in samples:
        digest.update(hashlib.sha256(sample.encode()).digest())
    return config.run.folder / "tokens" / f"{kind}-{digest.hexdigest()[:16]}"


def tokenized_once(
    samples: Samples, config: TextJobConfig, tokenizer: ChatTokenizer, *, pairs: bool = False
) -> TokenFile:
    """Tokenize conversations, or pairs of answers, into a cache in `run.folder`, and open it."""
    if config.dataset.length < 2:
        raise UserError(f"dataset.length = {config.dataset.length}; expected at least 2 tokens of a conversation.")
    options: dict[str, Any] = {"max_length": config.dataset.length - 1, "too_long": config.dataset.too_long}

    def text(sample: Any) -> str:
        found = without_images(config, read_pair if pairs else read_conversation, sample)
        chats = [chat.to_json() for chat in (found if isinstance(found, tuple) else (found,))]
        return f"{chats} {read_margin(sample) if pairs else ''}"

    texts, settings = (text(samples[index]) for index in range(len(samples))), f"{tokenizer.identity()} {options}"
    folder = cache_folder(config, "pairs" if pairs else "chats", settings=settings, samples=texts)
    chats = (samples[index] for index in range(len(samples)))
    return open_or_write(folder, lambda: tokenize_chats(chats, folder, tokenizer=tokenizer, pairs=pairs, **options))


def chat_rows(config: TextJobConfig, note: Note = _logger.info) -> DataProvider:
    """Return the conversations of a job, packed if configured; only the assistant's turns contribute to the loss.

    All conversations are tokenized once, into a cache in `run.folder`. The number of conversations that the length cuts
    is passed to `note`, and the date that the template prints.
    """
    tokenizer, data = chat_tokenizer(config), config.dataset
    check = partial(without_images, config, read_conversation)
    tokenized = partial(tokenized_once, config=config, tokenizer=tokenizer)
    training, evaluation = _token_files(config, tokenizer, tokenized, check=check)
    for key, file in (("dataset.files", training), ("dataset.evaluation_files", evaluation)):
        if file is not None:
            _check_chats(file, data.length, key=key)
            note_cuts(file, data.length, note, what="conversations")
    note_template(config, tokenizer, note)
    pad = padding_id(config, tokenizer.text_tokenizer)
    if data.packing:
        return PackedTexts(config, training, evaluation, pad=pad)
    held_out = None if evaluation is None else Mapped(evaluation, shifted)
    return dataset_of(Mapped(training, shifted), held_out, config, collate=partial(pad_rows, padding=pad))


def without_images(config: TextJobConfig, read: Callable[[Any], _T], sample: Any) -> _T:
    """Read a sample; raise `UserError` if it is invalid, or has media, which a model of texts would not see."""
    found = read(sample)
    if has_media(sample):
        raise UserError(
            f"a sample has images, video or audio, but job = {config.job} trains on texts; expected job = vision, or "
            "dpo without packing, with a model that AutoModelForImageTextToText loads. Choose these, or remove media."
        )
    return found


def note_template(config: TextJobConfig, tokenizer: ChatTokenizer, note: Note) -> None:
    """Tell the user which date the chat template prints, if it does."""
    if tokenizer.prints_date:
        note(f"the chat template prints {config.dataset.date} as the date of today (dataset.date).")


def _check_chats(file: TokenDocuments, length: int, *, key: str) -> None:
    """Raise `UserError` if a token file is not one of conversations of at most `length` tokens."""
    if not file.has_masks:
        raise UserError("job = sft: the token file has no loss masks. Write it with d9d-tokenize --chat.")
    longest = max(stop - start for start, stop in map(file.bounds, range(len(file))))
    if longest > length:
        raise UserError(
            f"{key} has a conversation of {longest} tokens; expected at most dataset.length = {length}. Increase the "
            f"length, or write the token file with d9d-tokenize --max-length {length}."
        )


def note_cuts(file: TokenDocuments, length: int, note: Note, *, what: str) -> None:
    """Tell the user how many samples of a token file the length drops or truncates, if any."""
    about = file.about
    if about.get("dropped", 0) != 0 or about.get("cut", 0) != 0:
        note(
            f"of {about['read']} {what}, {about['dropped']} are dropped, because they have no label within "
            f"{length} tokens, and {about['cut']} are truncated. Increase dataset.length to keep them."
        )


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
    tokenizer = text_tokenizer(config)
    convert = partial(_labeled_row, tokenizer, classes, config.dataset)
    rows = partial(Mapped, convert=convert, identity=tokenizer.identity())
    pad = partial(pad_rows, padding=padding_id(config, tokenizer))
    return dataset_of(rows(training), None if evaluation is None else rows(held_out), config, collate=pad), classes


def text_windows(config: TextJobConfig, note: Note = _logger.info) -> DatasetProvider:
    """Return windows of equal length over all texts of a job, tokenized once into a cache in `run.folder`."""
    training, evaluation = _text_files(config, text_tokenizer(config), note)
    for key, file in (("dataset.files", training), ("dataset.evaluation_files", evaluation)):
        if file is not None and file.has_masks:
            raise UserError(
                f"job = pretrain: {key} has loss masks of conversations; expected a token file of texts. Set job = "
                "sft, or dataset.packing = true, which uses the masks."
            )
    length = config.dataset.length
    held_out = None if evaluation is None else TokenWindows(evaluation, length=length)
    return dataset_of(TokenWindows(training, length=length), held_out, config)


def packed_texts(config: TextJobConfig, note: Note = _logger.info) -> DataProvider:
    """Return texts packed into rows of equal length, tokenized as for `text_windows`."""
    tokenizer = text_tokenizer(config)
    return PackedTexts(config, *_text_files(config, tokenizer, note), pad=padding_id(config, tokenizer))


@final
class PackedTexts(PackedProvider):
    """Documents of token files packed into rows of equal length; longer texts are split without losing tokens."""

    def __init__(
        self, config: TextJobConfig, training: TokenDocuments, evaluation: TokenDocuments | None, *, pad: int
    ) -> None:
        super().__init__(training, evaluation, shuffle=config.data.shuffle, epochs=config.epochs)
        self._length, self._pad = config.dataset.length, pad

    def _rows(self, samples: TokenDocuments, *, seed: int, **options: Any) -> SampleStream:
        documents = DocumentStream(samples, max_length=self._length, seed=seed, **options)
        return PackedStream(documents, row_length=self._length, seed=seed, pad_token=self._pad)


def _text_files(
    config: TextJobConfig, tokenizer: TextTokenizer, note: Note
) -> tuple[TokenDocuments, TokenDocuments | None]:
    """Return the token files of a pretraining job, for training and for evaluation."""
    data = config.dataset
    end = data.end_token
    end_token_id(tokenizer, end, key="dataset.end_token")
    if end is None and not tokenizer.encode("") and not _is_tokens(data.files, data.text_field):
        note(
            "no token separates the texts, so the model does not learn where one ends. Set dataset.end_token to add it."
        )

    def tokenized(samples: Samples) -> TokenDocuments:
        def texts() -> Iterator[str]:  # without empty texts, as d9d-tokenize writes them
            return filter(None, (_text(samples[index], data.text_field) for index in range(len(samples))))

        folder = cache_folder(config, "texts", settings=f"{tokenizer.identity()} {end}", samples=texts())
        return open_or_write(folder, lambda: tokenize_text(texts(), folder, tokenizer=tokenizer, end_token=end))

    return _token_files(config, tokenizer, tokenized, check=partial(_text, field=data.text_field))


def _token_files(
    config: TextJobConfig,
    tokenizer: TextTokenizer | ChatTokenizer,
    tokenized: Callable[[Samples], TokenDocuments],
    *,
    check: Callable[[Any], object],
) -> tuple[TokenDocuments, TokenDocuments | None]:
    """Return the token files of a job, for training and for evaluation: as configured, or `tokenized` samples."""
    data = config.dataset

    def tokens_of(paths: Sequence[Path], key: str) -> TokenDocuments:
        if _is_tokens(paths, data.text_field):
            return _open_tokens(paths, tokenizer, data.end_token, key=key)
        return tokenized(open_checked(paths, check, key=key, text_field=data.text_field))

    if data.evaluation_files:
        files = tokens_of(data.evaluation_files, "dataset.evaluation_files")
        return tokens_of(data.files, "dataset.files"), files
    if not _is_tokens(data.files, data.text_field):
        training, evaluation = samples_of(config, check)
        return tokenized(training), None if evaluation is None else tokenized(evaluation)
    if data.held_out:
        raise UserError(
            f"dataset.held_out = {data.held_out}, but {data.files[0]} has tokens, which are not split; expected "
            "tokens for evaluation. Write both with d9d-tokenize --held-out, and set dataset.evaluation_files."
        )
    return tokens_of(data.files, "dataset.files"), None


def _is_tokens(paths: Sequence[Path], text_field: str) -> bool:
    return any(token_format(path, text_field=text_field) is not None for path in paths)


def _open_tokens(
    paths: Sequence[Path], tokenizer: TextTokenizer | ChatTokenizer, end_token: str | None, *, key: str
) -> TokenDocuments:
    """Open tokens; raise `UserError` if their tokenizer or end token is not that of the job."""
    try:
        file = open_tokens(paths, vocab_size=tokenizer.vocab_size)
    except UserError as error:
        raise UserError(f"{key}: {error}") from None
    written = file.about.get("end_token", end_token)
    if end_token is not None and written != end_token:
        raise UserError(
            f"dataset.end_token = {end_token!r}, but {key}: {paths[0]} was written "
            f"{'without an end token' if written is None else f'with --end-token {written!r}'}; expected the same one. "
            "Remove dataset.end_token, or write the token file again."
        )
    kind = "chat_identity" if isinstance(tokenizer, ChatTokenizer) else "tokenizer_identity"
    if file.about.get(kind, tokenizer.identity()) != tokenizer.identity():
        raise UserError(
            f"{key}: {paths[0]} was written with another tokenizer"
            f"{' or another chat template' if isinstance(tokenizer, ChatTokenizer) else ''}; expected that of the job. "
            "Set model.tokenizer to the tokenizer of the token file, or write it again with d9d-tokenize."
        )
    return file


def samples_of(
    config: TextJobConfig,
    check: Callable[[Any], object] | None = None,
    *,
    wrap: Callable[[DataFiles], Samples] = lambda samples: samples,
) -> tuple[Samples, Samples | None]:
    """Return the training samples and the held-out samples of a job. `check` raises `UserError` for a bad sample.

    `wrap` converts the samples of a list of files before they are split.
    """
    data = config.dataset
    samples = wrap(open_checked(data.files, check, key="dataset.files", text_field=data.text_field))
    if not data.evaluation_files:
        return split_samples(samples, data.held_out, key="dataset.held_out")
    key = "dataset.evaluation_files"
    return samples, wrap(open_checked(data.evaluation_files, check, key=key, text_field=data.text_field))


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


def _labeled_row(tokenizer: TextTokenizer, classes: Classes, data: TextDataConfig, sample: Any) -> dict[str, Tensor]:
    number = classes.number(_label(sample, data.label_field))
    return {"input_ids": fitted_ids(tokenizer, _text(sample, data.text_field), data), "labels": torch.tensor(number)}


def fitted_ids(tokenizer: TextTokenizer, text: str, data: TextDataConfig) -> Tensor:
    """Return at most `data.length` tokens of a text, int64 [n]. A cut keeps the special tokens at both ends.

    Raises:
        UserError: If the text has no tokens, or is longer and `data.too_long` is `refuse`.
    """
    tokens = tokenizer.encode(text)
    if not tokens:
        raise UserError(
            f"the tokenizer gives no tokens for the text {text!r:.60}; expected at least one. Remove such samples."
        )
    if len(tokens) > data.length:
        if data.too_long == "refuse":
            raise UserError(f"a text has {len(tokens)} tokens; expected at most dataset.length = {data.length}.")
        tokens = tokenizer.encode_cut(text, data.length)
    return torch.tensor(tokens)
