from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from d9d_dist import MeshConfig
from d9d_dist.context_parallel.blocks import AttentionBlock, MathKernel
from d9d_dist.context_parallel.ring import RingAttention
from d9d_dist.testing import run_ranks


class _Noting:
    """`MathKernel` that records the shapes of its blocks."""

    def __init__(self) -> None:
        self._kernel = MathKernel()
        self.forwards: list[tuple[int, int, bool]] = []
        self.backwards: list[tuple[int, int, bool]] = []

    def forward(self, block: AttentionBlock) -> tuple[Tensor, Tensor]:
        self.forwards.append((block.q.shape[2], block.k.shape[2], block.causal))
        return self._kernel.forward(block)

    def backward(
        self, block: AttentionBlock, *, grad_BHLK: Tensor, out_BHLK: Tensor, lse_BHL: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        self.backwards.append((block.q.shape[2], block.k.shape[2], block.causal))
        return self._kernel.backward(block, grad_BHLK=grad_BHLK, out_BHLK=out_BHLK, lse_BHL=lse_BHL)


def _inputs(ctx_device: torch.device, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    return [torch.randn(1, 6, n, 4, dtype=dtype, device=ctx_device).requires_grad_() for n in (4, 2, 2)]


def _blocks() -> tuple[list[tuple[int, int, bool]], list[tuple[int, int, bool]]]:
    with MeshConfig(context_parallel_shard=-1).build() as ctx:
        kernel = _Noting()
        RingAttention(ctx.mesh_for("batch")["cp"], kernel=kernel)(*_inputs(ctx.device)).sum().backward()
        return kernel.forwards, kernel.backwards


def test_ring_ranks_compute_equally_many_scores() -> None:
    for rank, (forwards, backwards) in enumerate(run_ranks(_blocks, world_size=4)):
        assert forwards == [(6, 6, True)] + rank * [(6, 3, False)] + (3 - rank) * [(3, 6, False)]
        assert backwards == forwards


def _traffic(dtype: torch.dtype) -> tuple[int, list[tuple[torch.dtype, int]]]:
    """Return the number of elements saved for backward, and the number sent to the next rank."""
    with MeshConfig(context_parallel_shard=-1).build() as ctx:
        inputs, saved, sent = _inputs(ctx.device, dtype), [0], []

        def note(tensor: Tensor) -> Tensor:
            saved[0] += tensor.numel()
            return tensor

        def send(operations: list[dist.P2POp]) -> list[dist.Work]:
            sent.extend((op.tensor.dtype, op.tensor.numel()) for op in operations if op.op is dist.isend)
            return batch(operations)

        batch = dist.batch_isend_irecv
        with patch.object(dist, "batch_isend_irecv", send), saved_tensors_hooks(note, lambda tensor: tensor):
            RingAttention(ctx.mesh_for("batch")["cp"])(*inputs).sum().backward()
        return saved[0], sent


def test_ring_saves_local_tensors_and_sends_keys_values_and_their_gradients() -> None:
    q, k, lse = 6 * 4 * 4, 6 * 2 * 4, 6 * 4
    for saved, sent in run_ranks(_traffic, torch.bfloat16, world_size=4):
        assert saved == 2 * q + 2 * k + lse
        assert sent.count((torch.bfloat16, k)) == 2 * (3 + 3)
        assert sent.count((torch.float32, k)) == 2 * 4
        assert len(sent) == 20


def _one_rank() -> float:
    with MeshConfig().build() as ctx:
        q, k, v = _inputs(ctx.device)
        mesh = ctx.mesh_for("batch")["cp"]
        out = RingAttention(mesh, kernel=MathKernel())(q, k, v)
        return (out - RingAttention(mesh)(q, k, v)).abs().max().item()


def test_kernels_agree_on_one_rank() -> None:
    assert all(error < 1e-14 for error in run_ranks(_one_rank, world_size=1))
