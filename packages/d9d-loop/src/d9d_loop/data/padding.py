"""Makes batches of samples of different lengths, by padding.

B: samples, L: the longest length, rounded up.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, final

import torch
from torch import Tensor
from torch.utils.data import default_collate

from d9d_dist import UserError

Side = Literal["left", "right"]
"""Where padding goes."""


def pad_sequences(
    sequences: Sequence[Tensor],
    *,
    value: float,
    length: int | None = None,
    multiple_of: int = 1,
    side: Side = "right",
) -> Tensor:
    """Pad sequences to one length.

    Args:
        sequences: Each [n, ...], of one dtype and equal further dims.
        value: What to pad with.
        length: The length L to pad to; by default that of the longest one.
        multiple_of: L is rounded up to a multiple of this, as context and tensor parallelism and kernels like it.
        side: Where padding goes.

    Returns:
        [B, L, ...], of the dtype and on the device of the sequences.

    Raises:
        UserError: If a sequence is longer than `length`.
    """
    longest = max(map(len, sequences))
    if length is not None and longest > length:
        raise UserError(f"a sequence of length {longest} is longer than {length}; cut it, or raise length.")
    padded_length = -(-(longest if length is None else length) // multiple_of) * multiple_of
    batch = sequences[0].new_full((len(sequences), padded_length, *sequences[0].shape[1:]), value)
    for row, sequence in zip(batch, sequences, strict=True):
        place = slice(len(sequence)) if side == "right" else slice(padded_length - len(sequence), None)
        row[place] = sequence
    return batch


@final
@dataclass(frozen=True, slots=True)
class PaddingCollate:
    """A collate function for samples that are dictionaries with sequences of different lengths.

    Attributes:
        values: What to pad with, by the key of each sequence: `{"input_ids": 0, "labels": -100}`. Other keys are
            batched as `default_collate` does.
        length: The length to pad to; by default that of the longest one.
        multiple_of: Lengths are rounded up to a multiple of this.
        side: Where padding goes.
        mask: If not empty, the key of a tensor to add, bool [B, L]: where there is no padding.
    """

    values: Mapping[str, float]
    length: int | None = None
    multiple_of: int = 1
    side: Side = "right"
    mask: str = ""

    def __call__(self, samples: list[Mapping[str, Any]]) -> dict[str, Any]:
        """Make a batch.

        Raises:
            UserError: If a sample has not all keys, or a sequence is too long.
        """
        for sample in samples:
            if missing := sorted(self.values.keys() - sample.keys()):
                raise UserError(
                    f"a sample has no {', '.join(missing)}, only {', '.join(sample)}; expected every key that is to be "
                    "padded. Change the values of the collate function, or the samples."
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
