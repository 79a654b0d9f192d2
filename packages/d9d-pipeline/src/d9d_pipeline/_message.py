"""What a message between pipeline ranks is made of: told once to the one that receives, and compared ever after."""

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
    """A tensor without its numbers."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    needs_gradient: bool


@final
@dataclass(frozen=True, slots=True)
class Description:
    """A message without its numbers.

    Attributes:
        tree: How its leaves stand together; None if they are just a list.
        leaves: What they are, None for None.
    """

    tree: pytree.TreeSpec | None
    leaves: tuple[Leaf | None, ...]

    @classmethod
    def of(cls, leaves: Sequence[Any], tree: pytree.TreeSpec | None = None) -> Self:
        """Describe leaves.

        Raises:
            UserError: If one of them cannot be sent.
        """
        return cls(tree, tuple(None if leaf is None else _describe(leaf) for leaf in leaves))

    def to_json(self) -> str:
        """The form in which it is told.

        Raises:
            UserError: If a container of the tree has none.
        """
        leaves = [leaf and (leaf.shape, _name(leaf.dtype), leaf.needs_gradient) for leaf in self.leaves]
        try:
            tree = self.tree and pytree.treespec_dumps(self.tree)
        except NotImplementedError as error:
            raise UserError(
                f"a container in what a stage returns cannot be described to a stage of another rank: {error} Return "
                "tuples, lists and dicts, or register it with torch.utils._pytree and a serialized_type_name."
            ) from error
        return json.dumps([tree, leaves])

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Read what was told."""
        tree, leaves = json.loads(text)
        return cls(
            tree and pytree.treespec_loads(tree),
            tuple(leaf and Leaf(tuple(leaf[0]), getattr(torch, leaf[1]), leaf[2]) for leaf in leaves),
        )

    def __str__(self) -> str:
        leaves = [
            leaf and f"{_name(leaf.dtype)}{list(leaf.shape)}{' that needs a gradient' if leaf.needs_gradient else ''}"
            for leaf in self.leaves
        ]
        return str(leaves[0]) if len(leaves) == 1 else f"({', '.join(map(str, leaves))})"


def check_can_be_sent(output: Any) -> None:
    """Refuse what a stage cannot return to a stage of another rank.

    Raises:
        UserError: Naming what is in it that has no description.
    """
    Description.of(*pytree.tree_flatten(output)).to_json()


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _describe(leaf: Any) -> Leaf:
    if not isinstance(leaf, Tensor) or isinstance(leaf, DTensor):
        raise UserError(
            f"got {type(leaf).__name__} among what a stage returns to a stage of another rank; expected tensors and "
            "None, in tuples, lists and dicts. Return values as tensors, of a DTensor this rank's part (to_local())."
        )
    return Leaf(tuple(leaf.shape), leaf.dtype, leaf.requires_grad)
