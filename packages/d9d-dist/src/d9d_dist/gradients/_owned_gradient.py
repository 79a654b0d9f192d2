"""Gradients with memory of their own, for tensors inside a DTensor, where autograd cannot detect shared memory.

Autograd stores a gradient in `.grad` without a copy if no other tensor refers to the gradient, and later accumulates
into `.grad` in place. Gradients may be shared: both operands of a sum receive the same tensor. A gradient wrapped as a
DTensor always looks unshared, so it is copied before wrapping, as DDP copies gradients into buckets.
"""

from typing import Any

import torch

from d9d_dist.errors import UserError


def own_gradient(x: torch.Tensor) -> torch.Tensor:
    """Return `x` with a gradient that is contiguous and owns its memory."""
    return _OwnGradient.apply(x)


class _OwnGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        if not torch.compiler.is_compiling():  # a traced backward may not read the layout
            refuse_sparse(gradients[0])
        return gradients[0].clone(memory_format=torch.contiguous_format)


def refuse_sparse(gradient: torch.Tensor, owner: str = "a parameter") -> None:
    """Raise `UserError` if a gradient is sparse."""
    if gradient.layout != torch.strided:
        raise UserError(
            f"the gradient of {owner}, of shape {tuple(gradient.shape)}, is sparse; expected a dense gradient, which "
            "norms, reductions and optimizers need. Set sparse=False in nn.Embedding or F.embedding."
        )
