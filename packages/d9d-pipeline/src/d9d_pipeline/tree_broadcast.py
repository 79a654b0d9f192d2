"""Broadcast of a tree of tensors from one pipeline rank to the others, which do not know its structure."""

from typing import Any

import torch.distributed as dist

from d9d_dist import all_gather_trees


def broadcast_tree(tree: Any, group: dist.ProcessGroup, *, source: int) -> Any:
    """Return the tree of rank `source` of a group on every rank of the group; other ranks pass any tree.

    The leaves are tensors and `None`. Collectives and errors are those of `all_gather_trees`, with one tree.
    """
    is_source = group.rank() == source
    found = all_gather_trees(tree if is_source else None, group)[source]
    return tree if is_source else found
