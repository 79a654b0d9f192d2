"""Pairs of a chosen and a rejected answer for the jobs `dpo` and `reward`: a sample of a batch is a pair.

P: pairs, L: padded length. A batch has `input_ids`, `labels` and `attention_mask` [P, 2, L], 0 for padding.
"""

import logging
from functools import partial
from typing import Any

import torch
from pydantic import JsonValue
from torch import Tensor
from torch.nn.functional import pad

from d9d_dist import UserError
from d9d_loop.data import ChatData, DataProvider, TokenFile
from d9d_loop.data.contents import contents_of
from d9d_loop.data.conversation import read_pair
from d9d_loop.data.packed_stream import IGNORED_LABEL, shifted
from d9d_loop.data.sample_stream import Samples
from d9d_loop.data.token_formats import token_format
from d9d_loop.jobs.job_config import TextJobConfig
from d9d_loop.jobs.text_data import (
    Mapped,
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
    padding = padding_id(config, tokenizer.text_tokenizer)

    def tokenized(samples: Samples) -> Mapped:
        file = tokenized_once(samples, config, tokenizer, pairs=True)
        note_cuts(file, data.length, note, what="pairs")
        is_scored = config.job == "reward"
        margins: JsonValue = file.about.get("margins") if is_scored else None
        convert = partial(_pair, file, margins, is_scored)
        return Mapped(range(len(file) // 2), convert, identity=[contents_of(file), margins])

    train, held_out = tokenized(training), None if evaluation is None else tokenized(evaluation)
    return dataset_of(train, held_out, config, collate=partial(_pad_pairs, padding=padding))


def _pair(file: TokenFile, margins: Any, is_scored: bool, number: int) -> list[dict[str, Tensor]]:
    """Return `input_ids` and `labels` of both answers of a pair, the chosen one first, int64 [n] each; see `shifted`.

    A scored answer has its last token among its inputs, and the margin of its pair as `margins`, float32 [], if the
    file has margins.
    """
    documents = [file[2 * number], file[2 * number + 1]]
    rows = [shifted(document) for document in documents]
    if is_scored:
        for row, document in zip(rows, documents, strict=True):
            row.update(input_ids=document["tokens"], labels=pad(row["labels"], (0, 1), value=IGNORED_LABEL))
            row.update({} if margins is None else {"margins": torch.tensor(margins[number])})
    return rows


def _pad_pairs(pairs: list[list[dict[str, Tensor]]], *, padding: int) -> dict[str, Tensor]:
    """Pad all answers to the longest one; `margins` are [P]."""
    batch = pad_groups(pairs, padding=padding)
    if "margins" in pairs[0][0]:
        batch["margins"] = torch.stack([pair[0]["margins"] for pair in pairs])
    return batch
