"""Conversion of the user's dataset to a map-style dataset. Errors say how to convert other objects."""

from collections.abc import Iterable, Mapping
from typing import Any

from torch.utils.data import DataLoader

from d9d_dist import UserError
from d9d_loop.data.sample_stream import SampleStream
from d9d_loop.data.samples import Samples


def as_samples(data: Any, argument: str) -> Samples:
    """Return a map-style dataset; a `datasets.Dataset` without a format returns tensors (`with_format("torch")`).

    Other data, which the user passed as `argument`, raise `UserError`.
    """
    if _is_hugging_face(data, "Dataset"):
        return data if data.format["type"] else data.with_format("torch")
    if problem := _problem(data):
        expected = "a dataset with len() and samples by index, such as a list or a torch Dataset"
        raise UserError(f"got {argument} = {_shown(data)}; expected {expected}. {problem}")
    return data


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
