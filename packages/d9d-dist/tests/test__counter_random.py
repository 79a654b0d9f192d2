import torch

from d9d_dist._counter_random import normal_at, uniform_at
from d9d_dist.seeds import stream_key

N = 1 << 20


def test_any_slice_equals_the_slice_of_the_full_tensor() -> None:
    index = torch.arange(1000)
    for draw in (uniform_at, normal_at):
        whole = draw(index, stream_key(0, "weight"))
        assert torch.equal(draw(index[137:641], stream_key(0, "weight")), whole[137:641])


def test_uniform_numbers_fill_the_interval_evenly() -> None:
    values = uniform_at(torch.arange(N), stream_key("uniform"))
    assert values.min().item() > 0.0
    assert values.max().item() < 1.0
    counts = torch.histc(values, bins=64, min=0, max=1)
    chi_squared = ((counts - N / 64) ** 2 / (N / 64)).sum().item()
    assert chi_squared < 63 + 5 * (2 * 63) ** 0.5


def test_normal_numbers_have_the_moments_of_a_normal() -> None:
    values = normal_at(torch.arange(N), stream_key("normal"))
    sigma = N**-0.5
    assert abs(values.mean().item()) < 5 * sigma
    assert abs(values.square().mean().item() - 1) < 5 * sigma * 2**0.5
    assert abs((values**3).mean().item()) < 5 * sigma * 15**0.5
    assert abs((values**4).mean().item() - 3) < 5 * sigma * 96**0.5


def test_neighbours_and_streams_are_uncorrelated() -> None:
    values, others = normal_at(torch.arange(N), stream_key("a")), normal_at(torch.arange(N), stream_key("b"))
    assert abs((values[1:] * values[:-1]).mean().item()) < 5 * N**-0.5
    assert abs((values * others).mean().item()) < 5 * N**-0.5
