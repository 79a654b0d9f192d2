import random

import numpy as np
import torch

from d9d_loop.data_random import data_random, position_random, seed_data_random


def _draw() -> tuple[float, float, float]:
    return random.random(), torch.rand(()).item(), float(np.random.rand())  # noqa: S311


def test_a_stream_follows_from_seed_step_and_rank_and_leaves_no_trace() -> None:
    torch.manual_seed(3)
    random.seed(3)
    np.random.seed(3)
    expected = [_draw() for _ in range(2)]
    torch.manual_seed(3)
    random.seed(3)
    np.random.seed(3)
    drawn = [_draw()]
    streams = []
    for seed, step, dp_rank in ((0, 0, 0), (0, 0, 1), (0, 1, 0), (1, 0, 0), (0, 0, 0)):
        with data_random(seed, step=step, dp_rank=dp_rank):
            streams.append(_draw())
    assert [*drawn, _draw()] == expected
    assert streams[0] == streams[-1]
    for values in zip(*streams[:4], strict=True):
        assert len(set(values)) == 4


def test_a_position_has_a_stream_in_any_process() -> None:
    torch.manual_seed(3)
    before = torch.get_rng_state()
    with position_random(1, position=8):
        drawn = _draw()
    assert torch.equal(torch.get_rng_state(), before)
    with position_random(1, position=9):
        assert _draw() != drawn
    with data_random(0, step=0, dp_rank=0):  # puts back what is seeded in here
        seed_data_random(1, position=8)
        assert _draw() == drawn
    assert torch.equal(torch.get_rng_state(), before)
