from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from d9d_loop.job.backward_walk import walk_backward


def test_gradients_have_the_dtype_of_their_variables() -> None:
    def loss(weight: nn.Parameter, x: torch.Tensor) -> torch.Tensor:
        return ((weight * 2) * x @ x.T).square().sum()

    x = torch.randn(3, 3)
    walked, expected = (nn.Parameter(torch.ones(3, dtype=torch.bfloat16)) for _ in range(2))
    walk_backward(loss(walked, x))
    loss(expected, x).backward()
    assert walked.grad is not None
    assert expected.grad is not None
    assert walked.grad.dtype == torch.bfloat16
    assert torch.equal(walked.grad, expected.grad)


def test_activations_of_a_checkpointed_block_are_recomputed_once() -> None:
    calls = []

    def block(x: Tensor) -> Tensor:
        calls.append(x)
        return x.sin().exp().square()

    x = torch.ones(3, requires_grad=True)
    out: Any = checkpoint(block, x, use_reentrant=False)
    walk_backward(out.sum())
    assert len(calls) == 2
    assert x.grad is not None
    torch.testing.assert_close(x.grad, torch.autograd.grad(block(x).sum(), x)[0])
