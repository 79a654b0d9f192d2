import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from d9d_dist import MeshConfig, gather_in_blocks
from d9d_dist.testing import run_ranks

SHAPE = (7, 5, 3)

CASES: list[tuple[Placement, Placement]] = [
    (Shard(0), Replicate()),
    (Replicate(), Shard(1)),
    (Shard(0), Shard(2)),
    (Shard(2), Shard(1)),
    (Replicate(), Replicate()),
]


def _full() -> Tensor:
    return torch.arange(105, dtype=torch.float64).view(SHAPE)


def _gather() -> list[list[Tensor]]:
    with MeshConfig(data_parallel_shard=2, tensor_parallel=2).build() as ctx:
        mesh = ctx.mesh_for("dense")["dp_cp_shard", "tp"]
        found = []
        for placements in CASES:
            tensor = distribute_tensor(_full(), mesh, placements, src_data_rank=None)
            assert isinstance(tensor, DTensor)
            found.append([gather_in_blocks(tensor, block_bytes=size) for size in (8, 100, 1 << 20)])
        return found


def test_every_rank_gets_the_full_tensor() -> None:
    for found in run_ranks(_gather, world_size=4):
        for placements, tensors in zip(CASES, found, strict=True):
            for tensor in tensors:
                assert torch.equal(tensor, _full()), placements


@pytest.mark.parametrize("tensor", [torch.ones(3), torch.zeros(0, 2)])
def test_a_plain_tensor_is_returned(tensor: Tensor) -> None:
    assert torch.equal(gather_in_blocks(tensor, block_bytes=1), tensor)
