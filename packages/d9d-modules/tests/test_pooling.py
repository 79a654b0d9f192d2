from typing import Any

import pytest
import torch

from d9d_dist import UserError
from d9d_modules.pooling import Pooling, pool

MASK = torch.tensor([[1, 1, 1, 0], [0, 0, 1, 1], [1, 1, 1, 1], [0, 0, 0, 0], [0, 1, 0, 0]])
"""Masks: right padding, left padding, no padding, only padding, and padding around one token."""


@pytest.mark.parametrize(("pooling", "position"), [("last", [2, 3, 3, None, 1]), ("first", [0, 2, 0, None, 1])])
@pytest.mark.parametrize("dtype", [torch.bool, torch.int64])
def test_pooling_takes_the_first_or_last_token(
    pooling: Pooling, position: list[int | None], dtype: torch.dtype
) -> None:
    hidden = torch.randn(5, 4, 3)
    pooled = pool(hidden, MASK.to(dtype), pooling=pooling)
    for row, index in enumerate(position):
        expected = torch.zeros(3) if index is None else hidden[row, index]
        assert torch.equal(pooled[row], expected)


def test_the_mean_of_the_tokens_is_computed_in_float32() -> None:
    hidden = 100 + torch.randn(5, 4, 3).bfloat16()
    pooled = pool(hidden, MASK, pooling="mean")
    assert pooled.dtype == torch.bfloat16
    for row, mask in enumerate(MASK.bool()):
        expected = hidden[row, mask].double().mean(0).bfloat16() if mask.any() else torch.zeros(3).bfloat16()
        torch.testing.assert_close(pooled[row], expected, rtol=0, atol=0)


@pytest.mark.parametrize("pooling", ["last", "mean", "first"])
def test_without_a_mask_every_position_is_a_token(pooling: Pooling) -> None:
    hidden = torch.randn(2, 3, 4, dtype=torch.float64)
    expected = {"last": hidden[:, -1], "mean": hidden.mean(1), "first": hidden[:, 0]}
    torch.testing.assert_close(pool(hidden, pooling=pooling), expected[pooling])


def test_only_pooled_tokens_have_gradients() -> None:
    hidden = torch.randn(5, 4, 3, dtype=torch.float64, requires_grad=True)
    (gradient,) = torch.autograd.grad(pool(hidden, MASK, pooling="mean").sum(), hidden)
    counts = MASK.sum(1, keepdim=True).clamp(min=1)
    torch.testing.assert_close(gradient, (MASK / counts).double().unsqueeze(-1).expand(5, 4, 3))


def test_an_invalid_mask_or_pooling_raises() -> None:
    hidden, pooling = torch.randn(2, 3, 4), "max"
    with pytest.raises(UserError, match=r"mask has shape \(2, 4\); expected \(2, 3\), one value for each position"):
        pool(hidden, torch.ones(2, 4), pooling="mean")
    unknown: Any = pooling
    with pytest.raises(UserError, match=r"pooling = 'max'; expected one of last, mean, first"):
        pool(hidden, pooling=unknown)


@pytest.mark.parametrize("pooling", ["last", "mean", "first"])
def test_rows_of_length_zero_are_pooled_to_zeros(pooling: Any) -> None:
    hidden = torch.randn(2, 0, 4, requires_grad=True)
    pooled = pool(hidden, pooling=pooling)
    assert torch.equal(pooled, torch.zeros(2, 4))
    pooled.sum().backward()
