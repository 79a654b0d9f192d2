"""Collectives that allocate their outputs. They are not differentiable; see `d9d_dist.collectives.differentiable`.

All functions are collective over a process group; `None` means all ranks of the job. Ranks are numbered within the
group. The functions accept non-contiguous tensors and negative dims, do not change their arguments, and return new,
contiguous tensors. Supported dtypes are those of the group's backend; gloo does not support float8.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from d9d_dist.errors import UserError


def all_gather(tensor: Tensor, group: dist.ProcessGroup | None = None, *, dim: int = 0, stack: bool = False) -> Tensor:
    """Return the tensors of all ranks, of equal shapes, concatenated along `dim`. One all-gather.

    With `stack` the tensors are stacked along a new dim `dim` instead.
    """
    parts = tensor.new_empty((dist.get_world_size(group), *tensor.shape))
    # Flat, because gloo supports concatenation along dim 0 only for flat tensors.
    dist.all_gather_into_tensor(parts.view(-1), tensor.detach().contiguous().view(-1), group=group)
    return _join(parts, dim=dim, stack=stack)


def gather(
    tensor: Tensor, group: dist.ProcessGroup | None = None, *, dst: int = 0, dim: int = 0, stack: bool = False
) -> Tensor | None:
    """Return the result of `all_gather` on rank `dst`, `None` on other ranks. One gather."""
    mine = tensor.detach().contiguous()
    if dist.get_rank(group) != dst:
        dist.gather(mine, None, group=group, group_dst=dst)
        return None
    parts = mine.new_empty((dist.get_world_size(group), *mine.shape))
    dist.gather(mine, list(parts.unbind()), group=group, group_dst=dst)
    return _join(parts, dim=dim, stack=stack)


def reduce_scatter(
    tensor: Tensor,
    group: dist.ProcessGroup | None = None,
    *,
    dim: int = 0,
    op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM,
) -> Tensor:
    """Return this rank's shard of the sum over ranks, in the dtype of the tensor. One reduce-scatter.

    The tensor, of the same shape on all ranks, is split along `dim` in rank order. `op` is the reduction operator.
    Raises `UserError` if the group size does not divide the size of the dim.
    """
    parts = torch.stack(even_parts(tensor.detach(), dist.get_world_size(group), dim=dim))
    mine = parts.new_empty(parts.shape[1:])
    dist.reduce_scatter_tensor(mine.view(-1), parts.view(-1), op=op, group=group)
    return mine


def all_to_all(
    tensor: Tensor,
    group: dist.ProcessGroup | None = None,
    *,
    send_sizes: Sequence[int] | None = None,
    receive_sizes: Sequence[int] | None = None,
) -> Tensor:
    """Return the parts that all ranks send to this rank, concatenated in rank order along dim 0. One all-to-all.

    Args:
        tensor: Parts to send, in rank order along dim 0. Other dims must be equal on all ranks.
        group: Process group.
        send_sizes: Number of rows sent to each rank; `None` for equal parts.
        receive_sizes: Number of rows received from each rank; required if and only if `send_sizes` is given.

    Raises:
        UserError: If the sizes do not match the tensor or the group size.
    """
    num_ranks = dist.get_world_size(group)
    _check_all_to_all(tensor, num_ranks, send_sizes, receive_sizes)
    num_rows = tensor.shape[0] if receive_sizes is None else sum(receive_sizes)
    received = tensor.new_empty((num_rows, *tensor.shape[1:]))
    receive, send = (None if sizes is None else list(sizes) for sizes in (receive_sizes, send_sizes))
    dist.all_to_all_single(received, tensor.detach().contiguous(), receive, send, group=group)
    return received


def host_device(group: dist.ProcessGroup | None) -> torch.device:
    """Return the device for sending host data: the CPU if the group has a CPU backend, else the accelerator."""
    has_cpu = any(backend.startswith("cpu:") for backend in _backends(group))
    return torch.device("cpu") if has_cpu else _compute_device(group)


def even_parts(tensor: Tensor, num_parts: int, *, dim: int) -> tuple[Tensor, ...]:
    """Split a tensor into equal views. Raises `UserError` if `num_parts` does not divide the size of the dim."""
    if missing := -tensor.shape[dim] % num_parts:
        raise UserError(
            f"got a tensor of shape {tuple(tensor.shape)} to split over {num_parts} ranks on dim {dim}, whose size "
            f"is {tensor.shape[dim]}; expected a multiple of {num_parts}. Pad it to {tensor.shape[dim] + missing}."
        )
    return tensor.tensor_split(num_parts, dim=dim)


def _join(parts: Tensor, *, dim: int, stack: bool) -> Tensor:
    """Move the dim of ranks from dim 0 to `dim`, or concatenate the parts along `dim`."""
    if stack:
        return parts.movedim(0, dim).contiguous()
    return parts.flatten(0, 1) if dim == 0 else torch.cat(parts.unbind(), dim=dim)


def _check_all_to_all(
    tensor: Tensor, num_ranks: int, send_sizes: Sequence[int] | None, receive_sizes: Sequence[int] | None
) -> None:
    if send_sizes is None and receive_sizes is None:
        even_parts(tensor, num_ranks, dim=0)
        return
    if send_sizes is None or receive_sizes is None:
        given = "receive_sizes" if send_sizes is None else "send_sizes"
        raise UserError(f"got {given} only; expected both send_sizes and receive_sizes, or neither for equal sizes.")
    for name, sizes in (("send_sizes", send_sizes), ("receive_sizes", receive_sizes)):
        if len(sizes) != num_ranks:
            raise UserError(
                f"got {len(sizes)} {name} in a group of {num_ranks} ranks; expected one size for each rank."
            )
    if sum(send_sizes) != tensor.shape[0]:
        raise UserError(
            f"got send_sizes = {list(send_sizes)}, {sum(send_sizes)} rows in total, with a tensor of shape "
            f"{tuple(tensor.shape)}; expected {tensor.shape[0]} rows."
        )


def _compute_device(group: dist.ProcessGroup | None) -> torch.device:
    """Return the accelerator if the group has the accelerator's default backend, else the CPU (a gloo-only group)."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return torch.device("cpu")
    own = f"{accelerator.type}:{dist.get_default_backend_for_device(accelerator)}"
    return accelerator if own in _backends(group) else torch.device("cpu")


def _backends(group: dist.ProcessGroup | None) -> list[str]:
    return dist.get_backend_config(group).split(",")
