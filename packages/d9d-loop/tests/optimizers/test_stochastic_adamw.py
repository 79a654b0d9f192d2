import math
import re

import pytest
import torch
from torch import Tensor, nn

from d9d_dist import UserError
from d9d_dist.values.counter_random import random_bits_at
from d9d_loop.optimizers import StochasticAdamW
from d9d_loop.optimizers.stochastic_adamw import draw, round_stochastically

NUM = 1_000_000


def _rounded(values: Tensor, *, key: int = 0) -> Tensor:
    return round_stochastically(values, draw(random_bits_at(torch.arange(len(values)), key), 0))


@pytest.mark.parametrize("value", [1.001, -1.001, 3.0e-20, 1 / 3, -65504.3, 1e-41])
def test_rounding_is_unbiased_within_4_sigma(value: float) -> None:
    source = torch.full((NUM,), value)
    rounded = _rounded(source).double()
    exact = source[0].double().item()
    # The two neighbors in bfloat16, by truncation of the bits.
    low = (source[:1].view(torch.int32) & -0x10000).view(torch.float32).double().item()
    high = ((source[:1].view(torch.int32) & -0x10000) + 0x10000).view(torch.float32).double().item()
    assert set(rounded.unique().tolist()) == {low, high}
    share = (exact - low) / (high - low)
    sigma = abs(high - low) * math.sqrt(share * (1 - share) / NUM)
    assert abs(rounded.mean().item() - exact) < 4 * sigma


def test_representable_values_are_kept() -> None:
    exact = torch.randn(1000, generator=torch.Generator().manual_seed(0)).bfloat16()
    special = torch.tensor([0.0, -0.0, math.inf, -math.inf]).bfloat16()
    for values in (exact, special):
        assert torch.equal(_rounded(values.float()).view(torch.int16), values.view(torch.int16))
    # NaNs that rounding could change: all bits set, and only truncated bits set.
    nans = torch.tensor([0x7FFFFFFF, 0x7F800001, -1, -0x7FFFFF], dtype=torch.int32).view(torch.float32)
    for key in range(10):
        assert _rounded(nans.repeat(100), key=key).isnan().all()


def _named(dtype: torch.dtype, size: int = 40) -> list[tuple[str, Tensor]]:
    draws = torch.Generator().manual_seed(0)
    return [(name, torch.randn(size, 3, generator=draws).to(dtype).requires_grad_()) for name in ("a", "b")]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_without_rounding_updates_equal_torch(dtype: torch.dtype) -> None:
    ours, theirs = _named(dtype), _named(dtype)
    settings = {"lr": 0.1, "betas": (0.8, 0.9), "eps": 1e-3, "weight_decay": 0.2}
    mine = StochasticAdamW(ours, **settings)  # ty: ignore[invalid-argument-type]
    other = torch.optim.AdamW(theirs, **settings)  # ty: ignore[invalid-argument-type]
    draws = torch.Generator().manual_seed(1)
    for _ in range(5):
        for (_, w), (_, twin) in zip(ours, theirs, strict=True):
            w.grad = torch.randn(w.shape, generator=draws).to(dtype)
            twin.grad = w.grad.clone()
        mine.step()
        other.step()
    tolerance = 5 * 10 * torch.finfo(dtype).eps  # five steps of ten operations on both sides, each half an eps
    for (_, w), (_, twin) in zip(ours, theirs, strict=True):
        torch.testing.assert_close(w, twin, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("average_dtype", [torch.float32, torch.bfloat16])
def test_small_updates_are_unbiased(average_dtype: torch.dtype) -> None:
    """Steps of a tenth of the last bit: rounded to nearest, no step would change a weight."""
    num, steps, lr = 20_000, 20, 2.0**-11
    weight = torch.ones(num, 1, dtype=torch.bfloat16, requires_grad=True)
    nearest = torch.ones(num, 1, dtype=torch.bfloat16, requires_grad=True)
    optimizer = StochasticAdamW([("w", weight)], lr=lr, weight_decay=0.0, average_dtype=average_dtype)
    plain = torch.optim.AdamW([nearest], lr=lr, weight_decay=0.0)
    for _ in range(steps):
        weight.grad, nearest.grad = -torch.full_like(weight, 0.25), -torch.full_like(nearest, 0.25)
        optimizer.step()
        plain.step()
    assert (nearest == 1).all()
    moved = (weight.double() - 1).mean().item()
    # A step moves by lr; the last bit is 2^-7, so that a weight's variance grows by at most 2^-7 lr in a step.
    sigma = (2.0**-7 * lr * steps / num) ** 0.5
    bias = 0.0 if average_dtype == torch.float32 else 0.01 * lr * steps  # from the square root of a rounded moment
    assert abs(moved - lr * steps) < 4 * sigma + bias
    state = optimizer.state[weight]
    assert state["exp_avg"].dtype == state["exp_avg_sq"].dtype == average_dtype
    gradient_mean = 0.25 * (1 - 0.9**steps)
    assert state["exp_avg"].double().mean().item() == pytest.approx(-gradient_mean, rel=2e-3)


def test_random_bits_depend_on_parameter_and_seed() -> None:
    results = []
    for seed in (0, 0, 1):
        named = [(name, torch.ones(1000, 1, dtype=torch.bfloat16, requires_grad=True)) for name in ("a", "b")]
        optimizer = StochasticAdamW(named, lr=1e-3, seed=seed)
        for _, w in named:
            w.grad = torch.ones_like(w)
        optimizer.step()
        results.append([w.detach() for _, w in named])
    assert torch.equal(results[0][0], results[1][0])
    assert not torch.equal(results[0][0], results[0][1])
    assert not torch.equal(results[0][0], results[2][0])


def test_parameters_without_names_are_refused() -> None:
    with pytest.raises(UserError, match="got parameters without names, which its random numbers depend on; expected"):
        StochasticAdamW(nn.Linear(2, 2).parameters())


def test_other_dtypes_are_refused() -> None:
    with pytest.raises(
        UserError, match=re.escape("got weight torch.float16, bias torch.float16; expected torch.bfloat")
    ):
        StochasticAdamW(nn.Linear(2, 2).half().named_parameters())
