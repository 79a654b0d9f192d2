"""Cuts nested trees of tensors into the parts of ranks, and puts them together again, as a spec tree says.

A spec has the nesting of its tree, with `ShardOn` or `Whole` for leaves. `ShardOn` stands for a tensor, or for a
list that is itself cut into consecutive parts; `Whole` stands for anything, whole subtrees too.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias, TypeVar, final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import KeyPath, tree_map

from d9d_dist._tree_gather import all_gather_trees
from d9d_dist._tree_walk import describe, map_along, where
from d9d_dist.collectives import all_gather_variadic
from d9d_dist.errors import UserError
from d9d_dist.trees import Tree

_Tree = TypeVar("_Tree")


@final
@dataclass(frozen=True, slots=True)
class ShardOn:
    """A tensor, or a list, of which each rank has a part.

    Attributes:
        dim: The dim of the tensor that is cut; 0 for a list.
        stack: Whether the dim has one element for each shard, and shards do without the dim. Not for lists.
    """

    dim: int = 0
    stack: bool = False


@final
@dataclass(frozen=True, slots=True)
class Whole:
    """Anything that every rank has whole."""


ShardSpec: TypeAlias = Tree[ShardOn | Whole]
"""A nest of `ShardOn` and `Whole`."""


def shard_spec(tree: object, *, dim: int = 0) -> ShardSpec:
    """A spec that cuts every tensor that has a dim on it, and replicates everything else."""

    def choose(leaf: object) -> ShardOn | Whole:
        has_dim = isinstance(leaf, Tensor) and -leaf.ndim <= dim < leaf.ndim
        return ShardOn(dim) if has_dim else Whole()

    return tree_map(choose, tree)


def replicate_spec(tree: object) -> ShardSpec:
    """A spec that replicates everything."""
    return tree_map(lambda leaf: Whole(), tree)


def shard_tree(tree: _Tree, spec: ShardSpec, *, rank: int, size: int, even: bool = False) -> _Tree:
    """The part of a tree that belongs to one rank. No collectives; tensors are views, through which autograd goes.

    Args:
        tree: The whole tree.
        spec: What is cut.
        rank: Whose part.
        size: The number of ranks. Where it does not divide a size, the first ranks have one more, as with
            `torch.tensor_split`.
        even: Whether that is a mistake instead.

    Raises:
        UserError: If tree and spec do not match, naming the path; or something cannot be cut so.
    """
    return _map(partial(_shard, rank=rank, size=size, even=even), spec, [tree])


def join_trees(parts: Sequence[_Tree], spec: ShardSpec) -> _Tree:
    """The tree whose parts these are: the inverse of `shard_tree`. No collectives.

    Args:
        parts: Those of all ranks, in their order. What is replicated is taken from the first.
        spec: What was cut.

    Raises:
        UserError: If there are no parts, or a part and the spec do not match, naming the path.
    """
    if not parts:
        raise UserError("got no parts to join; expected those of all ranks.")
    return _map(_join, spec, parts)


def unshard_tree(tree: _Tree, spec: ShardSpec, group: dist.ProcessGroup | None = None) -> _Tree:
    """The tree of which every rank has a part: the collective inverse of `shard_tree`. Not differentiable.

    Collective over the group, for each `ShardOn` what `all_gather_variadic` does; lists travel as
    `all_gather_objects`, and their tensors after them, one after the other. The host waits.

    Args:
        tree: This rank's part; parts of different ranks may have different sizes.
        spec: What was cut, the same on all ranks.
        group: The ranks; `None` for all of the job.

    Raises:
        UserError: If tree and spec do not match, naming the path.
    """
    _map(_check_part, spec, [tree])  # before the first collective, so that no rank waits for one that has failed
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
                f"got {length} elements on dim {spec.dim} of {describe(node)} at {where(path)}, to give one to each of "
                f"{size} shards (stack=True); expected {size}."
            )
        return node.select(spec.dim, rank)
    if even and length % size:
        raise UserError(
            f"got the size {length} of {describe(node)} at {where(path)}, on dim {spec.dim}, to cut into {size} equal "
            f"shards; expected a multiple of {size}. Use even=False to allow for unequal ones."
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
    """Check that what stands at a path can be cut as the spec says, or has been."""
    (node,) = trees
    if isinstance(spec, Whole):
        return
    if isinstance(node, list):
        if spec != ShardOn():
            raise UserError(f"got {spec} for a list at {where(path)}; expected ShardOn(dim=0), which cuts the list.")
        return
    if not isinstance(node, Tensor):
        raise UserError(
            f"got {spec} for {describe(node)} at {where(path)}; expected a tensor or a list, or else Whole()."
        )
    num_dims = node.ndim + (spec.stack and not is_whole)
    if not -num_dims <= spec.dim < num_dims:
        raise UserError(f"got {spec} for {describe(node)} at {where(path)}; expected a dim that it has.")
