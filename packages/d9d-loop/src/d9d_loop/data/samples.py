"""Types of datasets and collate functions."""

from collections.abc import Callable, Sized
from typing import Any, Protocol

Collate = Callable[[list[Any]], Any]
"""Function that builds a batch, a pytree of tensors, from a list of samples."""


class Samples(Sized, Protocol):
    """Map-style dataset with a length, such as a `torch.utils.data.Dataset` or a list."""

    def __getitem__(self, index: int, /) -> Any:
        """Return the sample at an index in `range(len(self))`, the same sample on every call."""
        ...
