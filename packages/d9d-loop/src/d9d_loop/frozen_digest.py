"""Tells whether two jobs have the same frozen parameters: what a checkpoint leaves out has to come back as it was.

The digest of elements b (their bits, as whole numbers) at the places i of all parameters p that do not require
gradients is sum_p h_p sum_i (2i + 1) b_i mod 2^64, with an odd h_p of the parameter's name. It is a sum, so that each
rank adds what it holds, whatever the layout; a change of one element changes it, because 2i + 1 and h_p are odd.
"""

import hashlib

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from d9d_dist import DistributedContext
from d9d_state import model_tensors

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_ELEMENTS_AT_ONCE = 1 << 20


@torch.no_grad()
def frozen_digest(model: nn.Module, ctx: DistributedContext) -> str:
    """The digest of all parameters that do not require gradients, in hexadecimal. Collective: 8 bytes over all ranks.

    Reads every such parameter once; the host waits.

    Args:
        model: This rank's part of the model.
        ctx: The job's context.

    Returns:
        The same on every rank, and for the same values in every layout.
    """
    total = torch.zeros((), dtype=torch.int64, device=ctx.device)
    first_rank = 0
    if ctx.world_size > 1:
        first_rank = min(dist.get_process_group_ranks(ctx.group_for("batch", "dp", "cp", "tp")))
    tensors = model_tensors(model)
    for name in tensors.keys() - model_tensors(model, trainable_only=True).keys():
        if _counts_here(tensors[name], ctx, first_rank):
            total += _name_factor(name.removeprefix("model.")) * _checksum(tensors[name])
    if ctx.world_size > 1:
        dist.all_reduce(total)
    return f"{total.item() % 2**64:016x}"


def _counts_here(tensor: Tensor, ctx: DistributedContext, first_rank: int) -> bool:
    """Whether it is this rank that adds its part, of those of a pipeline stage that hold the same one.

    It is the first copy of it in the copy of its mesh that has the stage's first rank.
    """
    if not isinstance(tensor, DTensor):
        return ctx.rank == first_rank
    coordinates = tensor.device_mesh.get_coordinate()
    if coordinates is None or first_rank not in tensor.device_mesh.mesh.flatten().tolist():
        return False
    return all(
        coordinate == 0
        for coordinate, placement in zip(coordinates, tensor.placements, strict=True)
        if placement.is_replicate()
    )


def _name_factor(name: str) -> int:
    """An odd number within the range of int64."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), signed=True) | 1


def _checksum(tensor: Tensor) -> Tensor:
    """sum_i (2i + 1) b_i over the elements that this rank holds, i being their places in the whole; 0-dim int64."""
    whole, offsets = tensor.shape, (0,) * tensor.ndim
    if isinstance(tensor, DTensor):
        _, offsets = compute_local_shape_and_global_offset(whole, tensor.device_mesh, tensor.placements)
        tensor = tensor.to_local()
    bits = tensor.contiguous().view(-1).view(_BITS[tensor.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for start in range(0, bits.numel(), _ELEMENTS_AT_ONCE):
        part = bits[start : start + _ELEMENTS_AT_ONCE].long()
        rest = torch.arange(start, start + part.numel(), device=tensor.device)
        place, stride = torch.zeros_like(rest), 1
        for size, offset, whole_size in zip(reversed(tensor.shape), reversed(offsets), reversed(whole), strict=True):
            place += (rest % size + offset) * stride
            rest, stride = rest // size, stride * whole_size
        total += (part * (2 * place + 1)).sum()
    return total
