"""Gather of tensors of different shapes, and all-gather of trees that differ in structure, shapes and dtypes."""

from collections import Counter
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_flatten, tree_unflatten, treespec_dumps, treespec_loads

from d9d_dist.collectives.consensus import agree, gather_json
from d9d_dist.collectives.tensors import all_to_all
from d9d_dist.errors import UserError

_Tree = TypeVar("_Tree")


def gather_variadic(tensor: Tensor, group: dist.ProcessGroup | None = None, *, dst: int = 0) -> list[Tensor] | None:
    """Return the tensors of all ranks, in rank order, on rank `dst`; `None` on other ranks.

    Shapes may differ, dtype and number of dims must not. The returned tensors are views of one storage. Collective:
    `gather_json`, which synchronizes the host; then an all-to-all in which only `dst` receives data.

    Raises:
        UserError: On every rank, if dtypes or numbers of dims differ.
    """
    rows = gather_json([str(tensor.dtype), *tensor.shape], group)
    kinds, shapes = [(dtype, len(shape)) for dtype, *shape in rows], [torch.Size(shape) for _, *shape in rows]
    usual = max(kinds, key=Counter(kinds).__getitem__)
    for rank, (dtype, num_dims) in enumerate(kinds):
        if (dtype, num_dims) != usual:
            raise UserError(
                f"rank {rank} of the group has a {dtype} tensor with {num_dims} dims, but rank "
                f"{kinds.index(usual)} has {usual[0]} with {usual[1]}; expected the same dtype and number of dims "
                "on all ranks, even for empty tensors."
            )
    is_dst = dist.get_rank(group) == dst
    send_sizes = [tensor.numel() if rank == dst else 0 for rank in range(len(shapes))]
    receive_sizes = [shape.numel() if is_dst else 0 for shape in shapes]
    received = all_to_all(tensor.flatten(), group, send_sizes=send_sizes, receive_sizes=receive_sizes)
    if not is_dst:
        return None
    return [part.view(shape) for part, shape in zip(received.split(receive_sizes), shapes, strict=True)]


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
