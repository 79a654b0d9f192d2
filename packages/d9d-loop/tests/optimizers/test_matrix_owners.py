import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor

from d9d_dist import MeshConfig, local_tensor
from d9d_dist.shards import local_part
from d9d_dist.testing import run_ranks
from d9d_loop.optimizers.matrix_owners import map_matrices

# Matrices with too few rows for all ranks, stacks, and more matrices than ranks.
CASES: list[tuple[tuple[int, ...], tuple[Placement, Placement]]] = [
    ((4, 6), (Replicate(), Shard(0))),
    ((1, 6), (Replicate(), Shard(0))),
    ((5, 3), (Shard(1), Replicate())),
    ((3, 5), (Replicate(), Shard(1))),
    ((4, 4), (Shard(0), Shard(1))),
    ((3, 3), (Replicate(), Replicate())),
    ((4, 2, 3), (Shard(0), Replicate())),
    ((4, 2, 3), (Shard(0), Shard(2))),
    ((2, 3, 5), (Replicate(), Shard(1))),
    ((7, 2), (Replicate(), Shard(0))),
]


def _check() -> list[int]:
    """Return the positions of the matrices that this rank computed."""
    with MeshConfig(data_parallel_shard=-1).build():
        mesh = init_device_mesh("cpu", (2, 2))
        draws = torch.Generator().manual_seed(0)
        wholes = [torch.randn(shape, generator=draws, dtype=torch.float64) for shape, _ in CASES]
        tensors = [distribute_tensor(whole, mesh, case[1]) for whole, case in zip(wholes, CASES, strict=True)]
        computed: list[int] = []

        def compute(x: Tensor) -> Tensor:
            computed.extend(i for i, whole in enumerate(wholes) if x.shape == whole.shape and torch.equal(x, whole))
            return x / x.norm(dim=(-2, -1), keepdim=True)

        results = dict(map_matrices(compute, [local_tensor(tensor) for tensor in tensors], tensors))
        assert sorted(results) == list(range(len(CASES)))
        for index, result in results.items():
            torch.testing.assert_close(result, local_part(compute(wholes[index]), tensors[index]), rtol=1e-14, atol=0.0)
        return computed[: -len(CASES)]


def test_a_matrix_sharded_over_one_axis_is_computed_by_one_rank_of_each_replica() -> None:
    computed = run_ranks(_check, world_size=4)
    owners = [sum(index in ranks for ranks in computed) for index in range(len(CASES))]
    # Every replica has an owner. All ranks compute matrices sharded over two axes; stacked matrices stay in place.
    assert owners == [2, 2, 2, 2, 4, 4, 0, 4, 2, 2]
