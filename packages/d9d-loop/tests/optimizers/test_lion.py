from typing import Any

import pytest
import torch

from d9d_loop.optimizers import Lion, ScheduleFreeAdamW


def test_updates_equal_the_paper() -> None:
    """Compute algorithm 2 of arXiv:2302.06675, one element at a time."""
    draws = torch.Generator().manual_seed(0)
    start = torch.randn(7, generator=draws, dtype=torch.float64)
    gradients = torch.randn(5, 7, generator=draws, dtype=torch.float64)
    weight = start.clone().requires_grad_()
    optimizer = Lion([weight], lr=0.1, betas=(0.7, 0.8), weight_decay=0.3)
    for gradient in gradients:
        weight.grad = gradient.clone()
        optimizer.step()
    for found, w, column in zip(weight.tolist(), start.tolist(), gradients.T.tolist(), strict=True):
        m = 0.0
        for g in column:
            c = 0.7 * m + 0.3 * g
            w = w - 0.1 * ((1.0 if c > 0 else -1.0) + 0.3 * w)  # noqa: PLW2901
            m = 0.8 * m + 0.2 * g
        assert abs(found - w) < 1e-13


@pytest.mark.parametrize("kind", [Lion, ScheduleFreeAdamW])
def test_complex_numbers_are_pairs_of_real_ones(kind: Any) -> None:
    draws = torch.Generator().manual_seed(0)
    start, *gradients = torch.randn(4, 3, 2, generator=draws, dtype=torch.float64)
    pairs, weight = start.clone().requires_grad_(), torch.view_as_complex(start.clone()).requires_grad_()
    optimizers = [kind([each], lr=0.1, weight_decay=0.3) for each in (pairs, weight)]
    for gradient in gradients:
        pairs.grad, weight.grad = gradient, torch.view_as_complex(gradient)
        for optimizer in optimizers:
            optimizer.step()
    assert not torch.equal(pairs, start)
    assert torch.equal(torch.view_as_real(weight.detach()), pairs)


def test_factors_are_not_rounded_to_the_weight_dtype() -> None:
    draws = torch.Generator().manual_seed(1)
    start, gradient = (torch.randn(4096, generator=draws).bfloat16() for _ in range(2))
    weight = start.clone().requires_grad_()
    optimizer = Lion([weight], lr=0.01, betas=(0.9, 0.99), weight_decay=0.3)
    average = torch.zeros_like(start)
    expected = start.clone()
    for _ in range(2):
        weight.grad = gradient.clone()
        optimizer.step()
        # Each operation computes in float32 and rounds its result once.
        update = average.clone().mul_(0.9).add_(gradient, alpha=1.0 - 0.9).sign_()
        expected.mul_(1.0 - 0.01 * 0.3).add_(update, alpha=-0.01)
        average.mul_(0.99).add_(gradient, alpha=1.0 - 0.99)
    assert torch.equal(weight, expected)
    assert torch.equal(optimizer.state[weight]["exp_avg"], average)
