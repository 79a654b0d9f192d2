"""Pairs of a chosen and a rejected answer for the jobs `dpo` and `reward`: a sample of a batch is a pair.

P: pairs, L: padded length. A batch has `input_ids`, `labels` and `attention_mask` [P, 2, L], 0 for padding.
"""

import logging
from functools import partial
from typing import Any, final

import torch
from pydantic import JsonValue
from torch import Tensor

from d9d_dist import UserError
from d9d_loop.data import ChatData, ChatTokenizer, DataProvider, TokenFile
from d9d_loop.data.contents import contents_of
from d9d_loop.data.conversation import read_pair
from d9d_loop.data.packed_stream import IGNORED_LABEL
from d9d_loop.data.sample_stream import Samples
from d9d_loop.data.token_formats import token_format
from d9d_loop.jobs.job_config import TextJobConfig
from d9d_loop.jobs.text_data import (
    Note,
    chat_tokenizer,
    dataset_of,
    note_cuts,
    note_template,
    pad_groups,
    samples_of,
    tokenized_once,
    without_images,
)
from d9d_loop.jobs.text_model import padding_id

_logger = logging.getLogger(__name__)


def pair_rows(config: TextJobConfig, note: Note = _logger.info) -> DataProvider:
    """Return the pairs of a job, packed if configured.

    Pairs that are not packed are tokenized once, into a cache in `run.folder`. The number of pairs that the length cuts
    is passed to `note`.
    """
    tokenizer, data = chat_tokenizer(config), config.dataset
    found = next((path for path in (*data.files, *data.evaluation_files) if token_format(path, text_field="")), None)
    if found is not None:
        raise UserError(
            f"job = {config.job}, but {found} has tokens; expected samples with chosen and rejected. Set job = sft, or "
            "list the files from which the tokens were written."
        )
    training, evaluation = samples_of(config, partial(without_images, config, read_pair))
    note_template(config, tokenizer, note)
    if data.packing:
        options: dict[str, Any] = {"held_out": evaluation, "too_long": data.too_long, "epochs": config.epochs}
        chosen: dict[str, Any] = {"kind": "pairs", "row_length": data.length, "shuffle": config.data.shuffle}
        return ChatData(training, tokenizer=tokenizer, **options, **chosen)
    pad = padding_id(config, tokenizer.text_tokenizer)
    files = [None if each is None else _tokenized(each, config, tokenizer, note) for each in (training, evaluation)]
    train, held_out = (None if file is None else _PairRows(file, is_scored=config.job == "reward") for file in files)
    assert train is not None
    return dataset_of(train, held_out, config, collate=partial(_pad_pairs, padding=pad))


def _tokenized(samples: Samples, config: TextJobConfig, tokenizer: ChatTokenizer, note: Note) -> TokenFile:
    file = tokenized_once(samples, config, tokenizer, pairs=True)
    note_cuts(file, config.dataset.length, note, what="pairs")
    return file


@final
class _PairRows:
    """Pairs of a token file: `input_ids` and `labels` of both answers, the chosen one first, int64 [n] each.

    Labels are shifted, and -100 outside of the answer. A scored answer has its last token among its inputs, and the
    margin of its pair as `margins`, float32 [], if the file has margins.
    """

    def __init__(self, file: TokenFile, *, is_scored: bool) -> None:
        self._file, self._is_scored = file, is_scored
        self._margins: Any = file.about.get("margins") if is_scored else None

    def __len__(self) -> int:
        return len(self._file) // 2

    def __getitem__(self, index: int) -> list[dict[str, Tensor]]:
        return [self._row(2 * index), self._row(2 * index + 1)]

    def _row(self, number: int) -> dict[str, Tensor]:
        document = self._file[number]
        tokens, mask = document["tokens"], document["mask"]
        labels = tokens[1:].masked_fill(~mask[1:], IGNORED_LABEL)
        if self._is_scored:
            row = {"input_ids": tokens, "labels": torch.cat((labels, labels.new_full((1,), IGNORED_LABEL)))}
            return row if self._margins is None else {**row, "margins": torch.tensor(self._margins[number // 2])}
        return {"input_ids": tokens[:-1], "labels": labels}

    def contents_digest(self) -> JsonValue:
        """Return the contents of the token file."""
        contents = contents_of(self._file)
        return contents if self._margins is None else [contents, self._margins]


def _pad_pairs(pairs: list[list[dict[str, Tensor]]], *, padding: int) -> dict[str, Tensor]:
    """Pad all answers to the longest one; `margins` are [P]."""
    batch = pad_groups(pairs, padding=padding)
    if "margins" in pairs[0][0]:
        batch["margins"] = torch.stack([pair[0]["margins"] for pair in pairs])
    return batch
