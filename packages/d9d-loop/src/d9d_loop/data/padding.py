"""Padding of sequences of different lengths into batches.

B: number of samples, L: padded length.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, final

import torch
from torch import Tensor
from torch.utils.data import default_collate

from d9d_dist import UserError
from d9d_dist.errors import check_choice

Side = Literal["left", "right"]
"""Side of a sequence on which it is padded."""


def pad_sequences(
    sequences: Sequence[Tensor], *, value: float, length: int | None = None, multiple_of: int = 1, side: Side = "right"
) -> Tensor:
    """Pad sequences to equal length and stack them to [B, L, ...]; dtype and device do not change.

    Args:
        sequences: Tensors [n, ...] of the same dtype and device, which differ only in the size n of the first dim.
        value: Padding value.
        length: Length to pad to; by default, the longest sequence.
        multiple_of: L is `length` rounded up to a multiple of this number, as context parallelism, tensor parallelism
            and some kernels require.
        side: Side to pad on.

    Raises:
        UserError: If a sequence is longer than `length`, or the side is unknown.
    """
    check_choice("side", side, Side)
    longest = max(map(len, sequences))
    if length is not None and longest > length:
        raise UserError(f"a sequence of length {longest} is longer than {length}; truncate it, or increase length.")
    padded_length = -(-(longest if length is None else length) // multiple_of) * multiple_of
    batch = sequences[0].new_full((len(sequences), padded_length, *sequences[0].shape[1:]), value)
    for row, sequence in zip(batch, sequences, strict=True):
        place = slice(len(sequence)) if side == "right" else slice(padded_length - len(sequence), None)
        row[place] = sequence
    return batch


@final
@dataclass(frozen=True, slots=True)
class PaddingCollate:
    """Collate function for dictionary samples that contain sequences of different lengths.

    Attributes:
        values: Padding value of each sequence, by key: `{"input_ids": 0, "labels": -100}`. Other keys are collated with
            `default_collate`.
        length: Length to pad to; by default, the longest sequence of a key.
        multiple_of: Padded lengths are rounded up to a multiple of this number.
        mask: Key of an additional bool [B, L] mask, which is False at padding of the first key of `values`. Empty for
            no mask.
    """

    values: Mapping[str, float]
    length: int | None = None
    multiple_of: int = 1
    side: Side = "right"
    mask: str = ""

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
            first = next(iter(self.values))
            ones = [torch.ones(len(sample[first]), dtype=torch.bool) for sample in samples]
            batch[self.mask] = self._pad(ones, value=False)
        return batch

    def _pad(self, sequences: list[Tensor], value: float) -> Tensor:
        return pad_sequences(sequences, value=value, length=self.length, multiple_of=self.multiple_of, side=self.side)
