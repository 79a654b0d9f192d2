"""All-gather of trees that may differ between ranks in structure, shapes and dtypes."""

from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from d9d_dist.collectives import all_gather_objects

_Tree = TypeVar("_Tree")


@dataclass(frozen=True, slots=True)
class _TensorPlaceholder:
    """Placeholder of a tensor, which is broadcast separately."""

    shape: torch.Size
    dtype: torch.dtype
    device_type: str

    def empty(self) -> Tensor:
        return torch.empty(self.shape, dtype=self.dtype, device=self.device_type)


def all_gather_trees(tree: _Tree, group: dist.ProcessGroup | None) -> list[_Tree]:
    """Return the trees of all ranks, in rank order.

    Collective over the group: `all_gather_objects`, then a broadcast of each tensor that is not empty. Synchronizes the
    host.

    Args:
        tree: This rank's tree. Its containers and its leaves other than tensors must be picklable.
        group: Process group; `None` for all ranks of the job.
    """
    skeletons = all_gather_objects(_without_tensors(tree), group)
    return [_with_tensors(skeleton, tree, rank, group) for rank, skeleton in enumerate(skeletons)]


def _without_tensors(tree: object) -> object:
    leaves, structure = tree_flatten(tree)
    return tree_unflatten(
        [_TensorPlaceholder(x.shape, x.dtype, x.device.type) if isinstance(x, Tensor) else x for x in leaves], structure
    )


def _with_tensors(skeleton: Any, mine: Any, rank: int, group: dist.ProcessGroup | None) -> Any:
    """Replace the placeholders in one rank's tree by its tensors, which that rank broadcasts from its own tree."""
    leaves, structure = tree_flatten(skeleton)
    is_source = dist.get_rank(group) == rank
    own_leaves = tree_flatten(mine)[0] if is_source else leaves
    filled = [
        _broadcast(leaf, own if is_source else None, rank, group) if isinstance(leaf, _TensorPlaceholder) else leaf
        for leaf, own in zip(leaves, own_leaves, strict=True)
    ]
    return tree_unflatten(filled, structure)


def _broadcast(here: _TensorPlaceholder, own: Tensor | None, rank: int, group: dist.ProcessGroup | None) -> Tensor:
    tensor = here.empty() if own is None else own.detach().clone(memory_format=torch.contiguous_format)
    if tensor.numel():
        dist.broadcast(tensor, group=group, group_src=rank)
    return tensor
