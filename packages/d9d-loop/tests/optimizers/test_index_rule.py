import math

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor

from d9d_dist import MeshConfig, full_tensor, local_tensor
from d9d_dist.shards import from_local, local_part
from d9d_dist.testing import run_ranks
from d9d_loop.optimizers.index_rule import global_indices, index_rules

CASES: list[tuple[tuple[int, ...], tuple[Placement, Placement]]] = [
    ((7,), (Shard(0), Replicate())),
    ((1,), (Shard(0), Replicate())),
    ((8, 6), (Shard(0), Shard(1))),
    ((5, 6), (Replicate(), Shard(1))),
    ((4, 3, 6), (Shard(1), Shard(2))),
    ((4, 3, 6), (Shard(0), Shard(2))),
    ((4, 6, 5), (Replicate(), Shard(1))),
    ((2, 4, 3, 6), (Shard(1), Shard(3))),
    ((2, 4, 3, 6), (Shard(0), Shard(2))),
    ((), (Replicate(), Replicate())),
]


def _indices(tensor: Tensor) -> Tensor:
    """Return all global indices by the formula, in chunks that do not align with runs."""
    parts = [
        global_indices(rule, begin, min(begin + 5, count), torch.device("cpu"))
        for count, rule in index_rules(tensor)
        for begin in range(0, count, 5)
    ]
    return torch.cat(parts) if parts else torch.empty(0, dtype=torch.int64)


def _check() -> None:
    with MeshConfig(data_parallel_shard=-1).build():
        mesh = init_device_mesh("cpu", (2, 2))
        for shape, placements in CASES:
            # Each element's value is its own index.
            full = torch.arange(math.prod(shape)).view(shape)
            tensor = distribute_tensor(full, mesh, placements)
            part = local_tensor(tensor)
            assert torch.equal(_indices(tensor), part.flatten()), (shape, placements)
            assert torch.equal(local_part(full, tensor), part), (shape, placements)
            assert torch.equal(full_tensor(from_local(part, tensor)), full), (shape, placements)


def test_every_element_has_its_global_index() -> None:
    run_ranks(_check, world_size=4)


@pytest.mark.parametrize("shape", [(), (3,), (2, 3), (2, 0), (2, 3, 4)], ids=str)
def test_a_plain_tensor_is_a_full_box(shape: tuple[int, ...]) -> None:
    tensor = torch.arange(math.prod(shape)).view(shape)
    assert torch.equal(_indices(tensor), tensor.flatten())
    assert torch.equal(local_part(tensor, tensor), tensor)
    assert from_local(tensor, tensor) is tensor
