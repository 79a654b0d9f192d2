import random
from collections.abc import Callable

import numpy as np
import pytest
import torch

from d9d_dist import UserError
from d9d_loop.data.sample_reader import check_draws_nothing, seed_sample
from d9d_loop.isolation import restored_random


def _draw() -> tuple[float, float, float]:
    return random.random(), torch.rand(()).item(), float(np.random.rand())  # noqa: S311


def test_random_streams_depend_on_seed_and_position_only() -> None:
    torch.manual_seed(3)
    random.seed(3)
    np.random.seed(3)
    expected = [_draw() for _ in range(2)]
    torch.manual_seed(3)
    random.seed(3)
    np.random.seed(3)
    drawn = [_draw()]
    streams = []
    for seed, position in ((0, 0), (0, 1), (1, 0), (1, 1), (0, 0)):
        with restored_random():
            seed_sample(seed, position)
            streams.append(_draw())
    assert [*drawn, _draw()] == expected
    assert streams[0] == streams[-1]
    for values in zip(*streams[:4], strict=True):
        assert len(set(values)) == 4


def test_a_position_has_the_same_stream_in_any_process() -> None:
    with restored_random():
        seed_sample(1, 8)
        drawn = _draw()
        torch.manual_seed(3)
        seed_sample(1, 8)
        assert _draw() == drawn
        seed_sample(1, 9)
        assert _draw() != drawn


@pytest.mark.parametrize(
    ("draw", "name"),
    [(random.random, "Python"), (np.random.rand, "NumPy"), (lambda: torch.rand(()), "torch")],
    ids=["python", "numpy", "torch"],
)
def test_undeclared_random_draws_are_detected(draw: Callable[[], object], name: str) -> None:
    check_draws_nothing(lambda: torch.rand((), generator=torch.Generator()))
    with pytest.raises(
        UserError, match=f"drew random numbers from {name}; expected none, because the data provider has"
    ):
        check_draws_nothing(draw)


def test_draws_of_other_threads_are_ignored() -> None:
    draws = iter([random.random, object])

    def read() -> None:
        next(draws)()

    check_draws_nothing(read)
