"""All-gather of trees that may differ between ranks in structure, shapes and dtypes."""

from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_flatten, tree_unflatten, treespec_dumps, treespec_loads

from d9d_dist.collectives.consensus import agree, gather_json

_Tree = TypeVar("_Tree")


def all_gather_trees(tree: _Tree, group: dist.ProcessGroup | None) -> list[_Tree]:
    """Return the trees of all ranks, in rank order. Leaves are tensors and JSON values.

    The tensors have no gradient. In the tree of this rank they share the memory of the given tensors, if contiguous.

    Collective over the group: `agree`, `gather_json`, then a broadcast of each non-empty tensor. Synchronizes the host.
    Raises `UserError` on every rank if a leaf or a container type cannot be sent.
    """
    leaves, structure = tree_flatten(tree)
    text, problem = "", None
    try:
        text = treespec_dumps(structure)
    except (NotImplementedError, TypeError) as error:
        problem = f"got a tree that cannot be sent: {error} Expected lists, tuples and dicts."
    if any(isinstance(leaf, DTensor) for leaf in leaves):
        problem = "got a DTensor in a tree to gather; expected plain tensors. Pass its local tensor (to_local())."
    agree(problem, group)
    mine = [_describe(leaf) if isinstance(leaf, Tensor) else [leaf] for leaf in leaves]
    return [
        tree_unflatten(
            [
                leaf[0] if isinstance(leaf, list) else _broadcast(leaf, index, leaves, rank, group)
                for index, leaf in enumerate(described)
            ],
            treespec_loads(structure),
        )
        for rank, (structure, described) in enumerate(gather_json([text, mine], group))
    ]


def _describe(tensor: Tensor) -> dict[str, Any]:
    return {"size": list(tensor.shape), "dtype": str(tensor.dtype), "device": tensor.device.type}


def _broadcast(
    description: dict[str, Any], index: int, own: list[Any], rank: int, group: dist.ProcessGroup | None
) -> Tensor:
    """Broadcast a tensor from `rank`, where it is `own[index]`."""
    if dist.get_rank(group) == rank:
        tensor = own[index].detach().resolve_conj().resolve_neg().contiguous()
    else:
        dtype = getattr(torch, description["dtype"].removeprefix("torch."))
        tensor = torch.empty(description["size"], dtype=dtype, device=description["device"])
    if tensor.numel():
        # Bytes, because gloo broadcasts neither float8 nor 16-bit integers.
        dist.broadcast(tensor.view(-1).view(torch.uint8), group=group, group_src=rank)
    return tensor
