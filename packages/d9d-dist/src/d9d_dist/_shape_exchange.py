"""All-gather of tensor shapes, which may differ between ranks, with a check of dtype and number of dims."""

from collections import Counter

import torch
import torch.distributed as dist
from torch import Tensor

from d9d_dist.errors import UserError

_MAX_DIMS = 16
# A dtype is sent as its index in this tuple, which is equal in all processes of a job.
_DTYPES = tuple(sorted({value for value in vars(torch).values() if isinstance(value, torch.dtype)}, key=str))


def exchange_shapes(tensor: Tensor, group: dist.ProcessGroup | None) -> list[torch.Size]:
    """Return the shapes of all ranks' tensors. Collective: one all-gather of 144 bytes per rank; synchronizes the host.

    Raises `UserError` on every rank if dtypes or numbers of dims differ, or a tensor has more than 16 dims.
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
                f"rank {rank} of the group has a {dtype} tensor with {num_dims} dims, but rank "
                f"{kinds.index(usual)} has {usual[0]} with {usual[1]}; expected the same dtype and number of dims "
                "on all ranks, even for empty tensors."
            )
