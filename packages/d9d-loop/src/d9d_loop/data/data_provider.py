"""Source of a job's data: a `DataProvider`, or a plain dataset wrapped by `DatasetProvider`."""

from abc import ABC, abstractmethod
from typing import Any, final

from torch import Tensor
from torch.utils.data import default_collate

from d9d_dist import UserError
from d9d_loop.data.dataset_kinds import as_samples
from d9d_loop.data.indexed_stream import IndexedStream
from d9d_loop.data.sample_stream import SampleStream
from d9d_loop.data.samples import Collate, Samples


class DataProvider(ABC):
    """Source of the training and evaluation data of a job, with their collate function.

    Attributes:
        draws: True if reading samples or collating may draw random numbers, as data augmentation does. In this case,
            the generators are seeded from the position of the samples, which takes tens of microseconds for each
            microbatch.
    """

    draws: bool = True

    @abstractmethod
    def training(self, *, seed: int) -> SampleStream:
        """Return the training data, in the order in which the job reads them.

        Called on every rank, and must return an equal stream on each. `seed` is the seed of the job.
        """

    def evaluation(self) -> Samples | SampleStream | None:
        """Return the held-out data for evaluation, a dataset or a finite stream, or `None`."""
        return None

    def collate(self, samples: list[Any]) -> Any:
        """Collate samples into a batch, which may be any pytree of tensors. May run in a worker process."""
        return default_collate(samples)


@final
class DatasetProvider(DataProvider):
    """Provider of a map-style dataset, read in an order that is a function of the seed and the position.

    Attributes:
        num_samples: Number of training samples.

    Args:
        samples: A dataset with a length. A Hugging Face dataset without a format returns tensors.
        shuffle: If True, shuffle each epoch, in a different order each time.
        epochs: Number of epochs; `None` repeats them without end.
        draws: See `DataProvider`. `None`: False for a list, tuple or tensor with the default `collate`, else True.

    Raises:
        UserError: If `samples` or `evaluation` has no length or cannot be indexed.
    """

    def __init__(
        self,
        samples: Samples,
        *,
        shuffle: bool = True,
        evaluation: Samples | SampleStream | None = None,
        collate: Collate = default_collate,
        epochs: int | None = None,
        draws: bool | None = None,
    ) -> None:
        self._samples, self._shuffle, self._collate = as_samples(samples, "data"), shuffle, collate
        self._epochs, self.num_samples = epochs, len(self._samples)
        is_plain = evaluation is not None and not isinstance(evaluation, SampleStream)
        self._evaluation = as_samples(evaluation, "evaluation_data") if is_plain else evaluation
        may_draw = type(samples) not in {list, tuple, Tensor} or collate is not default_collate
        self.draws = may_draw if draws is None else draws

    def training(self, *, seed: int) -> SampleStream:
        """Return the samples as an `IndexedStream`. An empty dataset raises `UserError`."""
        if self.num_samples == 0:
            raise UserError("the training data are empty; expected at least one sample. Check the path of the data.")
        return IndexedStream(self._samples, seed=seed, shuffle=self._shuffle, epochs=self._epochs)

    def evaluation(self) -> Samples | SampleStream | None:
        """Return the held-out data, or `None`."""
        return self._evaluation

    def collate(self, samples: list[Any]) -> Any:
        """Collate samples with the `collate` function of the constructor."""
        return self._collate(samples)
