import torch

from d9d_loop.optimizers.random_bits import bits_at, draw

_MASK = 2**64 - 1


def _splitmix(index: int, key: int) -> int:
    """Compute SplitMix64 with Python integers."""
    bits = (index * 0x9E3779B97F4A7C15 + key) & _MASK
    bits = ((bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    bits = ((bits ^ (bits >> 27)) * 0x94D049BB133111EB) & _MASK
    return bits ^ (bits >> 31)


def test_bits_equal_the_paper() -> None:
    indices, key = [0, 1, 2, 12345, 2**40 + 7], 2**62 + 12345
    found = bits_at(torch.tensor(indices), key)
    expected = [_splitmix(index, key) for index in indices]
    assert [value & _MASK for value in found.tolist()] == expected
    for number in range(4):
        assert draw(found, number).tolist() == [(value >> (16 * number)) & 0xFFFF for value in expected]


def test_draws_are_uniform_and_independent() -> None:
    num = 1 << 18
    bits = bits_at(torch.arange(num), 5)
    draws = torch.stack([draw(bits, number) for number in range(4)]).double()
    uniform = draws / 65536 - 0.5
    # The mean of n values has a standard deviation of sqrt(1 / 12 n), that of products of two has 1 / 12 sqrt(n).
    assert uniform.mean(dim=1).abs().max() < 4.5 * (1 / 12 / num) ** 0.5
    products = uniform @ uniform.T / num
    assert (products - products.diag().diag()).abs().max() < 4.5 / 12 / num**0.5
    neighbours = (uniform[:, 1:] * uniform[:, :-1]).mean(dim=1)
    assert neighbours.abs().max() < 4.5 / 12 / num**0.5
    counts = torch.bincount((draws[0] / 256).long(), minlength=256).double()
    chi_squared = ((counts - num / 256) ** 2 / (num / 256)).sum()
    assert abs(chi_squared - 255) < 4.5 * (2 * 255) ** 0.5
