"""Padding of sequences of different lengths into batches.

B: number of samples, L: padded length.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from multiprocessing import current_process
from typing import Any, Literal, final

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import default_collate

from d9d_dist import UserError
from d9d_dist.errors import check_choice

WORKER_NAME = "d9d-data"
"""Begin of the names of the processes of `WorkerPool`."""

Side = Literal["left", "right"]
"""Side of a sequence on which it is padded."""


@final
@dataclass(frozen=True, slots=True)
class PaddingCollate:
    """Collate function for dictionary samples that contain sequences [n, ...] of different lengths n.

    Attributes:
        values: Padding value of each sequence, by key: `{"input_ids": 0, "labels": -100}`. Other keys are collated with
            `default_collate`.
        length: Length to pad to; by default, the longest sequence of a key.
        multiple_of: Padded lengths are rounded up to a multiple of this number, as some kernels require.
        side: Side to pad on.
        mask: Key of an additional bool [B, L] mask, which is False at padding of the first key of `values`. Empty for
            no mask.

    Raises:
        UserError: If the side is unknown.
    """

    values: Mapping[str, float]
    length: int | None = None
    multiple_of: int = 1
    side: Side = "right"
    mask: str = ""

    def __post_init__(self) -> None:
        check_choice("side", self.side, Side)

    def __call__(self, samples: list[Mapping[str, Any]]) -> dict[str, Any]:
        """Collate samples. Raise `UserError` if a sample lacks a key of `values`, or a sequence exceeds `length`."""
        for sample in samples:
            if missing := sorted(self.values.keys() - sample.keys()):
                raise UserError(
                    f"a sample lacks the keys {', '.join(missing)}; it has {', '.join(sample)}. Each key in `values` "
                    "must be in every sample. Correct `values` or the samples."
                )
        others = [key for key in samples[0] if key not in self.values]
        batch: dict[str, Any] = default_collate([{key: sample[key] for key in others} for sample in samples])
        for key, value in self.values.items():
            batch[key] = self._pad([torch.as_tensor(sample[key]) for sample in samples], value)
        if self.mask:
            ones = [torch.ones(len(sample[next(iter(self.values))]), dtype=torch.bool) for sample in samples]
            batch[self.mask] = self._pad(ones, value=False)
        return batch

    def _pad(self, sequences: list[Tensor], value: float) -> Tensor:
        longest = max(map(len, sequences))
        length = longest if self.length is None else self.length
        if longest > length:
            raise UserError(f"a sequence of length {longest} is longer than {length}; truncate it, or increase length.")
        padded = pad_sequence(sequences, batch_first=True, padding_value=value, padding_side=self.side)
        num_added = length + -length % self.multiple_of - longest
        sides = (0, num_added) if self.side == "right" else (num_added, 0)
        return F.pad(padded, (*[0, 0] * (padded.dim() - 2), *sides), value=value)


def join_batches(parts: list[dict[str, Tensor]], row_values: Mapping[str, float]) -> dict[str, Tensor]:
    """Join batches along their first dim, and pad the others to equal sizes. Frees the tensors of several `parts`.

    A part may lack a tensor; one of `row_values`, the padding values of tensors [B, L], is then padding. Others are
    padded with 0. In a worker process, the results are in shared memory: sending them copies nothing.
    """
    if len(parts) == 1:
        return parts[0]
    joined: dict[str, Tensor] = {}
    names = dict.fromkeys(name for part in parts for name in part)
    for part in parts:
        for name in names.keys() & row_values.keys():
            part.setdefault(name, torch.full_like(part["input_ids"], row_values[name]))
    for name in names:
        found = [part.pop(name) for part in parts if name in part]
        sizes = [max(each) for each in zip(*(each.shape[1:] for each in found), strict=True)]
        out = _new_tensor((sum(map(len, found)), *sizes), found[0].dtype)
        if any(list(each.shape[1:]) != sizes for each in found):
            out.fill_(row_values.get(name, 0))
        start = 0
        while found:
            part = found.pop(0)
            out[(slice(start, start + len(part)), *map(slice, part.shape[1:]))] = part
            start += len(part)
        joined[name] = out
    return joined


def _new_tensor(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return a new tensor without values, in a worker process in shared memory."""
    if not current_process().name.startswith(WORKER_NAME) or not prod(shape):
        return torch.empty(shape, dtype=dtype)
    storage = torch.UntypedStorage._new_shared(prod(shape) * dtype.itemsize)
    return torch.empty(0, dtype=dtype).set_(storage, 0, torch.Size(shape))  # ty: ignore[no-matching-overload]
