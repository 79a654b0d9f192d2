"""Source of a job's data: a `DataProvider`, or a plain dataset wrapped by `DatasetProvider`."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import Any, final

from torch import Tensor
from torch.utils.data import DataLoader, default_collate

from d9d_dist import UserError
from d9d_loop.data.indexed_stream import IndexedStream
from d9d_loop.data.sample_stream import Collate, Samples, SampleStream


class DataProvider(ABC):
    """Source of the training and evaluation data of a job, with their collate function.

    Attributes:
        draws: True if reading samples or collating may draw random numbers, as data augmentation does. In this case,
            the generators are seeded from the position of each sample, which takes about 20 microseconds for each.
        epochs: Number of epochs of `training`, if the provider was created with the configured number; `None` if its
            stream sets the number of epochs.
    """

    draws: bool = True
    epochs: int | None = None

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
        samples: The training samples.
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
        self.samples, self._shuffle, self._collate = as_samples(samples, "data"), shuffle, collate
        self.epochs, self.num_samples = epochs, len(self.samples)
        is_plain = evaluation is not None and not isinstance(evaluation, SampleStream)
        self._evaluation = as_samples(evaluation, "evaluation_data") if is_plain else evaluation
        may_draw = type(samples) not in {list, tuple, Tensor} or collate is not default_collate
        self.draws = may_draw if draws is None else draws

    def training(self, *, seed: int) -> SampleStream:
        """Return the samples as an `IndexedStream`. An empty dataset raises `UserError`."""
        if self.num_samples == 0:
            raise UserError("the training data are empty; expected at least one sample. Check the path of the data.")
        return IndexedStream(self.samples, seed=seed, shuffle=self._shuffle, epochs=self.epochs)

    def evaluation(self) -> Samples | SampleStream | None:
        """Return the held-out data, or `None`."""
        return self._evaluation

    def collate(self, samples: list[Any]) -> Any:
        """Collate samples with the `collate` function of the constructor."""
        return self._collate(samples)


def provider_of(
    data: DataProvider | Samples,
    evaluation_data: Samples | SampleStream | None,
    collate: Collate | None,
    *,
    shuffle: bool,
    epochs: int | None,
) -> DataProvider:
    """Return a provider unchanged, or that of a dataset. Arguments that a provider would not use are a `UserError`."""
    if not isinstance(data, DataProvider):
        options: dict[str, Any] = {"evaluation": evaluation_data, "collate": collate or default_collate}
        return DatasetProvider(data, shuffle=shuffle, epochs=epochs, **options)
    if epochs is not None and epochs != data.epochs:
        raise UserError(
            f"epochs = {epochs}, but the data are a {type(data).__name__}, whose stream sets the number of epochs; "
            "expected a dataset. Remove epochs from the configuration, and pass it to the stream."
        )
    if evaluation_data is not None or collate is not None:
        what = "evaluation_data" if evaluation_data is not None else "collate"
        raise UserError(
            f"got {what} together with a {type(data).__name__}; expected it only with a dataset. Override the "
            "corresponding method of the data provider, or pass a dataset."
        )
    return data


def as_samples(data: Any, argument: str) -> Samples:
    """Return a map-style dataset; a `datasets.Dataset` without a format returns tensors (`with_format("torch")`).

    Other data, which the user passed as `argument`, raise `UserError`.
    """
    if _is_hugging_face(data, "Dataset"):
        return data if data.format["type"] else data.with_format("torch")
    check_samples(data, argument)
    return data


def check_samples(data: Any, argument: str) -> None:
    """Raise `UserError` if data, which the user passed as `argument`, are not a map-style dataset."""
    if problem := _problem(data):
        expected = "a dataset with len() and samples by index, such as a list or a torch Dataset"
        raise UserError(f"got {argument} = {_shown(data)}; expected {expected}. {problem}")


def _problem(data: Any) -> str:  # noqa: PLR0911 - one return for each kind
    """Return the remedy for an object that is not a map-style dataset; empty if it is one."""
    if data is None:
        return "Is a return missing in the function that loads it?"
    if isinstance(data, DataLoader):
        return "Pass loader.dataset, and collate=loader.collate_fn: the Trainer batches and shuffles the samples."
    if isinstance(data, SampleStream):
        return "Return the stream from DataProvider.training, and pass the provider."
    if isinstance(data, Mapping):
        keys = ", ".join(map(repr, list(data)[:6]))
        is_splits = _is_hugging_face(data, "DatasetDict") or _is_hugging_face(data, "IterableDatasetDict")
        return f"Choose one of the splits {keys}." if is_splits else f"It has the keys {keys}: pass a list of samples."
    if isinstance(data, str | bytes) or hasattr(data, "__fspath__"):
        return "Read the file first, such as datasets.load_dataset(...), or with d9d_loop.data."
    if hasattr(data, "to_dict") and hasattr(data, "columns"):
        return 'Convert the table: data.to_dict("records").'
    if hasattr(data, "__len__") and hasattr(data, "__getitem__"):
        return ""
    if isinstance(data, Iterable):
        return (
            "Pass list(data) if it fits into memory; otherwise return IteratedStream(lambda epoch: ..., name=...) of "
            "d9d_loop.data from DataProvider.training."
        )
    return "Add the methods __len__ and __getitem__(index)."


def _is_hugging_face(data: Any, name: str) -> bool:
    return any(each.__module__.split(".")[0] == "datasets" and each.__name__ == name for each in type(data).__mro__)


def _shown(data: Any) -> str:
    return repr(data) if data is None or isinstance(data, str) else f"a {type(data).__name__}"
