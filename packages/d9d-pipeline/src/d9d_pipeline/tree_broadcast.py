"""Broadcast of a tree of tensors from one pipeline rank to the others, which do not know its structure."""

from typing import Any

import torch.distributed as dist

from d9d_dist import all_gather_trees


def broadcast_tree(tree: Any, group: dist.ProcessGroup, *, source: int) -> Any:
    """Return the tree of rank `source` on every rank of a group. The tree may change from call to call.

    Collectives are those of `all_gather_trees`, with one tree.

    Args:
        tree: Tensors and `None` in tuples, lists and dicts; ignored on the other ranks.
        group: Process group of the pipeline.
        source: Rank within the group that has the tree.

    Raises:
        UserError: On every rank, if the tree cannot be sent.
    """
    is_source = group.rank() == source
    found = all_gather_trees(tree if is_source else None, group)[source]
    return tree if is_source else found
