import random

import numpy as np
import torch

from d9d_dist import MeshConfig, seed_everything, stream_key
from d9d_dist.testing import run_ranks


def _draws(degrees: dict[str, int], step: int) -> tuple[float, float, float]:
    with MeshConfig(**degrees).build() as ctx:
        seed_everything(7, ctx, step=step)
        return random.random(), float(np.random.rand()), torch.rand(()).item()  # noqa: S311


def test_ranks_with_other_data_draw_other_numbers_and_tensor_parallel_ranks_draw_the_same() -> None:
    ranks = run_ranks(_draws, {"data_parallel_shard": 2, "tensor_parallel": 2}, 0, world_size=4)
    assert ranks[0] == ranks[1]
    assert ranks[2] == ranks[3]
    for ours, theirs in zip(ranks[0], ranks[2], strict=True):
        assert ours != theirs


def test_the_same_seed_and_step_give_the_same_numbers() -> None:
    assert _draws({}, 3) == _draws({}, 3)
    assert _draws({}, 3) != _draws({}, 4)


def test_a_key_is_the_same_everywhere() -> None:
    assert stream_key(0, "layers.0.weight", 1) == 4495649201911211739
    assert stream_key(1, 23) != stream_key(12, 3)
