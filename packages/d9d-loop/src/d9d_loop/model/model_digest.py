"""Digest of the values of a model, which is equal in every layout.

A resumed job must have the same values for frozen parameters that its checkpoint omits, and an inference job for all.

The digest is sum_p h_p sum_i (2i + 1) b_i mod 2^64 over the tensors p. b_i is the bit pattern of element i as an
integer, and h_p is an odd hash of the tensor's name. Each rank adds the terms of its own shards, so the sum does not
depend on the layout. A change of one element changes the digest, since 2i + 1 and h_p are odd.
"""

import hashlib

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from d9d_dist import DistributedContext, indexed_blocks, is_first_replica
from d9d_state import model_tensors

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@torch.no_grad()
def model_digest(model: nn.Module, ctx: DistributedContext, *, frozen: bool | None = None) -> str:
    """Return the digest of all tensors that a checkpoint has: 16 hexadecimal digits, equal on every rank.

    `frozen` chooses those that do not require gradients, or only trainable parameters. Collective: an all-reduce of 8
    bytes over all ranks. Reads every such tensor once and synchronizes host and device.
    """
    total = torch.zeros((), dtype=torch.int64, device=ctx.device)
    first_rank = 0
    if ctx.world_size > 1:
        first_rank = min(dist.get_process_group_ranks(ctx.group_for("batch", "dp", "cp", "tp")))
    trainable = model_tensors(model, trainable_only=True)
    for name, tensor in model_tensors(model).items():
        if (name in trainable) != frozen and _is_counted_on_this_rank(tensor, ctx, first_rank):
            hashed = hashlib.blake2b(name.removeprefix("model.").encode(), digest_size=8).digest()
            total += (int.from_bytes(hashed, signed=True) | 1) * _checksum(tensor, name)
    if ctx.world_size > 1:
        dist.all_reduce(total)
    return f"{total.item() % 2**64:016x}"


def _is_counted_on_this_rank(tensor: Tensor, ctx: DistributedContext, first_rank: int) -> bool:
    """Return True if, of all ranks with the same shard of a tensor, this rank adds the shard to the digest.

    A `DTensor` is counted on the mesh that contains the stage's first rank, at coordinate 0 of every axis on which it
    is replicated. A plain tensor is counted on the stage's first rank.
    """
    if not isinstance(tensor, DTensor):
        return ctx.rank == first_rank
    return first_rank in tensor.device_mesh.mesh.flatten().tolist() and is_first_replica(tensor)


def _checksum(tensor: Tensor, name: str) -> Tensor:
    """Return sum_i (2i + 1) b_i over this rank's elements, 0-dim int64; i is the flat index in the whole tensor."""
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for block, index in indexed_blocks(tensor, name):
        total += (_bits(block) * (2 * index + 1)).sum()
    return total


def _bits(block: Tensor) -> Tensor:
    if block.is_complex():
        real, imaginary = torch.view_as_real(block.resolve_conj()).unbind(-1)
        return _bits(real.contiguous()) + 3 * _bits(imaginary.contiguous())
    return block.view(_BITS[block.element_size()]).long()
