"""Sharding of nested trees of tensors, and its inverse, by a spec tree.

A spec has the nesting of its tree, with leaves `ShardOn` or `Whole`. `ShardOn` is for a tensor, or for a list that is
cut into consecutive parts. `Whole` is for any node, including subtrees.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias, TypeVar, final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import KeyPath, tree_map

from d9d_dist._tree_walk import describe, map_along, where
from d9d_dist.collectives import all_gather_variadic
from d9d_dist.errors import UserError
from d9d_dist.tree_gather import all_gather_trees
from d9d_dist.trees import Tree

_Tree = TypeVar("_Tree")


@final
@dataclass(frozen=True, slots=True)
class ShardOn:
    """Tensor or list that is split over ranks.

    Attributes:
        dim: Dim of the tensor that is split; 0 for a list.
        stack: True if the dim has one element per shard and shards do not have the dim. Not for lists.
    """

    dim: int = 0
    stack: bool = False


@final
@dataclass(frozen=True, slots=True)
class Whole:
    """Node that every rank holds in full."""


ShardSpec: TypeAlias = Tree[ShardOn | Whole]
"""Tree of `ShardOn` and `Whole`."""


def shard_spec(tree: object, *, dim: int = 0) -> ShardSpec:
    """Return a spec that splits every tensor that has the dim, and replicates all other leaves."""

    def choose(leaf: object) -> ShardOn | Whole:
        has_dim = isinstance(leaf, Tensor) and -leaf.ndim <= dim < leaf.ndim
        return ShardOn(dim) if has_dim else Whole()

    return tree_map(choose, tree)


def replicate_spec(tree: object) -> ShardSpec:
    """Return a spec that replicates all leaves."""
    return tree_map(lambda leaf: Whole(), tree)


def shard_tree(tree: _Tree, spec: ShardSpec, *, rank: int, size: int, even: bool = False) -> _Tree:
    """Return the shard of one rank of `size`. No collectives. Tensors are differentiable views.

    If `size` does not divide a length, the first ranks have one more element, as in `torch.tensor_split`; with `even`
    that is an error.

    Raises:
        UserError: If tree and spec do not match, or a node cannot be split as specified; names the path.
    """
    return _map(partial(_shard, rank=rank, size=size, even=even), spec, [tree])


def join_trees(parts: Sequence[_Tree], spec: ShardSpec) -> _Tree:
    """Join the shards of all ranks, in rank order, into the whole tree: the inverse of `shard_tree`. No collectives.

    Replicated nodes are taken from the first shard.

    Raises:
        UserError: If there are no shards, or a shard does not match the spec; names the path.
    """
    if not parts:
        raise UserError("got no parts to join; expected the parts of all ranks.")
    return _map(_join, spec, parts)


def unshard_tree(tree: _Tree, spec: ShardSpec, group: dist.ProcessGroup | None = None) -> _Tree:
    """Return the whole tree from the ranks' shards: the collective inverse of `shard_tree`. Not differentiable.

    Collective over the group. Each `ShardOn` tensor needs one `all_gather_variadic`. Each list needs one `agree`, one
    `gather_json` and one broadcast per tensor. Causes host-device synchronization. Shard sizes may differ; the spec
    must be equal on all ranks.

    Raises:
        UserError: If tree and spec do not match; the message names the path. Raised on every rank if a list contains a
            leaf that is neither a tensor nor a JSON value, or a container that is not a list, tuple or dict.
    """
    _map(_check_part, spec, [tree])  # before the first collective, so that no rank waits for a rank that raised
    return _map(partial(_unshard, group=group), spec, [tree])


def _map(function: Callable[[KeyPath, Any, Sequence[Any]], Any], spec: ShardSpec, trees: Sequence[Any]) -> Any:
    return map_along(
        function,
        spec,
        trees,
        is_spec_leaf=lambda node: isinstance(node, ShardOn | Whole),
        expected="ShardOn(...) or Whole()",
    )


def _shard(path: KeyPath, spec: ShardOn | Whole, trees: Sequence[Any], *, rank: int, size: int, even: bool) -> object:
    (node,) = trees
    if isinstance(spec, Whole):
        return node
    _check_part(path, spec, trees, is_whole=True)
    length = len(node) if isinstance(node, list) else node.shape[spec.dim]
    if spec.stack:
        if length != size:
            raise UserError(
                f"got {length} elements on dim {spec.dim} of {describe(node)} at {where(path)}, to split into "
                f"{size} shards of one element (stack=True); expected {size}."
            )
        return node.select(spec.dim, rank)
    if even and length % size:
        raise UserError(
            f"got the size {length} of {describe(node)} at {where(path)}, on dim {spec.dim}, to split into {size} "
            f"equal shards; expected a multiple of {size}. Use even=False to allow unequal shards."
        )
    start, end = (length // size * at + min(at, length % size) for at in (rank, rank + 1))
    return node[start:end] if isinstance(node, list) else node.narrow(spec.dim, start, end - start)


def _join(path: KeyPath, spec: ShardOn | Whole, parts: Sequence[Any]) -> object:
    if isinstance(spec, Whole):
        return parts[0]
    for part in parts:
        _check_part(path, spec, [part])
    if all(isinstance(part, list) for part in parts):
        return [item for part in parts for item in part]
    if all(isinstance(part, Tensor) for part in parts):
        return torch.stack(tuple(parts), spec.dim) if spec.stack else torch.cat(tuple(parts), spec.dim)
    raise UserError(f"got tensors and lists together at {where(path)}; expected parts of one kind.")


def _unshard(path: KeyPath, spec: ShardOn | Whole, trees: Sequence[Any], *, group: dist.ProcessGroup | None) -> object:
    (part,) = trees
    if isinstance(spec, Whole):
        return part
    gathered = all_gather_variadic(part, group) if isinstance(part, Tensor) else all_gather_trees(part, group)
    return _join(path, spec, gathered)


def _check_part(path: KeyPath, spec: ShardOn | Whole, trees: Sequence[Any], *, is_whole: bool = False) -> None:
    """Check that a spec leaf fits a node: the full node to split (`is_whole`), or one shard of it.

    Raises `UserError` otherwise.
    """
    (node,) = trees
    if isinstance(spec, Whole):
        return
    if isinstance(node, list):
        if spec != ShardOn():
            raise UserError(f"got {spec} for a list at {where(path)}; expected ShardOn(dim=0), which splits the list.")
        return
    if not isinstance(node, Tensor):
        raise UserError(
            f"got {spec} for {describe(node)} at {where(path)}; expected a tensor or a list. Use Whole() for other "
            "values."
        )
    num_dims = node.ndim + (spec.stack and not is_whole)
    if not -num_dims <= spec.dim < num_dims:
        raise UserError(f"got {spec} for {describe(node)} at {where(path)}; expected an existing dim.")
