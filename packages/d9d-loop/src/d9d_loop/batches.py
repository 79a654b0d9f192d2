"""Which samples a rank sees in which microbatch, and the loaders that read them."""

from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from typing import Any, Protocol

import torch
from torch.utils.data import DataLoader

from d9d_loop.sample_order import SampleOrder

Collate = Callable[[list[Any]], Any]
"""Makes a batch, any pytree of tensors, of a list of samples."""


class Samples(Sized, Protocol):
    """Data with a length whose samples are read by index: a `torch.utils.data.Dataset`, a list, anything alike."""

    def __getitem__(self, index: int, /) -> Any:
        """The sample at an index in `range(len(self))`; the same one on every call."""
        ...


class TrainBatches:
    """The samples of each microbatch of this rank, from a step on.

    Step s takes the positions s * G to (s + 1) * G of the global order, whatever the number of ranks; microbatch m of
    data-parallel rank r takes the consecutive `microbatch_size` of them that start at (m * R + r) * microbatch_size.

    Args:
        order: The global order of samples.
        first_step: The step to begin with.
        num_steps: The step to end before.
        num_microbatches: Microbatches of each rank in a step.
        microbatch_size: Samples of a microbatch.
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
        """The sample indices of one microbatch after the other."""
        size = self._microbatch_size
        for step in self._steps:
            for microbatch in range(self._num_microbatches):
                cell = (step * self._num_microbatches + microbatch) * self._dp_size + self._dp_rank
                yield [self._order[position] for position in range(cell * size, (cell + 1) * size)]


class EvaluationBatches:
    """Goes once through samples of the data, evenly spaced, shared out so that every rank has equally many batches.

    Ranks must take part in each other's collectives, so a rank that runs out of samples gets a batch to ignore.

    Args:
        data_size: Number of samples of the data.
        num_samples: Number of samples to use, at most `data_size`.
        batch_size: Samples of a batch on one rank.
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
        """How many batches at the front count; those after them only keep this rank in step."""
        return len(self._batches)

    def __iter__(self) -> Iterator[list[int]]:
        """The sample indices of one batch after the other."""
        yield from self._batches
        for _ in range(self._num_batches - len(self._batches)):
            yield [0]


def batch_loader(
    samples: Samples, batches: Iterable[list[int]], *, collate: Collate, num_workers: int, pin_memory: bool
) -> DataLoader[Any]:
    """A loader that reads the given batches in order, in worker processes if there are any.

    Batches in pinned memory can be copied to an accelerator without the host waiting for it.
    """
    return DataLoader(
        samples,  # ty: ignore[invalid-argument-type]  (reads by index: all that a map-style loader does)
        batch_sampler=_as_sequence(batches),
        collate_fn=collate,
        num_workers=num_workers,
        pin_memory=pin_memory,
        # Without one of its own, a loader draws from the global generator, and a resumed job would differ.
        generator=torch.Generator().manual_seed(0),
    )


def _as_sequence(batches: Iterable[list[int]]) -> Sequence[list[int]]:
    return batches  # ty: ignore[invalid-explicit-return]  (a loader only iterates over it)
