"""Ranks whose tensors have different shapes tell each other which, and find out together if they match at all."""

from collections import Counter

import torch
import torch.distributed as dist
from torch import Tensor

from d9d_dist.errors import UserError

_MAX_DIMS = 16
# What stands for a dtype on the way: its index here, the same in every process of one job.
_DTYPES = tuple(sorted({value for value in vars(torch).values() if isinstance(value, torch.dtype)}, key=str))


def exchange_shapes(tensor: Tensor, group: dist.ProcessGroup | None) -> list[torch.Size]:
    """The shapes of all ranks' tensors. One all-gather of 144 bytes a rank, which the host waits for.

    Args:
        tensor: This rank's.
        group: The ranks.

    Raises:
        UserError: On every rank, with the same message, if the dtype or the number of dims is not the same on all, or
            a tensor has more than 16 dims.
    """
    header = [_DTYPES.index(tensor.dtype), tensor.ndim, *tensor.shape[:_MAX_DIMS]]
    header += [0] * (2 + _MAX_DIMS - len(header))
    mine = torch.tensor(header, device=tensor.device)
    headers = mine.new_empty((dist.get_world_size(group), len(header)))
    dist.all_gather_into_tensor(headers.view(-1), mine, group=group)
    rows = headers.tolist()
    _check_alike([(_DTYPES[row[0]], row[1]) for row in rows])
    return [torch.Size(row[2 : 2 + tensor.ndim]) for row in rows]


def _check_alike(kinds: list[tuple[torch.dtype, int]]) -> None:
    usual = max(kinds, key=Counter(kinds).__getitem__)
    if usual[1] > _MAX_DIMS:
        raise UserError(f"got tensors of {usual[1]} dims; expected at most {_MAX_DIMS}. Reshape them first.")
    for rank, (dtype, num_dims) in enumerate(kinds):
        if (dtype, num_dims) != usual:
            raise UserError(
                f"rank {rank} of the group has a tensor of {dtype} with {num_dims} dims, where rank "
                f"{kinds.index(usual)} has {usual[0]} with {usual[1]}; expected the same on all ranks. Give "
                "an empty tensor too the dtype and the number of dims of the others."
            )
