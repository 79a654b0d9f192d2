import random
from collections.abc import Callable

import numpy as np
import pytest
import torch

from d9d_dist import UserError
from d9d_loop.data.data_random import check_draws_nothing, position_random, seed_data_random


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
        with position_random(seed, position=position):
            streams.append(_draw())
    assert [*drawn, _draw()] == expected
    assert streams[0] == streams[-1]
    for values in zip(*streams[:4], strict=True):
        assert len(set(values)) == 4


def test_a_position_has_the_same_stream_in_any_process() -> None:
    torch.manual_seed(3)
    before = torch.get_rng_state()
    with position_random(1, position=8):
        drawn = _draw()
    assert torch.equal(torch.get_rng_state(), before)
    with position_random(1, position=9):
        assert _draw() != drawn
    with position_random(0, position=0):  # restores the generators seeded in the body
        seed_data_random(1, position=8)
        assert _draw() == drawn
    assert torch.equal(torch.get_rng_state(), before)


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
