from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

from d9d_loop.optimizers import LocalAdam, LocalAdamW, LocalSGD
from d9d_loop.optimizers.optimizer import AdamWConfig


def _steps(make: Callable[..., Optimizer], **settings: object) -> torch.Tensor:
    draws = torch.Generator().manual_seed(0)
    weights = [torch.randn(shape, generator=draws, dtype=torch.float64).requires_grad_() for shape in ((3, 4), (5,))]
    optimizer = make(weights, lr=0.1, weight_decay=0.2, **settings)
    for _ in range(4):
        for weight in weights:
            weight.grad = torch.randn(weight.shape, generator=draws, dtype=torch.float64)
        optimizer.step()
    return torch.cat([weight.detach().flatten() for weight in weights])


@pytest.mark.parametrize(
    ("ours", "theirs", "settings"),
    [
        (LocalAdam, torch.optim.Adam, {"betas": (0.8, 0.9)}),
        (LocalAdamW, torch.optim.AdamW, {"betas": (0.8, 0.9)}),
        (LocalAdamW, torch.optim.AdamW, {"fused": True}),
        (LocalSGD, torch.optim.SGD, {}),
        (LocalSGD, torch.optim.SGD, {"momentum": 0.9}),
        (LocalSGD, torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
    ],
)
def test_updates_equal_torch(ours: type[Optimizer], theirs: type[Optimizer], settings: dict[str, object]) -> None:
    torch.testing.assert_close(_steps(ours, **settings), _steps(theirs, **settings), rtol=1e-14, atol=1e-14)


def _values_after_steps(make: Callable[..., Optimizer], slices: bool) -> torch.Tensor:
    draws = torch.Generator().manual_seed(0)
    whole = torch.randn(4, 6, generator=draws)
    weight = nn.Parameter(whole[:, :2] if slices else whole)
    optimizer = make([{"params": [("weight", weight)], "lr": 0.1, "weight_decay": 0.1}])
    for _ in range(3):
        weight.grad = torch.randn(weight.shape[::-1], generator=draws).T
        optimizer.step()
    return whole


@pytest.mark.parametrize("slices", [False, True])
def test_slices_of_tensors_and_transposed_gradients_are_updated_as_by_separate_operations(slices: bool) -> None:
    """Fused kernels of torch 2.15 ignore strides on CPUs."""

    def plain(groups: list[dict[str, Any]]) -> Optimizer:
        return torch.optim.AdamW(groups, betas=(0.9, 0.95), foreach=False)

    torch.testing.assert_close(_values_after_steps(AdamWConfig().make, slices), _values_after_steps(plain, slices))
