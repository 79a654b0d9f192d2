import random

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from d9d_dist import MeshConfig, rank_role, seed_everything, stream_key
from d9d_dist.testing import Device, run_ranks


def _draws(degrees: dict[str, int], step: int) -> tuple[float, float, float]:
    with MeshConfig(**degrees).build() as ctx:
        seed_everything(7, ctx, step=step)
        return random.random(), float(np.random.rand()), torch.rand(()).item()  # noqa: S311


@pytest.mark.world_size(4)
def test_seeds_differ_between_data_ranks_and_equal_between_tensor_ranks(device: Device) -> None:
    ranks = run_ranks(_draws, {"data_parallel_shard": 2, "tensor_parallel": 2}, 0, world_size=4, device=device)
    assert ranks[0] == ranks[1]
    assert ranks[2] == ranks[3]
    for ours, theirs in zip(ranks[0], ranks[2], strict=True):
        assert ours != theirs


DROPOUT_DEGREES = [
    {"pipeline_parallel": 2, "data_parallel_shard": 2, "tensor_parallel": 2},
    {"data_parallel_replicate": 2, "context_parallel_shard": 2, "tensor_parallel": 2},
    {"context_parallel_shard": 2, "context_parallel_replicate": 2, "tensor_parallel": 2},
    {"data_parallel_replicate": 2, "data_parallel_shard": 2, "context_parallel_shard": 2},
]


def _kept_by_dropout() -> list[tuple[tuple[int, ...], list[bool]]]:
    """Return, for each mesh, this rank's coordinate without tp and the dropout mask."""
    kept = []
    for degrees in DROPOUT_DEGREES:
        with MeshConfig(**degrees).build() as ctx:
            seed_everything(11, ctx)
            mask = F.dropout(torch.ones(500, device=ctx.device), 0.3) != 0
            kept.append((tuple(ctx.coordinate("batch", axis) for axis in ("pp", "dp", "cp")), mask.tolist()))
    return kept


@pytest.mark.world_size(8)
def test_dropout_is_equal_only_within_a_tensor_parallel_group(device: Device) -> None:
    ranks = run_ranks(_kept_by_dropout, world_size=8, device=device)
    for degrees, *mesh in zip(DROPOUT_DEGREES, *ranks, strict=True):
        masks: dict[tuple[int, ...], set[tuple[bool, ...]]] = {}
        for place, mask in mesh:
            assert 300 < sum(mask) < 400
            masks.setdefault(place, set()).add(tuple(mask))
        assert len(masks) == 8 // degrees.get("tensor_parallel", 1)
        assert all(len(found) == 1 for found in masks.values())
        assert len(set.union(*masks.values())) == len(masks)


def test_the_same_seed_and_step_give_the_same_numbers() -> None:
    assert _draws({}, 3) == _draws({}, 3)
    assert _draws({}, 3) != _draws({}, 4)


def test_a_key_is_the_same_on_every_platform() -> None:
    assert stream_key(0, "layers.0.weight", 1) == 4495649201911211739
    assert stream_key(1, 23) != stream_key(12, 3)


def _roles() -> dict[str, list[int]]:
    with MeshConfig(data_parallel_shard=2).build() as ctx:
        return rank_role(ctx)


def test_the_role_of_a_rank_has_its_coordinates_and_the_axis_sizes() -> None:
    others = {axis: [0, 1] for axis in ("pp", "cp", "tp")}
    assert run_ranks(_roles) == [{**others, "dp": [rank, 2]} for rank in range(2)]
