"""Types for nests of tensors: batches, stages' inputs and outputs, and what else a step carries along.

A tree is a leaf, or a dict, list or tuple of trees, as `torch.utils._pytree` walks them; other containers that are
registered there work too, and every other object is a leaf. The aliases say `Mapping` and `Sequence`, so that a
`dict[str, Tensor]` is a `TensorTree` to a type checker.
"""

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias, TypeVar

from torch import Tensor

_Leaf = TypeVar("_Leaf")

Tree: TypeAlias = _Leaf | Mapping[Any, "Tree[_Leaf]"] | Sequence["Tree[_Leaf]"]
"""A nest of leaves of one kind."""

TensorTree: TypeAlias = Tree[Tensor]
"""A nest of tensors."""

Scalar: TypeAlias = float | bool | str | None
"""What stands beside tensors; an int is a float here."""

ScalarTree: TypeAlias = Tree[Scalar]
"""A nest of plain values."""
