"""Parameters that only some FSDP ranks use have the gradients of a single process; unused ones have none."""

from collections.abc import Mapping

import pytest
import torch
from torch import nn

from d9d_dist import GradientSync, MeshConfig, parallelize_hsdp, set_gradient_sync
from d9d_dist.testing import assert_rounds_like, full_gradients, run_ranks

_NUM_MICROBATCHES = 2


class _Branches(nn.Module):
    """Two branches of equal sizes, whose gradients FSDP could confuse, and one unused branch."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(3, 5)
        self.branches = nn.ModuleList(nn.Linear(5, 3) for _ in range(3))
        self.head = nn.Linear(3, 1)

    def forward(self, x: torch.Tensor, branches: list[int]) -> torch.Tensor:
        stem = self.stem(x)
        return self.head(torch.stack([self.branches[branch](stem) for branch in branches]).sum(dim=0))


def _model() -> _Branches:
    torch.manual_seed(0)
    return _Branches()


def _batch(rank: int, microbatch: int) -> torch.Tensor:
    return torch.randn(4, 3, generator=torch.Generator().manual_seed(10 * rank + microbatch))


def _chosen(kind: str, rank: int, microbatch: int) -> list[int]:
    """Return the branches that a rank uses: one of its own, one more on rank 0, and another one in each microbatch."""
    match kind:
        case "own":
            return [rank % 2]
        case "more":
            return [0, 1] if rank == 0 else [0]
    return [(rank + microbatch) % 2] if rank % 2 else [0]


def _on_ranks(kind: str, shard: int, replicate: int) -> Mapping[str, torch.Tensor]:
    with MeshConfig(data_parallel_shard=shard, data_parallel_replicate=replicate).build() as ctx:
        model = _model()
        mesh = ctx.mesh_for("dense")["dp_replicate", "dp_cp_shard"]
        parallelize_hsdp(model, mesh, shard_axis="dp_cp_shard")
        sync = GradientSync(model, num_microbatches=_NUM_MICROBATCHES)
        for _ in range(2):  # the first step must not affect the second
            model.zero_grad()
            for microbatch in range(_NUM_MICROBATCHES):
                set_gradient_sync(model, microbatch == _NUM_MICROBATCHES - 1)
                model(_batch(ctx.rank, microbatch), _chosen(kind, ctx.rank, microbatch)).sum().backward()
            sync.finish()
        return full_gradients(model)


def _in_one_process(kind: str, world_size: int, dtype: torch.dtype) -> Mapping[str, torch.Tensor]:
    model = _model().to(dtype)
    for rank in range(world_size):
        for microbatch in range(_NUM_MICROBATCHES):
            model(_batch(rank, microbatch).to(dtype), _chosen(kind, rank, microbatch)).sum().backward()
    return full_gradients(model)


@pytest.mark.parametrize("kind", ["own", "more", "changing"])
@pytest.mark.parametrize(("shard", "replicate"), [(2, 1), (2, 2)])
def test_ranks_may_use_different_parameters(kind: str, shard: int, replicate: int) -> None:
    world_size = shard * replicate
    expected, peer = (_in_one_process(kind, world_size, dtype) for dtype in (torch.float64, torch.float32))
    assert expected.keys() >= {"branches.0.weight", "branches.1.weight"}
    assert "branches.2.weight" not in expected
    for gradients in run_ranks(_on_ranks, kind, shard, replicate, world_size=world_size):
        assert gradients.keys() == expected.keys()
        assert_rounds_like(gradients, expected, peer=peer)
