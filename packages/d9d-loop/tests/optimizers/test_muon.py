import re
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from d9d_dist import UserError
from d9d_loop.optimizers import Muon, orthogonalize
from d9d_loop.optimizers.muon import Scale


def _reference(x: Tensor, num_iterations: int) -> Tensor:
    """Apply the quintic polynomial of the iteration to singular values."""
    u, s, vt = torch.linalg.svd(x / x.norm(), full_matrices=False)
    for _ in range(num_iterations):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    return u @ s.diag() @ vt


@pytest.mark.parametrize("shape", [(4, 4), (3, 8), (8, 3), (1, 5)], ids=str)
def test_singular_values_follow_the_quintic(shape: tuple[int, int]) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for num_iterations in (1, 5):
        found = orthogonalize(x, num_iterations=num_iterations)
        torch.testing.assert_close(found, _reference(x, num_iterations), rtol=1e-9, atol=1e-9)


def test_a_stack_is_updated_per_matrix() -> None:
    stack = torch.randn(2, 3, 5, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    found = orthogonalize(stack)
    assert found.shape == stack.shape
    for i in range(2):
        for j in range(3):
            torch.testing.assert_close(found[i, j], orthogonalize(stack[i, j]), rtol=1e-10, atol=1e-10)
    three = orthogonalize(stack[0])
    torch.testing.assert_close(three, found[0], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("scale", ["original", "match_rms_adamw"])
@pytest.mark.parametrize("nesterov", [True, False])
def test_updates_equal_torch(scale: Scale, nesterov: bool) -> None:
    """torch orthogonalizes in bfloat16, as d9d does for float32, so float32 is compared."""
    draws = torch.Generator().manual_seed(0)
    ours, theirs = (
        [
            torch.randn(shape, generator=torch.Generator().manual_seed(1)).requires_grad_()
            for shape in ((16, 8), (8, 24))
        ]
        for _ in range(2)
    )
    mine = Muon(ours, lr=0.1, momentum=0.9, nesterov=nesterov, weight_decay=0.2, scale=scale)
    other = torch.optim.Muon(theirs, lr=0.1, momentum=0.9, nesterov=nesterov, weight_decay=0.2, adjust_lr_fn=scale)
    for _ in range(4):
        for mine_w, other_w in zip(ours, theirs, strict=True):
            mine_w.grad = torch.randn(mine_w.shape, generator=draws)
            other_w.grad = mine_w.grad.clone()
        mine.step()
        other.step()
    for mine_w, other_w in zip(ours, theirs, strict=True):
        # Each of 4 steps rounds the decay, the scaled update and their sum, on both sides, by half an eps each.
        rounding = 4 * 3 * torch.finfo(torch.float32).eps * other_w.abs().max().item()
        torch.testing.assert_close(mine_w, other_w, rtol=0, atol=rounding)


def test_vectors_are_refused() -> None:
    message = re.escape(
        "Muon updates matrices, but got bias [3]. Use another optimizer for them; in a configuration: [["
    )
    with pytest.raises(UserError, match=message):
        Muon(nn.Linear(2, 3).named_parameters())
    with pytest.raises(UserError, match=r"got parameter 1 \[3\]"):
        Muon(nn.Linear(2, 3).parameters())
    with pytest.raises(UserError, match="scale = 'adam'; expected one of match_rms_adamw, original"):
        Muon(nn.Linear(2, 3, bias=False).parameters(), scale=cast(Any, "adam"))
