import copy
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from d9d_dist import UserError
from d9d_modules import CheckpointPolicy, SwiGLU, checkpoint_activations


class _Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = SwiGLU(4, 6, init_std=1.0)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return cast("Tensor", self.block(x))


@pytest.mark.parametrize(("policy", "calls"), [("none", 1), ("full", 2)])
def test_forward_runs_again_in_backward_and_gradients_stay(policy: CheckpointPolicy, calls: int) -> None:
    module = _Counting()
    x = torch.randn(3, 4, requires_grad=True)
    inputs = (x, *module.parameters())
    names = list(module.state_dict())
    expected = torch.autograd.grad(module(x).square().sum(), inputs)
    module.calls = 0
    checkpoint_activations(module, policy=policy)
    got = torch.autograd.grad(module(x).square().sum(), inputs)
    assert module.calls == calls
    assert list(module.state_dict()) == names
    torch.testing.assert_close(got, expected, rtol=0, atol=0)


def test_a_copy_runs_its_own_parameters() -> None:
    module = _Counting()
    checkpoint_activations(module)
    other = copy.deepcopy(module)
    nn.init.zeros_(other.block.down_proj.weight)
    x = torch.randn(2, 4)
    assert other(x).eq(0).all()
    assert module(x).ne(0).any()


def test_an_unknown_policy_is_refused() -> None:
    policy: Any = "half"
    with pytest.raises(UserError, match=r"checkpoint policy 'half'; expected one of none, full"):
        checkpoint_activations(_Counting(), policy=policy)
