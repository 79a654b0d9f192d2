"""Types of nested trees of tensors: batches, inputs and outputs of stages, and step state.

A tree is a leaf, or a dict, list or tuple of trees, as in `torch.utils._pytree`. Containers registered there work too;
any other object is a leaf. The aliases use `Mapping` and `Sequence`, so that a type checker accepts a `dict[str,
Tensor]` as a `TensorTree`.
"""

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias, TypeVar

from torch import Tensor

_Leaf = TypeVar("_Leaf")

Tree: TypeAlias = _Leaf | Mapping[Any, "Tree[_Leaf]"] | Sequence["Tree[_Leaf]"]
"""Nested tree with leaves of one type."""

TensorTree: TypeAlias = Tree[Tensor]
"""Nested tree of tensors."""

Scalar: TypeAlias = float | bool | str | None
"""Leaf that is not a tensor. Type checkers accept an int as a float."""

ScalarTree: TypeAlias = Tree[Scalar]
"""Nested tree of scalars."""
