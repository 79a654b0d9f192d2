"""Metadata of the messages between pipeline ranks: sent once per kind of message, then cached on both ranks."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Self, final

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from d9d_dist import UserError


@final
class Leaf(NamedTuple):
    shape: tuple[int, ...]
    dtype: torch.dtype
    needs_gradient: bool


@final
@dataclass(frozen=True, slots=True)
class Description:
    """Metadata of a message: the leaves, and their tree structure; `tree` is None for a flat list."""

    tree: pytree.TreeSpec | None
    leaves: tuple[Leaf | None, ...]

    @classmethod
    def of(cls, leaves: Sequence[Any], tree: pytree.TreeSpec | None = None) -> Self:
        """Return the metadata of some leaves; raise `UserError` if a leaf is not None or a plain tensor."""
        return cls(tree, tuple(None if leaf is None else _describe(leaf) for leaf in leaves))

    def to_json(self) -> str:
        """Return the JSON form that is sent to the peer; raise `UserError` if a container cannot be serialized."""
        leaves = [leaf and (leaf.shape, _name(leaf.dtype), leaf.needs_gradient) for leaf in self.leaves]
        try:
            tree = self.tree and pytree.treespec_dumps(self.tree)
        except NotImplementedError as error:
            raise UserError(
                f"got a container in a stage's output that cannot be serialized for another rank: {error} Return "
                "tuples, lists and dicts, or register the type with torch.utils._pytree and a serialized_type_name."
            ) from error
        return json.dumps([tree, leaves])

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Return the metadata that `to_json` serialized."""
        tree, leaves = json.loads(text)
        return cls(
            tree and pytree.treespec_loads(tree),
            tuple(leaf and Leaf(tuple(leaf[0]), getattr(torch, leaf[1]), leaf[2]) for leaf in leaves),
        )

    def __str__(self) -> str:
        leaves = [
            leaf and f"{_name(leaf.dtype)}{list(leaf.shape)}{' with requires_grad' if leaf.needs_gradient else ''}"
            for leaf in self.leaves
        ]
        return str(leaves[0]) if len(leaves) == 1 else f"({', '.join(map(str, leaves))})"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _describe(leaf: Any) -> Leaf:
    if not isinstance(leaf, Tensor) or isinstance(leaf, DTensor):
        raise UserError(
            f"got {type(leaf).__name__} in a stage's output that is sent to another rank; expected tensors and None, "
            "in tuples, lists and dicts. Return numbers as tensors, and the local tensor of a DTensor (to_local())."
        )
    return Leaf(tuple(leaf.shape), leaf.dtype, leaf.requires_grad)
