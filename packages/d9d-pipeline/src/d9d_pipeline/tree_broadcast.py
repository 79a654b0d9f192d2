"""Broadcast of a tree of tensors from one pipeline rank to the others, which do not know its structure."""

from typing import Any

import torch
import torch.distributed as dist
from torch.utils import _pytree as pytree

from d9d_pipeline._channel import Channel
from d9d_pipeline._message import Description


def broadcast_tree(tree: Any, group: dist.ProcessGroup, *, source: int, device: torch.device) -> Any:
    """Return the tree of rank `source` on every rank of a group. Collective: sends from that rank to each other rank.

    The metadata is sent on every call, so the tree may change from call to call.

    Args:
        tree: Tensors and `None` in tuples, lists and dicts; ignored on the other ranks.
        group: Process group of the pipeline.
        source: Rank within the group that has the tree.
        device: Device of the tensors.

    Raises:
        UserError: On `source`, if the tree cannot be sent.
    """
    channel = Channel(group, device)
    if group.rank() != source:
        arriving = channel.receive(kind=("result",), peer=source)
        assert arriving.description.tree is not None, "a tree is sent with its structure"
        return pytree.tree_unflatten(arriving.wait(), arriving.description.tree)
    leaves, structure = pytree.tree_flatten(tree)
    for peer in range(group.size()):
        if peer != source:
            channel.send(leaves, Description.of(leaves, structure), kind=("result", peer), peer=peer)
    channel.finish()
    return tree
