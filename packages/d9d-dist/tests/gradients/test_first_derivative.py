from typing import Any

import pytest
import torch
from torch import Tensor

from d9d_dist import UserError
from d9d_dist.gradients.first_derivative import first_derivative_only


class _Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    @first_derivative_only("a cube")
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return gradients[0] * 3 * x**2


def test_first_derivatives_are_computed_and_second_ones_are_errors() -> None:
    x = torch.tensor([2.0, -3.0], requires_grad=True)
    (gradient,) = torch.autograd.grad(_Cube.apply(x).sum(), x)
    assert gradient.tolist() == [12.0, 27.0]
    with pytest.raises(UserError, match="got a backward pass with create_graph=True through a cube; expected first"):
        torch.autograd.grad(_Cube.apply(x).sum(), x, create_graph=True)
