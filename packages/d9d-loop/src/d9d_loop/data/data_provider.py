"""Where a job's data come from: a provider, or simply a dataset, which is one with all defaults."""

from abc import ABC, abstractmethod
from typing import Any, final

from torch import Tensor
from torch.utils.data import default_collate

from d9d_dist import UserError
from d9d_loop.batches import Collate, Samples
from d9d_loop.data.indexed_stream import IndexedStream
from d9d_loop.data.sample_stream import SampleStream


class DataProvider(ABC):
    """Makes the training data of a job, its evaluation data, and batches of both.

    Attributes:
        draws: Whether reading samples or making batches may draw random numbers, as augmentations do. They come from
            streams that follow from the samples' positions then, which takes some tens of microseconds for each
            microbatch; data that draw nothing may say so.
    """

    draws: bool = True

    @abstractmethod
    def training(self, *, seed: int) -> SampleStream:
        """The training data in the order in which the job sees them. Called on every rank, and must give all the same.

        Args:
            seed: The seed of the job.
        """

    def evaluation(self) -> Samples | None:
        """Held-out data to evaluate on, if there are any."""
        return None

    def collate(self, samples: list[Any]) -> Any:
        """Make a batch, any pytree of tensors, of a list of samples. May run in a worker process."""
        return default_collate(samples)


@final
class DatasetProvider(DataProvider):
    """A dataset, in an order that is a function of seed and position.

    Lists, tuples and tensors are known to draw no random numbers; of other datasets it is assumed that they may.

    Args:
        samples: The training data.
        shuffle: Whether each epoch has a random order of its own.
        evaluation: Held-out data, if there are any.
        collate: Makes a batch of a list of samples.
    """

    def __init__(
        self,
        samples: Samples,
        *,
        shuffle: bool = True,
        evaluation: Samples | None = None,
        collate: Collate = default_collate,
    ) -> None:
        self._samples, self._shuffle = samples, shuffle
        self._evaluation, self._collate = evaluation, collate
        self.draws = type(samples) not in {list, tuple, Tensor} or collate is not default_collate

    def training(self, *, seed: int) -> SampleStream:
        """The samples, shuffled anew in each epoch if they are at all."""
        if len(self._samples) == 0:
            raise UserError(
                "the training data are empty; expected at least one sample. Check where they are read from."
            )
        return IndexedStream(self._samples, seed=seed, shuffle=self._shuffle)

    def evaluation(self) -> Samples | None:
        """The held-out data."""
        return self._evaluation

    def collate(self, samples: list[Any]) -> Any:
        """Make a batch as told."""
        return self._collate(samples)
