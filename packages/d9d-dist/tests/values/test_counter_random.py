import torch

from d9d_dist.values.counter_random import normal_at, random_bits_at, uniform_at
from d9d_dist.values.seeds import stream_key

N = 1 << 20
_MASK = 2**64 - 1


def test_numbers_of_a_slice_equal_the_slice_of_all_numbers() -> None:
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


def test_normal_numbers_have_the_moments_of_a_normal_distribution() -> None:
    values = normal_at(torch.arange(N), stream_key("normal"))
    sigma = N**-0.5
    assert abs(values.mean().item()) < 5 * sigma
    assert abs(values.square().mean().item() - 1) < 5 * sigma * 2**0.5
    assert abs((values**3).mean().item()) < 5 * sigma * 15**0.5
    assert abs((values**4).mean().item() - 3) < 5 * sigma * 96**0.5


def test_neighbors_and_streams_are_uncorrelated() -> None:
    values, others = normal_at(torch.arange(N), stream_key("a")), normal_at(torch.arange(N), stream_key("b"))
    assert abs((values[1:] * values[:-1]).mean().item()) < 5 * N**-0.5
    assert abs((values * others).mean().item()) < 5 * N**-0.5


def _splitmix(index: int, key: int) -> int:
    """SplitMix64 in Python's integers."""
    bits = (index * 0x9E3779B97F4A7C15 + key) & _MASK
    bits = ((bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    bits = ((bits ^ (bits >> 27)) * 0x94D049BB133111EB) & _MASK
    return bits ^ (bits >> 31)


def test_random_bits_equal_splitmix64() -> None:
    indices, key = [0, 1, 2, 12345, 2**40 + 7], 2**62 + 12345
    found = random_bits_at(torch.tensor(indices), key)
    expected = [_splitmix(index, key) for index in indices]
    assert [value & _MASK for value in found.tolist()] == expected


def test_the_four_words_of_16_bits_are_uniform_and_independent() -> None:
    num = 1 << 18
    bits = random_bits_at(torch.arange(num), 5)
    draws = torch.stack([(bits >> 16 * number) & 0xFFFF for number in range(4)]).double()
    uniform = draws / 65536 - 0.5
    # Standard deviation of the mean of n values: sqrt(1 / (12 n)); of the mean of n products of two: 1 / (12 sqrt(n)).
    assert uniform.mean(dim=1).abs().max() < 4.5 * (1 / 12 / num) ** 0.5
    products = uniform @ uniform.T / num
    assert (products - products.diag().diag()).abs().max() < 4.5 / 12 / num**0.5
    neighbors = (uniform[:, 1:] * uniform[:, :-1]).mean(dim=1)
    assert neighbors.abs().max() < 4.5 / 12 / num**0.5
    counts = torch.bincount((draws[0] / 256).long(), minlength=256).double()
    chi_squared = ((counts - num / 256) ** 2 / (num / 256)).sum()
    assert abs(chi_squared - 255) < 4.5 * (2 * 255) ** 0.5
