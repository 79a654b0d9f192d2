"""Samples from the data files of a job: checked before training, and split into training and held-out samples."""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, final

import torch
from pydantic import JsonValue
from torch.utils.data import Subset

from d9d_dist import UserError
from d9d_loop.data.contents import digest_of
from d9d_loop.data.sample_files import DataFiles, open_samples
from d9d_loop.data.sample_order import SampleOrder
from d9d_loop.data.sample_stream import Samples

_NUM_CHECKED = 50_000
"""Number of samples of a list of files that are checked before training."""


def open_checked(
    paths: Sequence[Path], check: Callable[[Any], object] | None, *, key: str, text_field: str
) -> DataFiles:
    """Open files like `open_samples`, and call `check` with each of the first 50,000 samples.

    If `check` raises `UserError`, the message has the file and the position of the sample in it.
    """
    samples = open_samples(paths, key=key, text_field=text_field)
    if check is None:
        return samples
    for index, sample in enumerate(islice(samples, _NUM_CHECKED)):
        try:
            check(sample)
        except UserError as error:
            raise UserError(f"{samples.place(index)}: {error}") from None
    return samples


def split_samples(samples: Samples, held_out: float, *, key: str) -> tuple[Samples, Samples | None]:
    """Split a dataset into training and held-out samples; `None` if `held_out` is 0.

    The held-out samples are pseudorandom positions, which depend only on the number of samples: a second job, another
    seed and another number of ranks hold out the same ones. An empty part raises `UserError`.
    """
    if not held_out:
        return samples, None
    size, count = len(samples), round(len(samples) * held_out)
    if not 0 < count < size:
        raise UserError(
            f"{key} = {held_out} holds out {count} of {size} samples; expected samples in both parts. Change "
            f"{key}, or set dataset.evaluation_files."
        )
    chosen = sorted(SampleOrder(size, seed=0).take(0, count))
    data: Any = samples  # torch's annotation requires a Dataset, but its code does not
    return Subset(data, _Others(size, chosen)), Subset(data, chosen)


@final
class _Others(Sequence[int]):
    """Indices 0 to `size - 1` without `chosen`, which is sorted. Memory and time at the start grow with `chosen`."""

    def __init__(self, size: int, chosen: Sequence[int]) -> None:
        self._chosen, self._length = chosen, size - len(chosen)
        self._others_before = [index - number for number, index in enumerate(chosen)]

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, position: Any) -> Any:
        if not 0 <= position < self._length:
            raise IndexError(f"sample {position} is out of range: there are {self._length} samples")
        return position + bisect_right(self._others_before, position)

    def contents_digest(self) -> JsonValue:
        """Return the length, and a digest of the held-out indices."""
        return [self._length, digest_of(torch.as_tensor(self._chosen))]
