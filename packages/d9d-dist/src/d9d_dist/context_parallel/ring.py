"""Context parallelism by ring attention: keys and values are sent around the ranks; no rank holds a whole row.

Shape legend: B batch, L this rank's length, S length of the whole row, H query heads, G key/value heads, K head dim.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from d9d_dist.collectives.differentiable import gather_from_axis
from d9d_dist.context_parallel._chunk_order import check_part
from d9d_dist.context_parallel.blocks import AttentionBlock, BlockKernel, MergedBlocks, default_kernel
from d9d_dist.gradients.first_derivative import first_derivative_only


@final
class RingAttention:
    """Ring Attention, arXiv:2310.01889: ranks pass on keys and values, and merge the blocks of their own queries.

    The paper splits rows into consecutive parts. With the chunks of `ContextSplit` every step after the first computes
    half a block without a mask, so all ranks have equal work.

    On R ranks, forward sends keys and values R - 1 times to the next rank, overlapped with attention to the current
    ones. Document ids, if any, are all-gathered once. Backward sends keys and values again, and their gradients R
    times, in at least float32. Only this rank's parts are saved for backward.

    Args:
        mesh: Mesh of one axis, over which rows are split by `ContextSplit`.
        kernel: Kernel for one block; `None` selects it by device, dtype and presence of document ids.
    """

    def __init__(self, mesh: DeviceMesh, *, kernel: BlockKernel | None = None) -> None:
        self._mesh = mesh
        self._kernel = kernel

    def __call__(self, q_BLHK: Tensor, k_BSGK: Tensor, v_BSGK: Tensor, *, documents_BS: Tensor | None = None) -> Tensor:
        """Compute `Attention`. All arguments and the output are this rank's part of the rows.

        Raises `UserError` if the length of the part is odd.
        """
        check_part(q_BLHK.shape[1])
        kernel = self._kernel or default_kernel(q_BLHK, has_documents=documents_BS is not None)
        if documents_BS is not None:
            documents_BS = gather_from_axis(documents_BS, self._mesh, dim=1, gradient="equal")
        ring = _Ring(self._mesh, kernel, documents_BS)
        return _RingAttention.apply(q_BLHK, k_BSGK, v_BSGK, ring)


@dataclass(frozen=True, slots=True)
class _Ring:
    """Options of one pass. `documents` are document ids [B, S] in rank order."""

    mesh: DeviceMesh
    kernel: BlockKernel
    documents: Tensor | None


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q_BLHK: Tensor, k_BSGK: Tensor, v_BSGK: Tensor, ring: _Ring) -> Tensor:
        kv = [k_BSGK.contiguous(), v_BSGK.contiguous()]
        merged: MergedBlocks | None = None
        for pair in _pairs(ring.mesh, q_BLHK.shape[1]):
            next_kv = None if pair.is_last else _send_to_next(kv, ring.mesh, tag=0)
            out_BHLK, lse_BHL = ring.kernel.forward(_block(pair, q_BLHK, kv, ring))
            if merged is None:
                merged = MergedBlocks(out_BHLK, lse_BHL)
            else:
                merged.add(out_BHLK, lse_BHL, queries=pair.queries)
            kv = kv if next_kv is None else next_kv.wait()
        assert merged is not None, "the ring has at least one rank"
        out_BHLK = merged.out_BHLK.to(q_BLHK.dtype)
        ctx.save_for_backward(q_BLHK, k_BSGK, v_BSGK, out_BHLK, merged.lse_BHL)
        ctx.ring = ring
        return out_BHLK.transpose(1, 2)

    @staticmethod
    @first_derivative_only("attention with context parallelism")
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        q_BLHK, k_BSGK, v_BSGK, out_BHLK, lse_BHL = ctx.saved_tensors
        ring: _Ring = ctx.ring
        grad_BHLK = gradients[0].transpose(1, 2)
        kv = [k_BSGK.contiguous(), v_BSGK.contiguous()]
        grad_q_BLHK = torch.zeros_like(q_BLHK, dtype=lse_BHL.dtype)
        next_grad_kv: _Arrival | None = None
        for pair in _pairs(ring.mesh, q_BLHK.shape[1]):
            next_kv = None if pair.is_last else _send_to_next(kv, ring.mesh, tag=0)
            block_grads = ring.kernel.backward(
                _block(pair, q_BLHK, kv, ring),
                grad_BHLK=grad_BHLK[:, :, pair.queries],
                out_BHLK=out_BHLK[:, :, pair.queries],
                lse_BHL=lse_BHL[:, :, pair.queries].contiguous(),
            )
            block_grad_q, *block_grad_kv = (grad.transpose(1, 2) for grad in block_grads)
            grad_q_BLHK[:, pair.queries] += block_grad_q
            if next_grad_kv is None:
                grad_kv = [grad.to(lse_BHL.dtype).contiguous() for grad in block_grad_kv]
            else:
                grad_kv = next_grad_kv.wait()
                for whole, part in zip(grad_kv, block_grad_kv, strict=True):
                    whole[:, pair.keys] += part
            del block_grads, block_grad_q, block_grad_kv
            next_grad_kv = _send_to_next(grad_kv, ring.mesh, tag=2)
            kv = kv if next_kv is None else next_kv.wait()
        assert next_grad_kv is not None, "the ring has at least one rank"
        grad_k_BSGK, grad_v_BSGK = (grad.to(k_BSGK.dtype) for grad in next_grad_kv.wait())
        return grad_q_BLHK.to(q_BLHK.dtype), grad_k_BSGK, grad_v_BSGK, None


@dataclass(frozen=True, slots=True)
class _Pair:
    """Step of a pass: the slice of this rank's queries and the slice of rank `source`'s keys that form a block."""

    source: int
    queries: slice
    keys: slice
    is_causal: bool
    is_last: bool


def _pairs(mesh: DeviceMesh, length: int) -> Iterator[_Pair]:
    """Yield the steps of a pass. At step i, this rank has the keys and values of rank `rank - i`."""
    rank, num_ranks = mesh.get_local_rank(), mesh.size()
    for step in range(num_ranks):
        source = (rank - step) % num_ranks
        queries, keys = slice(None), slice(None)
        if source < rank:  # the source's first chunk precedes both of this rank's chunks; its second follows both
            keys = slice(0, length // 2)
        elif source > rank:  # both chunks of the source are between this rank's chunks
            queries = slice(length // 2, length)
        # This rank's own chunks are in position order, so they form an ordinary causal block.
        yield _Pair(source, queries, keys, is_causal=source == rank, is_last=step + 1 == num_ranks)


def _block(pair: _Pair, q_BLHK: Tensor, kv: list[Tensor], ring: _Ring) -> AttentionBlock:
    q, k, v = q_BLHK[:, pair.queries], kv[0][:, pair.keys], kv[1][:, pair.keys]
    block = AttentionBlock(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), pair.is_causal)
    if ring.documents is None:
        return block
    documents = ring.documents.chunk(ring.mesh.size(), dim=1)
    own, theirs = documents[ring.mesh.get_local_rank()], documents[pair.source]
    return replace(block, query_documents=own[:, pair.queries], key_documents=theirs[:, pair.keys])


class _Arrival:
    """Tensors in flight from the previous rank, and the tensors being sent, which must stay alive."""

    def __init__(self, sent: list[Tensor], received: list[Tensor], works: list[dist.Work]) -> None:
        self._sent, self._received, self._works = sent, received, works

    def wait(self) -> list[Tensor]:
        for work in self._works:
            work.wait()
        return self._received


def _send_to_next(tensors: list[Tensor], mesh: DeviceMesh, *, tag: int) -> _Arrival:
    """Start to send contiguous tensors to the next rank and to receive the previous rank's; tensor i has `tag + i`."""
    group, rank, num_ranks = mesh.get_group(), mesh.get_local_rank(), mesh.size()
    received = [torch.empty_like(tensor) for tensor in tensors]
    operations = [
        dist.P2POp(operation, tensor, group=group, tag=tag + index, group_peer=(rank + step) % num_ranks)
        for operation, step, messages in ((dist.isend, 1, tensors), (dist.irecv, -1, received))
        for index, tensor in enumerate(messages)
    ]
    return _Arrival(tensors, received, dist.batch_isend_irecv(operations))
