"""Base class of providers of packed rows: all epochs for training, and one pass over the held-out samples."""

from abc import abstractmethod
from typing import Any

from d9d_loop.data.data_provider import DataProvider
from d9d_loop.data.sample_stream import SampleStream


class PackedProvider(DataProvider):
    """Provider of streams of packed rows, of which only the order is random.

    The held-out samples are shuffled, with the same seed in every job: the first rows are a pseudorandom subset.
    """

    draws = False

    def __init__(self, training: Any, evaluation: Any | None, *, shuffle: bool, epochs: int | None) -> None:
        self._training, self._evaluation = training, evaluation
        self._shuffle, self.epochs = shuffle, epochs

    @abstractmethod
    def _rows(self, samples: Any, *, seed: int, shuffle: bool, epochs: int | None) -> SampleStream:
        """Return the stream of packed rows of the training or held-out samples."""

    def training(self, *, seed: int) -> SampleStream:
        """Return the packed rows of all epochs."""
        return self._rows(self._training, seed=seed, shuffle=self._shuffle, epochs=self.epochs)

    def evaluation(self) -> SampleStream | None:
        """Return the packed rows of one epoch of the held-out samples, or `None`."""
        return None if self._evaluation is None else self._rows(self._evaluation, seed=0, shuffle=True, epochs=1)
