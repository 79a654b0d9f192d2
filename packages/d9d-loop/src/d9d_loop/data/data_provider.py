"""Where a job's data come from: a provider, or simply a dataset, which is one with all defaults."""

from abc import ABC, abstractmethod
from typing import Any, final

from torch.utils.data import default_collate

from d9d_loop.batches import Samples
from d9d_loop.data.indexed_stream import IndexedStream
from d9d_loop.data.sample_stream import SampleStream


class DataProvider(ABC):
    """Makes the training data of a job, its evaluation data, and batches of both."""

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

    Args:
        samples: The training data.
        shuffle: Whether each epoch has a random order of its own.
    """

    def __init__(self, samples: Samples, *, shuffle: bool = True) -> None:
        self._samples, self._shuffle = samples, shuffle

    def training(self, *, seed: int) -> SampleStream:
        """The samples, shuffled anew in each epoch if they are at all."""
        return IndexedStream(self._samples, seed=seed, shuffle=self._shuffle)
