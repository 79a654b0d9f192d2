"""Batches of sequences as jagged nested tensors, which verl uses, and as the packed rows of d9d's decoders."""

from collections.abc import Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor

from d9d_loop.data import Document, pack_row

Data: TypeAlias = Mapping[str, Any]
"""Batch: `input_ids` is a jagged nested tensor of sequences; other values are tensors or settings."""


def packed(data: Data, *, multiple: int, number: int) -> dict[str, Any]:
    """Return one row [1, L] of whole sequences, padded to a multiple, with the entry `number`."""
    sequences = data["input_ids"].unbind()
    documents: list[Document] = [  # the last token of a sequence has no label
        {"tokens": torch.cat((each, each[:1])), "mask": torch.arange(len(each) + 1) < len(each)} for each in sequences
    ]
    row = pack_row(documents, -(-sum(map(len, sequences)) // multiple) * multiple)
    return {"number": number, **{name: value.unsqueeze(0) for name, value in row.items()}}


def jagged(values: Tensor, like: Data) -> Tensor:
    """Return a packed row [L] as a nested tensor of the sequences of a batch, without padding."""
    offsets = torch.tensor([0, *map(len, like["input_ids"].unbind())], device=values.device).cumsum(0)
    return torch.nested.nested_tensor_from_jagged(values[: int(offsets[-1])], offsets)


def microbatches(data: Data) -> list[dict[str, Any]]:
    """Split a batch in row order into microbatches of a number of rows, or of at most a number of tokens."""
    starts, tokens = [0], 0
    for row, length in enumerate(map(len, data["input_ids"].unbind())):
        tokens += length
        dynamic = data.get("use_dynamic_bsz")
        size, limit = (
            (tokens, "max_token_len_per_gpu") if dynamic else (row + 1 - starts[-1], "micro_batch_size_per_gpu")
        )
        if size > data[limit] and row > starts[-1]:
            starts, tokens = [*starts, row], length
    slices = [slice(start, end) for start, end in zip(starts, [*starts[1:], None], strict=True)]
    return [{name: rows_of(value, rows) for name, value in data.items()} for rows in slices]


def rows_of(value: Any, rows: slice) -> Any:
    """Return some rows of a tensor; return any other value unchanged."""
    if not isinstance(value, Tensor) or value.dim() == 0:
        return value
    return (
        torch.nested.as_nested_tensor(list(value.unbind()[rows]), layout=torch.jagged)
        if value.is_nested
        else value[rows]
    )
