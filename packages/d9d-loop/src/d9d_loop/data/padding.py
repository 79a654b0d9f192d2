"""Padding of sequences of different lengths into batches.

B: number of samples, L: padded length.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, final

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import default_collate

from d9d_dist import UserError
from d9d_dist.errors import check_choice

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
