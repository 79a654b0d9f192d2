"""Sample indices of each rank's batches, and the data loader that reads them."""

from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from typing import Any, Protocol

import torch
from torch.utils.data import DataLoader

from d9d_loop.data.sample_order import SampleOrder

Collate = Callable[[list[Any]], Any]
"""Function that builds a batch, a pytree of tensors, from a list of samples."""


class Samples(Sized, Protocol):
    """Map-style dataset with a length, such as a `torch.utils.data.Dataset` or a list."""

    def __getitem__(self, index: int, /) -> Any:
        """Return the sample at an index in `range(len(self))`, the same sample on every call."""
        ...


class TrainBatches:
    """Sample indices of this rank's microbatches, from a given step on.

    Step s covers the positions s * G to (s + 1) * G - 1 of the global order, where G is the global batch size. This
    range does not depend on the number of ranks. Microbatch m of data-parallel rank r covers `microbatch_size`
    consecutive positions of the step, from its position (m * R + r) * microbatch_size on. R is `dp_size`.

    Args:
        order: Global order of the samples.
        first_step: First step, counted from 0.
        num_steps: End of the range of steps, exclusive.
        num_microbatches: Number of microbatches of each rank in a step.
        microbatch_size: Number of samples of a microbatch.
        dp_rank: Data-parallel rank.
        dp_size: Number of data-parallel ranks.
    """

    def __init__(
        self,
        order: SampleOrder,
        *,
        first_step: int,
        num_steps: int,
        num_microbatches: int,
        microbatch_size: int,
        dp_rank: int,
        dp_size: int,
    ) -> None:
        self._order = order
        self._steps = range(first_step, num_steps)
        self._num_microbatches = num_microbatches
        self._microbatch_size = microbatch_size
        self._dp_rank, self._dp_size = dp_rank, dp_size

    def __iter__(self) -> Iterator[list[int]]:
        """Yield the sample indices of each microbatch."""
        size = self._microbatch_size
        for step in self._steps:
            for microbatch in range(self._num_microbatches):
                cell = (step * self._num_microbatches + microbatch) * self._dp_size + self._dp_rank
                yield [self._order[position] for position in range(cell * size, (cell + 1) * size)]


class EvaluationBatches:
    """Sample indices of this rank's evaluation batches: one pass over evenly spaced samples of the dataset.

    Every rank gets the same number of batches, because all ranks take part in the collectives of each batch. A rank
    with fewer samples gets padding batches at the end, whose outputs must be ignored.

    Args:
        data_size: Number of samples in the dataset.
        num_samples: Number of samples to use, at most `data_size`.
        batch_size: Number of samples of a batch on one rank.
        dp_rank: Data-parallel rank.
        dp_size: Number of data-parallel ranks.
    """

    def __init__(self, *, data_size: int, num_samples: int, batch_size: int, dp_rank: int, dp_size: int) -> None:
        chosen = [number * data_size // num_samples for number in range(num_samples)]
        batches = [chosen[start : start + batch_size] for start in range(0, num_samples, batch_size)]
        self._batches = batches[dp_rank::dp_size]
        self._num_batches = -(-len(batches) // dp_size)

    @property
    def num_real(self) -> int:
        """Number of batches before the padding batches."""
        return len(self._batches)

    def __iter__(self) -> Iterator[list[int]]:
        """Yield the sample indices of each batch; a padding batch holds sample 0."""
        yield from self._batches
        for _ in range(self._num_batches - len(self._batches)):
            yield [0]


def batch_loader(
    samples: Samples, batches: Iterable[list[int]], *, collate: Collate, num_workers: int, pin_memory: bool
) -> DataLoader[Any]:
    """Return a loader that reads the given batches in order, in `num_workers` processes or, if 0, in this process.

    Batches in pinned memory can be copied to an accelerator without host-device synchronization.
    """
    return DataLoader(
        samples,  # ty: ignore[invalid-argument-type]  (the loader only reads samples by index)
        batch_sampler=_as_sequence(batches),
        collate_fn=collate,
        num_workers=num_workers,
        pin_memory=pin_memory,
        # Without its own generator, the loader draws from the global generator, and a resumed job would differ.
        generator=torch.Generator().manual_seed(0),
    )


def _as_sequence(batches: Iterable[list[int]]) -> Sequence[list[int]]:
    return batches  # ty: ignore[invalid-explicit-return]  (the loader only iterates over it)
