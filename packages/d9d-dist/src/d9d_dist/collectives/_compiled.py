"""Collectives of activations in the form that torch.compile's passes recognize.

Inductor overlaps an all-gather with the matrix products that read it, and a matrix product with the reduce-scatter that
follows ("async tensor parallelism"). Its passes search for functional collectives whose parts are joined by `cat` or
made by `split`. In eager mode, `all_gather` and `reduce_scatter` call `d9d_dist.collectives.tensors`.
"""

import torch
import torch.distributed as dist
from torch import Tensor

from d9d_dist.collectives import tensors


def all_gather(tensor: Tensor, group: dist.ProcessGroup, *, dim: int) -> Tensor:
    """Return the tensors of all ranks, of equal shapes, concatenated along `dim`. One all-gather."""
    if not torch.compiler.is_compiling():
        return tensors.all_gather(tensor, group, dim=dim)
    functional, size = torch.ops._c10d_functional, group.size()
    parts = functional.all_gather_into_tensor(tensor.detach().contiguous(), size, group.group_name)
    parts = functional.wait_tensor(parts)
    return parts if dim == 0 else torch.cat(parts.chunk(size), dim=dim)


def all_reduce(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the sum over ranks as a new tensor. One all-reduce."""
    if torch.compiler.is_compiling():  # in torch 2.11, gradients through the in-place collective are zero
        functional = torch.ops._c10d_functional
        return functional.wait_tensor(functional.all_reduce(tensor.detach().contiguous(), "sum", group.group_name))
    total = tensor.detach().clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total


def reduce_scatter(tensor: Tensor, group: dist.ProcessGroup, *, dim: int) -> Tensor:
    """Return this rank's shard of the sum over ranks, along `dim`. One reduce-scatter.

    Raises `UserError` if the group size does not divide the size of the dim.
    """
    if not torch.compiler.is_compiling():
        return tensors.reduce_scatter(tensor, group, dim=dim)
    functional, size = torch.ops._c10d_functional, group.size()
    parts = tensors.even_parts(tensor.detach(), size, dim=dim)
    whole = tensor.detach().contiguous() if dim == 0 else torch.cat(parts)
    return functional.wait_tensor(functional.reduce_scatter_tensor(whole, "sum", size, group.group_name))
